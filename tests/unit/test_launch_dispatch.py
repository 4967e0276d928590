"""Launches of a plugin's step: exact arguments, grids and order, with a driver that records."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import paged_models
import pytest
from fake_driver import FakeDriver, Function

from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import KernelLaunchError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.launch import args, layer
from paged_trt.plugins.launch.dispatch import PreparedStep, warm_keys
from paged_trt.plugins.launch.kernels_decode import CallAddresses, append_rounds
from paged_trt.plugins.launch.kernels_prefill_sm90 import refusal
from paged_trt.plugins.launch.layer import LayerLauncher
from paged_trt.plugins.launch.loaded import (
    ARGUMENT_STRUCTS,
    DeviceKernels,
    LoadedKernel,
    build_of,
)
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import parse_attention_plan
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import Operand, StepShape

SPEC = paged_models.make_spec()
ADDRESSES = CallAddresses(
    operands=tuple((index + 1) << 20 for index in range(len(Operand))),
    token_strides=(128, 64, 32),
    output=1 << 30,
    workspace=1 << 31,
)
NOWHERE = dataclasses.replace(ADDRESSES, operands=(0,) * len(Operand), output=0, workspace=0)


def make_request(tokens: int = 2, seqs: int = 2, width: int = 3, arch: str = "sm_90") -> Any:
    return AttentionPlanRequest(
        arch=arch,
        attention=SPEC.layers[0],
        activation_dtype=DType.FLOAT16,
        kv_cache_dtype=DType.FLOAT16,
        step=StepShape(num_tokens=tokens, num_seqs=seqs, table_width=width),
        num_multiprocessors=132,
    )


class Registry:
    """Every kernel is loaded."""

    def __init__(self) -> None:
        self.found: list[KernelPath] = []

    def find(self, key: KernelKey) -> LoadedKernel:
        self.found.append(key.path)
        function = Function(key.path.value, ARGUMENT_STRUCTS[key.path])
        return LoadedKernel(key=key, build=build_of(key), function=function)


def prepare(
    driver: FakeDriver, request: AttentionPlanRequest, plan: str = "auto", registry: Any = None
) -> PreparedStep:
    return PreparedStep(
        request,
        OperatorSpec(pool=SPEC.pool, attention=SPEC.layers[0]),
        NOWHERE,
        planner=PolicyPlanner(explicit=parse_attention_plan(plan)),
        registry=registry or Registry(),
        make_launch=functools.partial(KernelLaunch, driver=driver),
    )


@pytest.mark.parametrize(
    ("tokens", "plan", "names"),
    [
        (2, "direct", ["append", "decode_counter"]),  # few blocks: large ones
        (2, "split:128", ["append", "decode_split", "merge"]),
        (2, "cluster:4", ["append", "decode_cluster"]),
        (2, "counter:5", ["append", "decode_counter"]),
        (2, "balanced", ["append", "decode_balanced"]),
        (5, "split:128", ["append", "prefill"]),
    ],
)
def test_kernels_are_launched_in_order_on_the_stream(
    tokens: int, plan: str, names: list[str]
) -> None:
    driver = FakeDriver()
    step = prepare(driver, make_request(tokens), plan)
    step.bind(ADDRESSES)
    step.launch(9)
    assert [launch.name for launch in driver.launches] == names
    assert {launch.stream for launch in driver.launches} == {9}
    assert driver.calls == {"cuLaunchKernelEx": len(names)}
    # The append may follow the kernel that wrote the lengths: it starts after it.
    assert [launch.overlaps for launch in driver.launches] == [
        name not in ("append", "prefill") for name in names
    ]


def test_no_overlap_before_sm_90() -> None:
    driver = FakeDriver()
    step = prepare(driver, make_request(arch="sm_89"), "split:128")
    step.launch(0)
    assert not any(launch.overlaps for launch in driver.launches)


def test_every_argument_is_exact() -> None:
    driver = FakeDriver()
    step = prepare(driver, make_request(), "split:256:128")
    step.bind(ADDRESSES)
    step.launch(1)
    append, split, merge = driver.launches
    places = {op.name.lower(): ADDRESSES.operands[op] for op in Operand}
    sizes = {"num_seqs": 2, "table_width": 3, "num_pages": SPEC.pool.num_pages}
    rope = {"rope": 1, "rotary_dim": 16, "num_kv_heads": 2}
    attention = {"window": 200, "softmax_scale": 0.125, "softcap": 30.0}
    # Window 200 in pages of 128: three pages may hold it, so two partitions of 256.
    partials = {"partial_output": 1 << 31, "partial_lse": (1 << 31) + 4 * 2 * 4 * 2 * 16}
    parts = {"partition_tokens": 256, "threshold_tokens": 128, "num_partitions": 2}

    def named(*names: str) -> dict[str, int]:
        return {name: places[name] for name in names}

    shared = named("key_pool", "value_pool", "page_table", "query_start_offsets", "past_lens")
    shared |= named("rope_cos_sin", "kv_scales")
    strides = {"key_token_stride": 64, "value_token_stride": 32}
    assert append.args == {
        **shared, **named("key", "value"), **strides, **sizes, **rope, "num_tokens": 2,
        "counters": partials["partial_lse"] + 4 * 2 * 4 * 2, "num_counters": 0,
        "rounds_per_warp": 1,
    }  # fmt: skip
    query = {**named("query"), "query_token_stride": 128}
    assert split.args == {**shared, **query, **sizes, **rope, **attention, **partials, **parts}
    assert merge.args == {
        **named("query_start_offsets", "past_lens", "sinks"), **partials, **parts,
        "output": 1 << 30, "output_token_stride": 4 * 16, "num_q_heads": 4, "num_seqs": 2,
        "table_width": 3, "window": 200,
    }  # fmt: skip
    assert split.grid == (2, 2, 2)
    assert merge.grid == (4, 2, 1)
    assert append.grid == (1, 2, 1)


@pytest.mark.parametrize(
    ("plan", "grid", "slots", "blocks"),
    [("counter:5", (5, 2, 2), 2 * 2 * 5, 5), ("balanced", (264, 1, 1), 2 * 264, 264)],
)
def test_counters_lie_behind_the_partials_and_are_cleared_by_the_append(
    plan: str, grid: tuple[int, int, int], slots: int, blocks: int
) -> None:
    driver = FakeDriver()
    step = prepare(driver, make_request(), plan)
    step.bind(ADDRESSES)
    step.launch(1)
    append, decode = driver.launches
    rows = slots * 2  # two heads of a block
    counters = (1 << 31) + 4 * rows * (16 + 1)
    assert decode.grid == grid
    assert decode.args["partial_output"] == 1 << 31
    assert decode.args["partial_lse"] == (1 << 31) + 4 * rows * 16
    assert decode.args["num_blocks"] == blocks
    assert decode.args["counters"] == append.args["counters"] == counters
    assert append.args["num_counters"] == 2 * 2


def test_many_direct_blocks_are_small() -> None:
    driver = FakeDriver()
    prepare(driver, make_request(67, 67), "direct").launch(1)
    assert driver.launches[1].name == "decode_direct"
    assert driver.launches[1].grid == (1, 2, 67)


def test_a_balanced_decode_has_a_block_for_each_column_of_many() -> None:
    driver = FakeDriver()
    prepare(driver, make_request(200, 200), "balanced").launch(1)
    append, decode = driver.launches
    assert decode.grid == (200 * 2, 1, 1)
    assert decode.args["num_blocks"] == 264  # so many share keys, where lengths differ
    assert append.args["num_counters"] == 200 * 2
    prepare(driver, make_request(600, 600), "balanced").launch(1)
    assert driver.launches[-1].grid == (264, 1, 1)  # more would mostly be idle


def test_a_cluster_is_launched_as_one() -> None:
    driver = FakeDriver()
    prepare(driver, make_request(), "cluster:4").launch(1)
    append, decode = driver.launches
    assert (decode.grid, decode.cluster, decode.overlaps) == ((4, 2, 2), (4, 1, 1), True)
    assert append.cluster == (1, 1, 1)
    assert append.args["num_counters"] == 0


def test_a_cluster_is_refused_where_there_is_none() -> None:
    with pytest.raises(KernelLaunchError, match=r"cluster:4 needs sm_90 .* sm_89; .* counter:4"):
        prepare(FakeDriver(), make_request(arch="sm_89"), "cluster:4")


@pytest.mark.parametrize(
    ("tokens", "grid", "rounds"),
    [(5, (2, 2, 1), 1), (600, (150, 2, 1), 1), (5000, (1250, 1, 1), 4)],
)
def test_a_long_append_gives_a_warp_several_rounds(
    tokens: int, grid: tuple[int, int, int], rounds: int
) -> None:
    driver = FakeDriver()
    prepare(driver, make_request(tokens)).launch(1)
    assert driver.launches[0].grid == grid
    assert driver.launches[0].args["rounds_per_warp"] == rounds


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "value_head_dim", "rounds"),
    [(8, 128, 128, 4), (32, 128, 128, 16), (1, 64, 64, 2), (9, 64, 64, 4), (5, 96, 256, 4),
     (2, 240, 16, 2), (3, 240, 16, 3)],
)  # fmt: skip
def test_a_round_is_the_heads_that_a_warp_holds(
    num_kv_heads: int, head_dim: int, value_head_dim: int, rounds: int
) -> None:
    found = append_rounds(
        num_kv_heads=num_kv_heads, head_dim=head_dim, value_head_dim=value_head_dim
    )
    assert found == rounds


def test_a_missing_kernel_is_named_and_nothing_is_launched() -> None:
    driver = FakeDriver()
    kernels = DeviceKernels(context=lambda: 1)
    with pytest.raises(KernelLaunchError, match=r"no kernel for append float16 -> float16, head"):
        prepare(driver, make_request(), registry=kernels)
    assert driver.launches == []


def test_a_refused_launch_is_named() -> None:
    driver = FakeDriver()
    driver.failing = {"cuLaunchKernelEx": 1}
    step = prepare(driver, make_request(5))
    with pytest.raises(KernelLaunchError, match=r"append float16 .* did not launch: 1"):
        step.launch(0)


def test_warm_keys_cover_every_path_that_a_layer_may_take() -> None:
    covered = make_request(arch="sm_90")
    others = {
        request.arch: {key.path for key in warm_keys(request)}
        for request in (covered, make_request(arch="sm_80"))
    }
    hopper = {KernelPath.PREFILL_SM90, KernelPath.PREFILL_SM90_SPLIT}
    ungathered = set(KernelPath) - {KernelPath.GATHER}
    assert others["sm_80"] == ungathered - hopper - {KernelPath.DECODE_CLUSTER}
    is_covered = refusal(covered) is None
    assert others["sm_90"] == ungathered - ({KernelPath.PREFILL} if is_covered else hopper)
    gathering = {key.path for key in warm_keys(covered, gathers=True)}
    assert gathering == set(KernelPath)  # steps that are too large attend from the pool
    assert set(ARGUMENT_STRUCTS) == set(KernelPath)
    # Sampling, and taking tokens over, are no part of attention.
    others_than_attention = {args.SampleArgs, args.TakeTokensArgs}
    assert {*ARGUMENT_STRUCTS.values(), *others_than_attention} == set(args.ARGUMENT_STRUCTS)


class Prepared:
    """A step that counts."""

    def __init__(self, log: list[Any], request: AttentionPlanRequest, addresses: Any) -> None:
        self.addresses = addresses
        self.log = log
        self.width = request.step.table_width

    def bind(self, addresses: Any) -> None:
        self.addresses = addresses
        self.log.append(("bind", self.width, addresses))

    def launch(self, stream: int) -> None:
        self.log.append(("launch", self.width))


class Layer:
    """Whose steps they are: operands are where inputs, outputs and workspace are."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def locate(self, inputs: Any, outputs: Any, workspace: int) -> Any:
        return (*inputs, *outputs, workspace)

    def prepare(self, request: AttentionPlanRequest, addresses: Any) -> Any:
        self.log.append(("prepare", request.step.table_width, addresses))
        return Prepared(self.log, request, addresses)


def test_shapes_and_addresses_are_looked_up_once() -> None:
    log: list[Any] = []
    launcher, owner = LayerLauncher(), Layer(log)

    def enqueue(*inputs: int) -> list[Any]:
        launcher.enqueue(list(inputs), [7], 8, 0, layer=owner)
        events = log[:]
        log.clear()
        return events

    with pytest.raises(KernelLaunchError, match="before its sizes"):
        enqueue(1)
    launcher.set_shape(make_request(width=1))
    assert enqueue(1) == [("prepare", 1, (1, 7, 8)), ("launch", 1)]
    assert enqueue(1) == [("launch", 1)]
    launcher.set_shape(make_request(width=1))
    assert enqueue(1) == [("launch", 1)]
    launcher.set_shape(make_request(width=2))
    assert enqueue(1) == [("prepare", 2, (1, 7, 8)), ("launch", 2)]
    assert enqueue(2) == [("bind", 2, (2, 7, 8)), ("launch", 2)]
    launcher.set_shape(make_request(width=1))
    # The blocks of the first size still hold its own addresses.
    assert enqueue(1) == [("launch", 1)]


def test_prefill_sizes_do_not_pile_up() -> None:
    launcher, owner = LayerLauncher(), Layer([])
    for tokens in range(3, 400):
        launcher.set_shape(make_request(tokens))
        launcher.enqueue([1], [2], 3, 0, layer=owner)
    assert len(launcher._steps) == layer.MOST_PREPARED
