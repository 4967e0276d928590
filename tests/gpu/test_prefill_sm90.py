"""Hopper's prefill kernels against NumPy in float64, by the rule of `test_prefill`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gpu import matrix
from gpu.decode_cases import Case, Inputs, make_inputs
from gpu.prefill_device import Array
from gpu.prefill_sm90_device import PrefillSm90Step, with_partitions
from gpu.test_prefill import CHUNKED, FRESH, MIXED, name_of, reference, same_bytes

from paged_trt.plugins import cuda
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.kernels_prefill_sm90 import refusal
from paged_trt.plugins.launch.registry import KernelPath

pytestmark = pytest.mark.gpu

BF16, FP16 = DType.BFLOAT16, DType.FLOAT16
LONG = {"lengths": (8192, 5000, 4100), "new_tokens": (130, 1, 33), "padding_tokens": 1}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if cuda.device_arch() != "sm_90":
        pytest.skip(f"the kernels are for sm_90, this device is {cuda.device_arch()}")


def both(dtype: DType) -> dict[str, DType]:
    return {"activation": dtype, "kv": dtype}


LAYOUT_CASES = [
    Case(**layout, **both(dtype), head_dim=dim)
    for dtype, dims in ((BF16, (64, 128, 256)), (FP16, (64, 128)))
    for dim in dims
    for layout in (FRESH, CHUNKED, MIXED, LONG)
]
GROUPS = [Case(**MIXED, head_dim=64, group=group, has_sinks=True) for group in (3, 16)] + [
    Case(**CHUNKED, group=group) for group in (1, 7)
]
PLAIN: tuple[dict[str, Any], ...] = (
    {"has_sinks": True},
    {"rope": 1},
    {"rope": 2},
    {"rope": 1, "rotary_dim": 32},
    {"rope": 2, "rotary_dim": 12},
    {"rope": 1, "window": 300, "softcap": 20.0, "has_sinks": True, "num_kv_heads": 3},
)
# Every combination of window and softcap is a kernel of its own.
SPECIALISED: tuple[dict[str, Any], ...] = (
    {"window": 1},
    {"window": 64},
    {"window": 100},
    {"window": 128},
    {"window": 700, "has_sinks": True},
    {"softcap": 5.0},
)
FEATURES = [
    dataclasses.replace(base, **features)
    for base, chosen in (
        (Case(**CHUNKED), PLAIN + SPECIALISED),
        (Case(**MIXED, **both(FP16), head_dim=64), PLAIN),
    )
    for features in chosen
] + [
    Case(**CHUNKED, head_dim=256, window=100, has_sinks=True, rope=1),
    Case(**LONG, window=1000),
]
EXTREMES = [
    Case(**MIXED, query_factor=1e20, rope=1),
    Case(lengths=(1, 2, 3) * 70, new_tokens=(1, 2, 3) * 70, padding_rows=46),
    Case(lengths=(3000,), new_tokens=(3000,), num_kv_heads=1, padding_rows=0),
    Case(lengths=(2049, 1), new_tokens=(2049, 1), num_kv_heads=5, padding_rows=3),
]


def explain(error: Array, allowed: Array) -> str:
    """Where a result is wrong, coarsely: enough to find a bug from the log alone."""
    bad = ~(error <= allowed)
    tokens = np.flatnonzero(bad.any(axis=(1, 2)))
    heads = np.flatnonzero(bad.any(axis=(0, 2)))
    columns = np.flatnonzero(bad.any(axis=(0, 1)))
    worst = np.unravel_index(np.nan_to_num(error - allowed, nan=np.inf).argmax(), error.shape)
    return (
        f"{bad.sum()} of {bad.size} wrong; {len(tokens)} tokens {tokens[:12]}..{tokens[-3:]}, "
        f"heads {heads[:16]}, {len(columns)} columns {columns[:8]}..{columns[-3:]}; worst "
        f"{error[worst]} at {worst}, allowed {allowed[worst[0]]}; not finite: "
        f"{(~np.isfinite(error)).sum()}"
    )


def check_step(
    case: Case, inputs: Inputs, partitions: int = 0, *, takes_tiles: bool = False
) -> Array:
    """Output with so many blocks for the keys of a tile, 0: as planned."""
    step = PrefillSm90Step(case, inputs)
    assert refusal(step.request) is None
    if partitions:
        plan = with_partitions(step, partitions)
        step.plan_override = dataclasses.replace(plan, takes_tiles=takes_tiles)
    output = step.run()
    print(step.prefill_plan)  # noqa: T201  # shown where the test fails
    if step.prefill_plan.takes_tiles:
        assert step.counter.item() == 0  # as it was, for whoever launches again
    expected, allowed = reference(case, inputs, step)
    error = np.abs(output.astype(np.float64) - expected)
    assert (error <= allowed).all(), f"{step.prefill_plan}: {explain(error, allowed)}"
    matrix.note_worst("prefill_sm90", case, error, allowed)
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
        Case(**CHUNKED),
        Case(**LONG, **both(FP16), head_dim=64, has_sinks=True),
        Case(**MIXED, window=300),
        Case(**LONG, head_dim=256, rope=1),
        Case(**MIXED, softcap=3.0),
    ],
    ids=name_of,
)
def test_split_keys_agree_with_float64(case: Case, partitions: int) -> None:
    check_step(case, make_inputs(case), partitions)


@pytest.mark.parametrize("factor", [6.0, 40.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("partitions", [1, 4])
def test_scores_far_apart(dtype: DType, factor: float, partitions: int) -> None:
    """References are outgrown by far, again and again: tiles are done twice."""
    case = Case(**LONG, **both(dtype))
    inputs = make_inputs(case)
    inputs["query"] = (inputs["query"].astype(np.float32) * factor).astype(dtype.numpy)
    # Later pages win: the maximum grows towards the first one that is looked at last.
    inputs["key_pool"][inputs["page_table"][0, :8]] *= 2
    check_step(case, inputs, partitions)


@pytest.mark.parametrize(
    ("dtype", "window"), [(BF16, -1), (BF16, 100), (FP16, -1)], ids=["bf16", "window", "fp16"]
)
def test_page_order_poison_and_repetition_change_no_bit(dtype: DType, window: int) -> None:
    case = Case(**CHUNKED, **both(dtype), rope=1, window=window)
    outputs = [
        PrefillSm90Step(variant, make_inputs(variant)).run()
        for variant in (
            case,
            case,
            dataclasses.replace(case, identity_pages=True),
            dataclasses.replace(case, poison=0.0),
        )
    ]
    assert all(same_bytes(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("partitions", [1, 2])
def test_pages_before_the_window_are_not_read(partitions: int) -> None:
    """Their ids may be gone, and what comes before the window in its first page is NaN."""
    case = Case(lengths=(900, 1000), new_tokens=(70, 1), padding_tokens=1, window=100)
    inputs = make_inputs(case)
    wanted = check_step(case, inputs, partitions)
    for row, first in enumerate((900 - 70 - 99, 1000 - 1 - 99)):
        page = inputs["page_table"][row, first // 128]
        inputs["key_pool"][page, :, : first % 128] = np.nan
        inputs["value_pool"][page, :, : first % 128] = np.nan
        inputs["page_table"][row, : first // 128] = -1
    assert same_bytes(check_step(case, inputs, partitions), wanted)


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_bad_page_ids_are_masked_and_never_read(
    head_dim: int, has_sinks: bool, partitions: int
) -> None:
    case = Case(**CHUNKED, has_sinks=has_sinks, head_dim=head_dim)
    inputs = make_inputs(case)
    table = inputs["page_table"]
    table[0, 0] = len(inputs["key_pool"])  # nothing visible at all
    table[3, 1] = -7  # the page that is written
    table[5, 2:5] = np.iinfo(np.int32).max
    table[6, 0] = np.iinfo(np.int32).min
    table[7, 1:] = 1 << 30
    output = check_step(case, inputs, partitions)
    assert not output[:63].astype(np.float32).any()


def test_positions_beyond_the_table_are_masked() -> None:
    case = Case(lengths=(500, 200), new_tokens=(300, 200), padding_rows=0)
    inputs = make_inputs(case)
    inputs["page_table"] = np.ascontiguousarray(inputs["page_table"][:, :2])
    check_step(case, inputs)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("sizes", [(300, 1, 128, 571), (1, 999), (64, 64, 872)])
def test_chunks_equal_one_piece(dtype: DType, sizes: tuple[int, ...]) -> None:
    case = Case(lengths=(1000,), new_tokens=(1000,), padding_rows=0, rope=1, group=4, **both(dtype))
    inputs = make_inputs(case)
    whole = PrefillSm90Step(case, inputs)
    wanted = whole.run().astype(np.float64)
    pools: dict[str, Any] | None = None
    parts, first = [], 0
    for size in sizes:
        chunk = dict(inputs)
        for name in ("query", "key", "value"):
            chunk[name] = inputs[name][first : first + size]
        chunk["query_start_offsets"] = np.array([0, size], np.int32)
        chunk["past_lens"] = np.array([first], np.int32)
        step = PrefillSm90Step(case, chunk, pools)
        parts.append(step.run().astype(np.float64))
        pools = {name: step.tensors[name] for name in ("key_pool", "value_pool")}
        first += size
    error = np.abs(np.concatenate(parts) - wanted)
    allowed = reference(case, inputs, whole)[1]
    assert (error <= allowed).all(), explain(error, allowed)


def test_pools_past_2_to_the_31_elements() -> None:
    import torch

    case = Case(**MIXED, num_kv_heads=8, identity_pages=True)
    inputs = make_inputs(case)
    wanted = PrefillSm90Step(case, inputs).run()
    count = len(inputs["key_pool"])
    num_pages = 2**31 // (8 * 128 * 128) + 64
    pools = {}
    for name in ("key_pool", "value_pool"):
        own = torch.from_numpy(inputs[name].view(np.uint8).reshape(-1)).cuda()
        pools[name] = torch.zeros(
            own.numel() // count * num_pages, dtype=torch.uint8, device="cuda"
        )
        pools[name][-own.numel() :] = own
    moved = dict(inputs)
    table = inputs["page_table"]
    moved["page_table"] = np.where(table >= 0, table + (num_pages - count), table)
    assert same_bytes(PrefillSm90Step(case, moved, pools).run(), wanted)


@pytest.mark.parametrize("partitions", [1, 4])
def test_graph_replay_equals_eager(partitions: int) -> None:
    import torch

    case = Case(**CHUNKED, rope=2, has_sinks=True)
    inputs = make_inputs(case)
    wanted = check_step(case, inputs, partitions)
    step = PrefillSm90Step(case, inputs)
    step.plan_override = with_partitions(step, partitions)
    step.launch_prefill  # noqa: B018  # loaded before the capture, as an engine does
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.launch(KernelPath.APPEND)
        step.prefill()
    for _ in range(3):
        step.output.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(step.host_output(), wanted)


def test_strided_queries() -> None:
    """Queries inside a wider row, as a fused projection leaves them."""
    import torch

    case = Case(**MIXED)
    inputs = make_inputs(case)
    wanted = PrefillSm90Step(case, inputs).run()
    step = PrefillSm90Step(case, inputs)
    tokens = len(inputs["query"])
    rows = step.tensors["query"].view(tokens, -1)
    wide = torch.full((tokens, rows.shape[1] + 4096), 255, dtype=torch.uint8, device="cuda")
    wide[:, 2048 : 2048 + rows.shape[1]] = rows
    step.query = (wide.data_ptr() + 2048, wide.shape[1] // 2)
    assert same_bytes(step.run(), wanted)


def test_a_large_step_is_right_and_the_same_every_time() -> None:
    """8,192 tokens and a ragged batch: more tiles than blocks, all sections, every round."""
    import torch

    for lengths, past in (((8192,), (0,)), ((4000, 1, 130, 777, 2048), (0, 9000, 333, 128, 4095))):
        totals = tuple(new + old for new, old in zip(lengths, past, strict=True))
        case = Case(lengths=totals, new_tokens=lengths, num_kv_heads=4, padding_rows=0)
        inputs = make_inputs(case)
        step = PrefillSm90Step(case, inputs)
        first = step.run()
        for index in range(20):
            step = PrefillSm90Step(case, inputs, step.tensors).with_counter(index % 2 == 0)
            step.output.fill_(255)
            step.prefill()
            torch.cuda.synchronize()
            assert same_bytes(step.host_output(), first)
        error, allowed = large_error(step, inputs, first)
        assert error <= allowed, (error, allowed)


def large_error(step: PrefillSm90Step, inputs: Inputs, output: Array) -> tuple[float, float]:
    """Relative error of all heads of some rows, against float64 on the device."""
    import torch

    case, attention = step.case, step.case.attention
    shape = (-1, attention.num_kv_heads, 128, attention.head_dim)
    pools = [
        step.tensors[name].view(torch.bfloat16).view(shape) for name in ("key_pool", "value_pool")
    ]
    offsets, pasts = inputs["query_start_offsets"], inputs["past_lens"]
    results, wanted = [], []
    for row, total in enumerate(case.lengths):
        new = int(offsets[row + 1] - offsets[row])
        chosen = np.unique(np.concatenate([np.arange(0, new, 61), [new - 1]]))
        pages = torch.from_numpy(inputs["page_table"][row, : -(-total // 128)]).cuda().long()
        keys, values = (
            pool[pages].permute(1, 0, 2, 3).reshape(attention.num_kv_heads, -1, shape[3])[:, :total]
            for pool in pools
        )
        query = inputs["query"][offsets[row] + chosen].astype(np.float64)
        tokens = torch.from_numpy(query).cuda().unflatten(1, (attention.num_kv_heads, -1))
        scores = torch.einsum("tkgd,ksd->kgts", tokens, keys.double()) * attention.softmax_scale
        limits = torch.from_numpy(chosen + int(pasts[row])).cuda()
        hidden = torch.arange(total, device="cuda")[None] > limits[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        result = torch.einsum("kgts,ksd->tkgd", weights, values.double())
        wanted.append(result.flatten(1, 2).cpu().numpy())
        results.append(output[offsets[row] + chosen].astype(np.float64))
    difference = np.concatenate(results) - np.concatenate(wanted)
    return float(np.linalg.norm(difference) / np.linalg.norm(np.concatenate(wanted))), 4e-3
