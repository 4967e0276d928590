"""Append, decode and merge kernels on the device against NumPy in float64.

The rule: the error of a kernel is at most twice that of a computation of the same precision, and
one rounding of the output. Pool bytes after the append are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gpu import matrix
from gpu.decode_cases import Case, Inputs, allowed_error, make_inputs, truth_of
from gpu.decode_device import Array, DecodeStep, Plan

from paged_trt.plugins import cuda
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.plans import Balanced, Cluster, Counter, Direct, SplitKv
from paged_trt.plugins.launch.registry import KernelPath
from paged_trt.plugins.launch.workspace import decode_workspace, has_clusters

# torch's own warnings are no failure of a kernel.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
KV_TYPES = (FP16, BF16, FP8, INT8)
SPLIT = SplitKv(partition_tokens=128, threshold_tokens=128)
PLANS: tuple[Plan, ...] = (
    Direct(),
    SPLIT,
    SplitKv(partition_tokens=384, threshold_tokens=600),
    SplitKv(partition_tokens=8192, threshold_tokens=0),
    Cluster(blocks=2),
    Cluster(blocks=8),
    Counter(blocks=3),
    Counter(blocks=16),
    Balanced(),
)
# What a layer of its own compiles: every case takes the first and two of the others in turn, which
# share all that is special about the case; the main ones take every plan.
ROTATED: tuple[tuple[Plan, ...], ...] = (
    (SPLIT, Cluster(blocks=8)),
    (Counter(blocks=5), Balanced()),
    (Cluster(blocks=4), Balanced()),
)

TYPES = [
    Case(activation=activation, kv=kv, head_dim=dim)
    for activation in (BF16, FP16)
    for kv in KV_TYPES
    for dim in (64, 128, 256)
]
HEAD_DIMS = [
    Case(kv=kv, head_dim=head_dim, value_head_dim=value_dim)
    for kv in (BF16, FP8, INT8)
    for head_dim, value_dim in ((80, 80), (96, 96), (192, 128), (64, 128), (16, 240), (112, 48))
]
GROUPS = [
    Case(kv=kv, head_dim=64, group=group, has_sinks=True)
    for kv in (BF16, INT8)
    for group in (1, 2, 3, 5, 6, 7, 8, 9, 12, 15, 16, 24, 33)
] + [
    Case(head_dim=128, group=16),
    Case(kv=FP8, head_dim=128, group=7),
    Case(head_dim=256, group=16),
]
FEATURES = [
    dataclasses.replace(base, **features)
    for base in (
        Case(),
        Case(activation=FP16, kv=FP16, head_dim=64),
        Case(kv=FP8),
        Case(activation=FP16, kv=INT8, head_dim=96, group=3),
    )
    for features in (
        {"window": 1},
        {"window": 100},
        {"window": 128},
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
    Case(kv=FP8, query_factor=1e30),
    Case(kv=INT8, query_factor=1e-30),
    Case(query_factor=1e20, rope=1),
    Case(activation=FP16, kv=FP8, query_factor=8192.0, rope=2),
    Case(lengths=(1,), padding_rows=0),
    Case(lengths=(3000,), num_kv_heads=1, padding_rows=0),
    Case(lengths=(1, 2, 3) * 70, padding_rows=46),
    Case(kv=FP8, lengths=tuple(3 * index * index + 1 for index in range(40)), group=2),
]
MAIN = [
    Case(activation=activation, kv=kv)
    for activation, kv in ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, INT8))
]


def name_of(case: Case) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(Case)}
    changed = {
        name: value
        for name, value in dataclasses.asdict(case).items()
        if value != defaults[name] and name != "poison"
    }
    kept = {"activation": case.activation, "kv": case.kv, "head_dim": case.head_dim, **changed}
    kept["lengths"] = len(case.lengths)
    return "-".join(
        f"{name}={value.value if isinstance(value, DType) else value}"
        for name, value in kept.items()
        if name != "lengths" or case.lengths != defaults["lengths"]
    )


def same_bytes(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()


def check_pools(step: DecodeStep, truth: tuple[Array, Array, Array]) -> None:
    for name, expected in zip(("key_pool", "value_pool"), truth[1:], strict=True):
        actual = step.host_pool(name, expected)
        # The sign and payload of a NaN are not specified.
        numbers, wanted = actual.astype(np.float32), expected.astype(np.float32)
        assert np.array_equal(np.isnan(numbers), np.isnan(wanted))
        kept = ~np.isnan(wanted)
        assert same_bytes(actual[kept], expected[kept]), f"{name} differs"


def check_error(error: Array, allowed: Array, what: str) -> None:
    share = np.abs(error) - allowed
    token = int(share.max(axis=(1, 2)).argmax())
    worst = np.abs(error[token]).max()
    assert share.max() <= 0, f"{what}: token {token}: {worst} off, allowed {allowed[token].item()}"


def runs(plan: Plan) -> bool:
    return not isinstance(plan, Cluster) or has_clusters(cuda.device_arch())


def check_step(case: Case, inputs: Inputs, plans: Sequence[Plan] = PLANS) -> None:
    truth = truth_of(case, inputs)
    allowed = allowed_error(case, inputs, truth)
    small = DecodeStep(case, inputs, Direct())
    small.has_small_blocks = True
    for step in (small, *(DecodeStep(case, inputs, plan) for plan in plans if runs(plan))):
        output = step.run().astype(np.float64)
        check_pools(step, truth)
        matrix.note_equal("append", case)
        what = f"{step.plan} by {step.attention_paths[0].value}"
        assert np.isfinite(output).all(), f"{what}: not finite"
        check_error(output - truth[0], allowed, what)
        matrix.note_worst(step.attention_paths[0].value, case, output - truth[0], allowed)


@pytest.mark.parametrize("case", MAIN, ids=name_of)
def test_every_plan_agrees_with_float64(case: Case) -> None:
    check_step(case, make_inputs(case))


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        pytest.param(case, ROTATED[index % len(ROTATED)], id=name_of(case))
        for index, case in enumerate(TYPES + HEAD_DIMS + GROUPS + FEATURES + EXTREMES)
    ],
)
def test_decode_agrees_with_float64(case: Case, plans: Sequence[Plan]) -> None:
    check_step(case, make_inputs(case), plans)


@pytest.mark.parametrize("lengths", [(200,) * 131, (200,) * 130 + (9000,)], ids=["even", "ragged"])
def test_more_columns_than_the_device_holds_blocks(lengths: tuple[int, ...]) -> None:
    """Even ones have a block each; of ragged ones the blocks beyond those that share have none."""
    case = Case(lengths=lengths, num_kv_heads=4, padding_rows=3)
    check_step(case, make_inputs(case), (Balanced(),))


def need(plan: Plan) -> None:
    if not runs(plan):
        pytest.skip(f"{plan} needs a device with thread block clusters")


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
def test_page_order_poison_and_repetition_change_no_bit(kv: DType, plan: Plan) -> None:
    need(plan)
    case = Case(kv=kv, rope=1)
    outputs = [
        DecodeStep(variant, make_inputs(variant), plan).run()
        for variant in (
            case,
            case,
            dataclasses.replace(case, identity_pages=True),
            dataclasses.replace(case, poison=0.0),
        )
    ]
    assert all(same_bytes(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_bad_page_ids_are_masked_and_never_read(kv: DType, has_sinks: bool) -> None:
    case = Case(kv=kv, has_sinks=has_sinks, lengths=(127, 300, 1000, 5000, 5000), padding_rows=1)
    inputs = make_inputs(case)
    table = inputs["page_table"]
    table[0, 0] = len(inputs["key_pool"])  # nothing visible at all
    table[1, 1] = -7
    table[2, 7] = np.iinfo(np.int32).max  # the page that is written
    table[3, 2:12] = 1 << 30  # whole partitions
    table[4, 0] = np.iinfo(np.int32).min
    check_step(case, inputs)
    output = DecodeStep(case, inputs, SPLIT).run().astype(np.float32)
    assert not output[0].any()
    assert not output[-1].any()


def test_positions_beyond_the_table_are_masked() -> None:
    case = Case(lengths=(500, 200), padding_rows=0)
    inputs = make_inputs(case)
    inputs["page_table"] = np.ascontiguousarray(inputs["page_table"][:, :2])
    check_step(case, inputs)


def test_a_grid_of_too_few_partitions_loses_no_key() -> None:
    case = Case()
    inputs = make_inputs(case)
    truth = truth_of(case, inputs)

    class FewPartitions(DecodeStep):
        few = 3

        @property
        def partitions(self) -> int:
            return self.few

        def arguments(self, path: KernelPath) -> Any:
            block = super().arguments(path)
            if path is not KernelPath.APPEND:
                sizes = decode_workspace(self.plan, case.attention, self.step, self.few)
                block.num_partitions = self.few
                block.partial_lse = block.partial_output + sizes.lse_offset
            return block

    output = FewPartitions(case, inputs, SPLIT).run().astype(np.float64)
    check_error(output - truth[0], allowed_error(case, inputs, truth), "few partitions")


@pytest.mark.parametrize("rope", [0, 1, 2])
@pytest.mark.parametrize("kv", KV_TYPES, ids=lambda kv: kv.value)
@pytest.mark.parametrize("activation", [BF16, FP16], ids=lambda dtype: dtype.value)
def test_append_of_a_prefill_writes_the_same_bytes(activation: DType, kv: DType, rope: int) -> None:
    case = Case(
        activation=activation,
        kv=kv,
        head_dim=80,
        value_head_dim=64,
        group=1,
        lengths=(129, 1, 140, 400),
        new_tokens=(3, 1, 140, 5),
        padding_tokens=7,
        rope=rope,
        rotary_dim=40 if rope == 1 else 80,
    )
    inputs = make_inputs(case)
    inputs["key"][2:40] *= 300  # saturates
    inputs["value"][5] = 0
    inputs["value"][7, 0, :3] = [np.inf, -np.inf, np.nan]
    with np.errstate(invalid="ignore"):
        truth = truth_of(case, inputs)
    step = DecodeStep(case, inputs, Direct())
    step.launch(KernelPath.APPEND)
    check_pools(step, truth)


def test_append_finds_sequences_among_many() -> None:
    lengths = tuple(1 + index % 3 for index in range(1500))
    case = Case(
        head_dim=16, num_kv_heads=1, group=1, lengths=lengths, new_tokens=lengths, padding_rows=3
    )
    inputs = make_inputs(case)
    step = DecodeStep(case, inputs, Direct())
    step.launch(KernelPath.APPEND)
    pool = step.host_pool("key_pool", inputs["key_pool"])
    for row, (start, count) in enumerate(
        zip(inputs["query_start_offsets"].tolist(), lengths, strict=False)
    ):
        page = inputs["page_table"][row, 0]
        assert same_bytes(pool[page, 0, :count], inputs["key"][start : start + count, 0])


@pytest.mark.parametrize("plan", [Counter(blocks=5), Balanced()], ids=str)
def test_a_launch_that_was_aborted_does_not_spoil_the_next(plan: Plan) -> None:
    """Whatever it left in the workspace, the append sets the counters to zero."""
    case = Case(has_sinks=True)
    inputs = make_inputs(case)
    wanted = DecodeStep(case, inputs, plan).run()
    step = DecodeStep(case, inputs, plan)
    sizes = decode_workspace(plan, case.attention, step.step, step.partitions)
    counters = step.workspace[sizes.counter_offset : sizes.counter_offset + 4 * sizes.num_counters]
    for left in (1, 255):
        step.workspace.fill_(left)
        assert same_bytes(step.run(), wanted)
        assert not counters.any()
    # A launch that ends leaves the counters as it found them.
    step.output.fill_(255)
    step.launch(*step.attention_paths)
    assert same_bytes(step.host_output(), wanted)


@pytest.mark.parametrize("plan", [SPLIT, Cluster(blocks=8), Balanced()], ids=str)
@pytest.mark.parametrize("kv", [BF16, FP8], ids=lambda kv: kv.value)
def test_pools_past_2_to_the_31_elements(kv: DType, plan: Plan) -> None:
    import torch

    need(plan)
    case = Case(kv=kv, num_kv_heads=8, identity_pages=True, lengths=(1, 700, 2000))
    inputs = make_inputs(case)
    small = DecodeStep(case, inputs, plan)
    wanted = small.run()
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
    step = DecodeStep(case, moved, plan, pools)
    assert same_bytes(step.run(), wanted)
    tail = step.tensors["key_pool"][-small.tensors["key_pool"].numel() :]
    assert torch.equal(tail, small.tensors["key_pool"])


@pytest.mark.parametrize("is_programmatic", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_graph_replay_equals_eager(plan: Plan, is_programmatic: bool) -> None:
    import torch

    need(plan)
    case = Case(kv=FP8, rope=2, has_sinks=True)
    inputs = make_inputs(case)
    wanted = DecodeStep(case, inputs, plan).run()
    step = DecodeStep(case, inputs, plan)
    step.is_programmatic = is_programmatic
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step.launch(KernelPath.APPEND, *step.attention_paths)
    # Often enough that a race would show.
    for _ in range(20):
        step.output.fill_(255)
        graph.replay()
        assert same_bytes(step.host_output(), wanted)
