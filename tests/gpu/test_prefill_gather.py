"""The gather path of prefill against NumPy in float64, by the rule of `test_prefill`.

8-bit pools under Hopper's kernel: append, gather and prefill, launched as the plugin launches them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gpu import matrix
from gpu.decode_cases import Case, Inputs, make_inputs
from gpu.prefill_device import Array, PrefillStep
from gpu.prefill_gather_device import GatherStep
from gpu.test_prefill import CHUNKED, FRESH, MIXED, name_of, reference, same_bytes
from gpu.test_prefill_sm90 import LONG, explain

from paged_trt.plugins import cuda
from paged_trt.plugins.dtypes import DType

pytestmark = pytest.mark.gpu

BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
KV_TYPES = (FP8, INT8)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if cuda.device_arch() != "sm_90":
        pytest.skip(f"the kernels are for sm_90, this device is {cuda.device_arch()}")


LAYOUT_CASES = [
    Case(**layout, activation=activation, kv=kv, head_dim=dim)
    for activation, kv, dim in (
        (BF16, FP8, 64),
        (BF16, FP8, 128),
        (BF16, FP8, 256),
        (BF16, INT8, 128),
        (FP16, FP8, 128),
        (FP16, INT8, 64),
        (FP16, INT8, 256),
    )
    for layout in (FRESH, CHUNKED, MIXED, LONG)
]
GROUPS = [Case(**MIXED, kv=INT8, head_dim=64, group=group, has_sinks=True) for group in (3, 16)] + [
    Case(**CHUNKED, kv=FP8, group=group) for group in (1, 7)
]
CHOSEN: tuple[dict[str, Any], ...] = (
    {"has_sinks": True},
    {"rope": 1},
    {"rope": 2, "rotary_dim": 12},
    {"window": 1},
    {"window": 64},
    {"window": 100},
    {"window": 128},
    {"window": 700, "has_sinks": True},
    {"softcap": 5.0},
    {"rope": 1, "window": 300, "softcap": 20.0, "has_sinks": True, "num_kv_heads": 3},
)
FEATURES = [
    dataclasses.replace(base, **features)
    for base in (Case(**CHUNKED, kv=FP8), Case(**MIXED, activation=FP16, kv=INT8, head_dim=64))
    for features in CHOSEN
] + [
    Case(**CHUNKED, kv=INT8, head_dim=256, window=100, has_sinks=True, rope=1),
    Case(**LONG, kv=FP8, window=1000),
]
EXTREMES = [
    Case(**MIXED, kv=FP8, query_factor=1e20, rope=1),
    Case(**MIXED, kv=FP8, query_factor=1e30),
    Case(**MIXED, kv=INT8, query_factor=1e-30),
    Case(**MIXED, kv=INT8, query_factor=1e30, softcap=4.0, rope=1, window=70),
    Case(**FRESH, activation=FP16, kv=FP8, query_factor=8192.0, rope=2),
    Case(lengths=(1, 2, 3) * 70, new_tokens=(1, 2, 3) * 70, padding_rows=46, kv=FP8),
    Case(lengths=(3000,), new_tokens=(3000,), num_kv_heads=1, padding_rows=0, kv=INT8),
    Case(lengths=(2049, 1), new_tokens=(2049, 1), num_kv_heads=5, padding_rows=3, kv=FP8),
]


def check_step(case: Case, inputs: Inputs, **options: Any) -> Array:
    step = GatherStep(case, inputs, **options)
    output = step.run()
    print(step.prefill_plan)  # noqa: T201  # shown where the test fails
    expected, allowed = reference(case, inputs, step)
    error = np.abs(output.astype(np.float64) - expected)
    assert (error <= allowed).all(), f"{step.prefill_plan}: {explain(error, allowed)}"
    matrix.note_worst("prefill_gather", case, error, allowed)
    padding = output[inputs["query_start_offsets"][-1] :]
    assert not padding.astype(np.float32).any()
    return output


@pytest.mark.parametrize("case", LAYOUT_CASES + GROUPS + FEATURES + EXTREMES, ids=name_of)
def test_agrees_with_float64(case: Case) -> None:
    """As planned, which often splits such small steps, and by few blocks one after another."""
    inputs = make_inputs(case)
    check_step(case, inputs)
    dealt = check_step(case, inputs, partitions=1)
    assert same_bytes(check_step(case, inputs, partitions=1, takes_tiles=True), dealt)


@pytest.mark.parametrize("partitions", [1, 2, 8])
@pytest.mark.parametrize(
    "case",
    [
        Case(**CHUNKED, kv=FP8),
        Case(**LONG, activation=FP16, kv=INT8, head_dim=64, has_sinks=True),
        Case(**MIXED, kv=INT8, window=300),
        Case(**LONG, kv=FP8, head_dim=256, rope=1),
        Case(**MIXED, kv=FP8, softcap=3.0),
    ],
    ids=name_of,
)
def test_split_keys_agree_with_float64(case: Case, partitions: int) -> None:
    check_step(case, make_inputs(case), partitions=partitions)


@pytest.mark.parametrize("activation", [BF16, FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("window", [-1, 200])
def test_gathered_pages_are_those_of_the_pool_unscaled(
    activation: DType, kv: DType, window: int
) -> None:
    case = Case(**MIXED, activation=activation, kv=kv, window=window)
    inputs = make_inputs(case)
    step = GatherStep(case, inputs)
    step.run()
    table, gathered = step.gathered()
    pools = [step.host_pool(name, inputs[name]) for name in ("key_pool", "value_pool")]
    offsets = inputs["query_start_offsets"]
    slot = 0
    for row, past in enumerate(inputs["past_lens"].tolist()):
        end = past + int(offsets[row + 1] - offsets[row])
        if end == past:
            continue
        begin = 0 if window < 0 else max(0, past - window + 1)
        for index in range(begin // 128, (end - 1) // 128 + 1):
            assert table[row, index] == slot
            page = inputs["page_table"][row, index]
            seen = np.arange(index * 128, (index + 1) * 128)
            is_read = ((seen >= begin) & (seen < end))[None, :, None]
            for pool, pages in zip(pools, gathered, strict=True):
                wanted = np.where(is_read, pool[page].astype(np.float32), 0)
                assert np.array_equal(pages[slot].astype(np.float32), wanted)
            slot += 1


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("window", [-1, 100])
def test_page_order_poison_garbage_and_repetition_change_no_bit(kv: DType, window: int) -> None:
    case = Case(**CHUNKED, kv=kv, rope=1, window=window)
    outputs = [
        GatherStep(variant, make_inputs(variant), garbage=garbage).run()
        for variant, garbage in (
            (case, 255),
            (case, 255),
            (dataclasses.replace(case, identity_pages=True), 255),
            (dataclasses.replace(case, poison=0.0), 255),
            (case, 0),
            (case, 1),
        )
    ]
    assert all(same_bytes(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("partitions", [1, 2])
def test_pages_before_the_window_are_not_read(kv: DType, partitions: int) -> None:
    """Their ids may be gone, and what comes before the window in its first page is NaN."""
    case = Case(lengths=(900, 1000), new_tokens=(70, 1), padding_tokens=1, kv=kv, window=100)
    inputs = make_inputs(case)
    wanted = check_step(case, inputs, partitions=partitions)
    for row, first in enumerate((900 - 70 - 99, 1000 - 1 - 99)):
        page = inputs["page_table"][row, first // 128]
        inputs["key_pool"][page, :, : first % 128] = 127 if kv is INT8 else np.nan
        inputs["value_pool"][page, :, : first % 128] = 127 if kv is INT8 else np.nan
        inputs["page_table"][row, : first // 128] = -1
    assert same_bytes(check_step(case, inputs, partitions=partitions), wanted)


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_bad_page_ids_are_masked_and_never_read(
    kv: DType, head_dim: int, has_sinks: bool, partitions: int
) -> None:
    case = Case(**CHUNKED, kv=kv, has_sinks=has_sinks, head_dim=head_dim)
    inputs = make_inputs(case)
    table = inputs["page_table"]
    table[0, 0] = len(inputs["key_pool"])  # nothing visible at all
    table[3, 1] = -7  # the page that is written
    table[5, 2:5] = np.iinfo(np.int32).max
    table[6, 0] = np.iinfo(np.int32).min
    table[7, 1:] = 1 << 30
    output = check_step(case, inputs, partitions=partitions)
    assert not output[:63].astype(np.float32).any()


def test_positions_beyond_the_table_are_masked() -> None:
    case = Case(lengths=(500, 200), new_tokens=(300, 200), padding_rows=0, kv=FP8)
    inputs = make_inputs(case)
    inputs["page_table"] = np.ascontiguousarray(inputs["page_table"][:, :2])
    check_step(case, inputs)


def test_sequences_that_share_pages() -> None:
    """A prefix of two pages that both have; each gets a copy of its own."""
    case = Case(lengths=(600, 900), new_tokens=(70, 200), kv=FP8)
    inputs = make_inputs(case)
    inputs["page_table"][1, :2] = inputs["page_table"][0, :2]
    check_step(case, inputs)


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("sizes", [(300, 1, 128, 571), (1, 999), (64, 64, 872)])
def test_chunks_equal_one_piece(kv: DType, sizes: tuple[int, ...]) -> None:
    case = Case(lengths=(1000,), new_tokens=(1000,), padding_rows=0, kv=kv, rope=1, group=4)
    inputs = make_inputs(case)
    whole = GatherStep(case, inputs)
    wanted = whole.run().astype(np.float64)
    pools: dict[str, Any] | None = None
    parts, first = [], 0
    for size in sizes:
        chunk = dict(inputs)
        # One token more than sequences would make a step of one token a decode step.
        padding = 1 if size == 1 else 0
        for name in ("query", "key", "value"):
            chunk[name] = inputs[name][first : first + size + padding]
        chunk["query_start_offsets"] = np.array([0, size], np.int32)
        chunk["past_lens"] = np.array([first], np.int32)
        step = GatherStep(case, chunk, pools)
        parts.append(step.run()[:size].astype(np.float64))
        pools = {name: step.tensors[name] for name in ("key_pool", "value_pool")}
        first += size
    error = np.abs(np.concatenate(parts) - wanted)
    allowed = reference(case, inputs, whole)[1]
    assert (error <= allowed).all(), explain(error, allowed)


def test_pools_past_2_to_the_31_elements() -> None:
    import torch

    case = Case(**MIXED, kv=FP8, num_kv_heads=8, identity_pages=True)
    inputs = make_inputs(case)
    wanted = GatherStep(case, inputs).run()
    count = len(inputs["key_pool"])
    num_pages = 2**31 // (8 * 128 * 128) + 64
    pools = {}
    for name in ("key_pool", "value_pool"):
        own = torch.from_numpy(inputs[name].view(np.uint8).reshape(-1)).cuda()
        size = own.numel() // count * num_pages
        pools[name] = torch.zeros(size, dtype=torch.uint8, device="cuda")
        pools[name][-own.numel() :] = own
    moved = dict(inputs)
    table = inputs["page_table"]
    moved["page_table"] = np.where(table >= 0, table + (num_pages - count), table)
    assert same_bytes(GatherStep(case, moved, pools).run(), wanted)


@pytest.mark.parametrize("partitions", [1, 4])
def test_graph_replay_equals_eager(partitions: int) -> None:
    import torch

    case = Case(**CHUNKED, kv=FP8, rope=2, has_sinks=True)
    inputs = make_inputs(case)
    wanted = check_step(case, inputs, partitions=partitions)
    step = GatherStep(case, inputs, partitions=partitions, takes_tiles=partitions == 1)
    step.prepared  # noqa: B018  # loaded before the capture, as an engine does
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.launch_all()
    for byte in (255, 0, 1):
        step.output.fill_(255)
        step.workspace.fill_(byte)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(step.host_output(), wanted)


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
def test_many_steps_on_one_workspace_are_the_same_every_time(kv: DType) -> None:
    """Layers share the workspace, and each gather starts while an append runs."""
    import torch

    case = Case(
        lengths=(4000, 9001, 463, 905, 6143), new_tokens=(4000, 1, 130, 777, 2048),
        num_kv_heads=4, padding_rows=0, kv=kv,
    )  # fmt: skip
    inputs = make_inputs(case)
    step = GatherStep(case, inputs)
    wanted = check_step(case, inputs)
    other = GatherStep(
        dataclasses.replace(case, seed=1), make_inputs(dataclasses.replace(case, seed=1))
    )
    other.workspace = step.workspace
    expected = other.run()
    for _ in range(20):
        for each in (step, other):
            each.output.fill_(255)
        step.launch_all()
        other.launch_all()
        torch.cuda.synchronize()
        assert same_bytes(step.host_output(), wanted)
        assert same_bytes(other.host_output(), expected)


def test_both_kernels_agree() -> None:
    """The portable kernel on the same step, within what both may be off."""
    case = Case(**LONG, kv=FP8, rope=1, has_sinks=True)
    inputs = make_inputs(case)
    step = GatherStep(case, inputs)
    gathered = step.run().astype(np.float64)
    direct = PrefillStep(case, inputs).run().astype(np.float64)
    error, allowed = np.abs(gathered - direct), 2 * reference(case, inputs, step)[1]
    assert (error <= allowed).all(), explain(error, allowed)
