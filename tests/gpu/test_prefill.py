"""The prefill kernel on the device against NumPy in float64, over the pools of the append kernel.

The rule: the error of each token row is at most twice that of a computation of the same precision,
and one rounding of the output.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gpu import matrix
from gpu.decode_cases import Case, Inputs, make_inputs
from gpu.prefill_device import Array, PrefillStep
from gpu.prefill_reference import allowed_error, attend

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.kernels_prefill import PrefillTile
from paged_trt.plugins.launch.registry import KernelPath

pytestmark = pytest.mark.gpu

BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
KV_TYPES = (FP16, BF16, FP8, INT8)
EDGES = (1, 63, 64, 65, 127, 128, 129, 1000)
# Whole prompts; continued ones at the edges of tiles and pages; both beside decoding rows.
FRESH = {"lengths": EDGES, "new_tokens": EDGES, "padding_tokens": 3}
CHUNKED = {
    "lengths": (64, 65, 128, 129, 192, 1000, 1000, 700),
    "new_tokens": (63, 2, 64, 1, 65, 128, 300, 257),
    "padding_tokens": 200,
}
MIXED = {"lengths": (1, 513, 130, 2000, 257), "new_tokens": (1, 1, 130, 1, 129)}
LAYOUTS = {"fresh": FRESH, "chunked": CHUNKED, "mixed": MIXED}

TYPES = [
    Case(**MIXED, activation=activation, kv=kv, head_dim=dim)
    for activation in (BF16, FP16)
    for kv in KV_TYPES
    for dim in (64, 128, 256)
]
HEAD_DIMS = [
    Case(**MIXED, kv=kv, head_dim=head_dim, value_head_dim=value_dim)
    for kv in (BF16, FP8, INT8)
    for head_dim, value_dim in ((80, 80), (96, 96), (192, 128), (64, 128), (16, 240), (112, 48))
]
GROUPS = [
    Case(**MIXED, kv=kv, head_dim=64, group=group, has_sinks=True)
    for kv in (BF16, INT8)
    for group in (1, 2, 3, 5, 6, 7, 8, 9, 11, 13, 16)
] + [Case(**MIXED, group=16), Case(**MIXED, kv=FP8, group=7), Case(**CHUNKED, group=5)]
FEATURES = [
    dataclasses.replace(base, **features)
    for base in (
        Case(**CHUNKED),
        Case(**MIXED, activation=FP16, kv=FP16, head_dim=64),
        Case(**CHUNKED, kv=FP8, group=1),
        Case(**FRESH, activation=FP16, kv=INT8, head_dim=96, group=3),
    )
    for features in (
        {},
        {"window": 1},
        {"window": 64},
        {"window": 100},
        {"window": 700, "has_sinks": True},
        {"softcap": 5.0},
        {"has_sinks": True},
        {"rope": 1},
        {"rope": 2},
        {"rope": 1, "rotary_dim": 10},
        {"rope": 2, "rotary_dim": 32},
        {"rope": 1, "window": 300, "softcap": 20.0, "has_sinks": True, "num_kv_heads": 3},
    )
]
EXTREMES = [
    Case(**MIXED, kv=FP8, query_factor=1e30),
    Case(**MIXED, kv=INT8, query_factor=1e-30),
    Case(**MIXED, kv=INT8, query_factor=1e30, softcap=4.0, rope=1, window=70),
    Case(**MIXED, query_factor=1e20, rope=1),
    Case(**FRESH, activation=FP16, kv=FP8, query_factor=8192.0, rope=2),
    Case(**FRESH, query_factor=-1.0),  # a negative softmax scale
    Case(lengths=(1, 2, 3) * 70, new_tokens=(1, 2, 3) * 70, padding_rows=46),
    Case(lengths=(3000,), new_tokens=(3000,), num_kv_heads=1, padding_rows=0),
]


def name_of(case: Case) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    hidden = {"lengths", "new_tokens", "padding_tokens", "poison"}
    layout = [name for name, parts in LAYOUTS.items() if parts["lengths"] == case.lengths]
    values = {field: getattr(case, field) for field in defaults if field not in hidden}
    kept = [
        f"{field}={value.value if isinstance(value, DType) else value}"
        for field, value in values.items()
        if value != defaults[field] or field in {"activation", "kv", "head_dim"}
    ]
    return "-".join([*(layout or [f"{len(case.lengths)}-rows"]), *kept])


def same_bytes(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()


def reference(case: Case, inputs: Inputs, step: PrefillStep) -> tuple[Array, Array]:
    """Output in float64 and the error allowed to each row, from pools that have been run over."""
    pools = [step.host_pool(name, inputs[name]) for name in ("key_pool", "value_pool")]
    expected = attend(case, inputs, *pools, rounded=False)
    return expected, allowed_error(case, attend(case, inputs, *pools, rounded=True), expected)


def check_step(case: Case, inputs: Inputs, tile: PrefillTile | None = None) -> Array:
    step = PrefillStep(case, inputs, tile=tile)
    output = step.run()
    expected, allowed = reference(case, inputs, step)
    error = np.abs(output.astype(np.float64) - expected)
    assert np.isfinite(error).all(), f"not finite at {np.argwhere(~np.isfinite(error))[:3]}"
    worst = np.unravel_index((error - allowed).argmax(), error.shape)
    assert (error <= allowed).all(), f"{error[worst]} at {worst}, allowed {allowed[worst[0]]}"
    matrix.note_worst("prefill", case, error, allowed)
    padding = output[inputs["query_start_offsets"][-1] :]
    assert not padding.astype(np.float32).any()
    return output


@pytest.mark.parametrize("case", TYPES + HEAD_DIMS + GROUPS + FEATURES + EXTREMES, ids=name_of)
def test_prefill_agrees_with_float64(case: Case) -> None:
    check_step(case, make_inputs(case))


@pytest.mark.parametrize("kv", [BF16, FP8], ids=lambda kv: kv.value)
@pytest.mark.parametrize(
    "tile",
    [
        PrefillTile(rows=64, tokens=64, warps=4, stages=1),
        PrefillTile(rows=64, tokens=128, warps=4, stages=1),
        PrefillTile(rows=64, tokens=32, warps=2, stages=4),
        PrefillTile(rows=128, tokens=64, warps=8, stages=2),
        PrefillTile(rows=128, tokens=64, warps=4, stages=1),
        PrefillTile(rows=128, tokens=32, warps=4, stages=3),
    ],
    ids=lambda tile: f"{tile.rows}x{tile.tokens}-{tile.warps}-{tile.stages}",
)
def test_tiles_of_other_devices(kv: DType, tile: PrefillTile) -> None:
    case = Case(**CHUNKED, kv=kv, window=200, has_sinks=True)
    check_step(case, make_inputs(case), tile)


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("window", [-1, 100])
def test_page_order_poison_and_repetition_change_no_bit(kv: DType, window: int) -> None:
    case = Case(**CHUNKED, kv=kv, rope=1, window=window)
    outputs = [
        PrefillStep(variant, make_inputs(variant)).run()
        for variant in (
            case,
            case,
            dataclasses.replace(case, identity_pages=True),
            dataclasses.replace(case, poison=0.0),
        )
    ]
    assert all(same_bytes(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
def test_pages_before_the_window_are_not_read(kv: DType) -> None:
    """Their ids may be gone, and what comes before the window in its first page is NaN."""
    case = Case(lengths=(900, 1000), new_tokens=(70, 1), padding_tokens=1, kv=kv, window=100)
    inputs = make_inputs(case)
    wanted = PrefillStep(case, inputs).run()
    for row, first in enumerate((900 - 70 - 99, 1000 - 1 - 99)):
        page = inputs["page_table"][row, first // 128]
        inputs["key_pool"][page, :, : first % 128] = 127 if kv is INT8 else np.nan
        inputs["value_pool"][page, :, : first % 128] = 127 if kv is INT8 else np.nan
        inputs["page_table"][row, : first // 128] = -1
    assert same_bytes(PrefillStep(case, inputs).run(), wanted)


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_bad_page_ids_are_masked_and_never_read(kv: DType, has_sinks: bool) -> None:
    case = Case(**CHUNKED, kv=kv, has_sinks=has_sinks, group=2)
    inputs = make_inputs(case)
    table = inputs["page_table"]
    table[0, 0] = len(inputs["key_pool"])  # nothing visible at all
    table[3, 1] = -7  # the page that is written
    table[5, 2:5] = np.iinfo(np.int32).max
    table[6, 0] = np.iinfo(np.int32).min
    table[7, 1:] = 1 << 30
    output = check_step(case, inputs)
    assert not output[:63].astype(np.float32).any()


def test_positions_beyond_the_table_are_masked() -> None:
    case = Case(lengths=(500, 200), new_tokens=(300, 200), padding_rows=0)
    inputs = make_inputs(case)
    inputs["page_table"] = np.ascontiguousarray(inputs["page_table"][:, :2])
    check_step(case, inputs)


@pytest.mark.parametrize("kv", [BF16, FP8], ids=lambda kv: kv.value)
@pytest.mark.parametrize("sizes", [(300, 1, 128, 571), (1, 999), (64, 64, 872)])
def test_chunks_equal_one_piece(kv: DType, sizes: tuple[int, ...]) -> None:
    case = Case(lengths=(1000,), new_tokens=(1000,), padding_rows=0, kv=kv, rope=1, group=3)
    inputs = make_inputs(case)
    whole = PrefillStep(case, inputs)
    wanted = whole.run().astype(np.float64)
    pools: dict[str, Any] | None = None
    parts, first = [], 0
    for size in sizes:
        chunk = dict(inputs)
        for name in ("query", "key", "value"):
            chunk[name] = inputs[name][first : first + size]
        chunk["query_start_offsets"] = np.array([0, size], np.int32)
        chunk["past_lens"] = np.array([first], np.int32)
        step = PrefillStep(case, chunk, pools)
        parts.append(step.run().astype(np.float64))
        pools = {name: step.tensors[name] for name in ("key_pool", "value_pool")}
        first += size
    error = np.abs(np.concatenate(parts) - wanted)
    assert (error <= reference(case, inputs, whole)[1]).all()


@pytest.mark.parametrize("kv", [BF16, FP8], ids=lambda kv: kv.value)
def test_pools_past_2_to_the_31_elements(kv: DType) -> None:
    import torch

    case = Case(**MIXED, kv=kv, num_kv_heads=8, identity_pages=True)
    inputs = make_inputs(case)
    small = PrefillStep(case, inputs)
    wanted = small.run()
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
    assert same_bytes(PrefillStep(case, moved, pools).run(), wanted)


def test_graph_replay_equals_eager() -> None:
    import torch

    case = Case(**CHUNKED, kv=FP8, rope=2, has_sinks=True)
    inputs = make_inputs(case)
    wanted = PrefillStep(case, inputs).run()
    step = PrefillStep(case, inputs)
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
    wanted = PrefillStep(case, inputs).run()
    step = PrefillStep(case, inputs)
    tokens = len(inputs["query"])
    rows = step.tensors["query"].view(tokens, -1)
    wide = torch.full((tokens, rows.shape[1] + 4096), 255, dtype=torch.uint8, device="cuda")
    wide[:, 2048 : 2048 + rows.shape[1]] = rows
    plain = step.prefill_arguments

    def strided() -> Any:
        block = plain()
        block.query = wide.data_ptr() + 2048
        block.query_token_stride = wide.shape[1] // 2
        return block

    step.prefill_arguments = strided  # type: ignore[method-assign]
    assert same_bytes(step.run(), wanted)
