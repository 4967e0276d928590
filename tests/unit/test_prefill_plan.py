"""Plans of prefill steps: which kernel, why, and how many blocks; tensor maps of the pools."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.launch import tensor_maps
from paged_trt.plugins.launch.kernels_prefill_sm90 import TILE_ROWS, most_tiles, refusal
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import Direct, PlanSource, PrefillPlan
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape

BF16, FP16 = DType.BFLOAT16, DType.FLOAT16


def make_request(
    tokens: int = 8192, seqs: int = 1, width: int = 64, *, kv: DType = BF16, **attention: Any
) -> AttentionPlanRequest:
    values = {
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "value_head_dim": 128,
        "softmax_scale": 0.1,
    }
    return AttentionPlanRequest(
        arch="sm_90",
        attention=AttentionSpec(**(values | attention)),
        activation_dtype=BF16,
        kv_cache_dtype=kv,
        step=StepShape(num_tokens=tokens, num_seqs=seqs, table_width=width),
        num_multiprocessors=132,
    )


def plan_of(request: AttentionPlanRequest, planner: PolicyPlanner | None = None) -> PrefillPlan:
    planned = (planner or PolicyPlanner(explicit=None)).plan(request)
    assert planned.source is PlanSource.HEURISTIC
    assert isinstance(planned.plan, PrefillPlan)
    return planned.plan


def test_a_long_prompt_fills_the_device() -> None:
    plan = plan_of(make_request())
    assert plan == PrefillPlan(
        kernel="hopper", reason="sm_90, dims and types covered", blocks=132, takes_tiles=True
    )
    assert str(plan) == "hopper (sm_90, dims and types covered)"


@pytest.mark.parametrize(
    ("tokens", "width", "blocks", "partitions"),
    [
        (2, 256, 64, 8),  # one tile for each of 8 key heads
        (64, 256, 128, 8),
        (128, 256, 128, 4),
        (256, 256, 128, 2),
        (512, 256, 128, 1),
        (1024, 8, 132, 1),
        (64, 4, 32, 2),  # too few keys for more
        (64, 2, 16, 1),
    ],
)
def test_few_tiles_split_their_keys(tokens: int, width: int, blocks: int, partitions: int) -> None:
    plan = plan_of(make_request(tokens, 1, width))
    assert (plan.blocks, plan.partitions) == (blocks, partitions)
    assert not plan.takes_tiles
    assert ("split" in str(plan)) == (partitions > 1)


@pytest.mark.parametrize(
    ("tokens", "seqs", "width", "takes_tiles"),
    [
        (8192, 16, 4, False),  # 16 x 512
        (16384, 16, 8, True),  # 16 x 1,024
        (16384, 8, 16, True),
        (2048, 8, 32, True),  # 8 x 256 on 3,840
        (2048, 4, 64, True),  # 4 x 512 on 7,680
        (1024, 1, 8, False),  # few tiles
    ],
)
def test_few_tiles_or_tiles_of_short_sequences_are_dealt_out(
    tokens: int, seqs: int, width: int, takes_tiles: bool
) -> None:
    plan = plan_of(make_request(tokens, seqs, width))
    assert (plan.blocks, plan.partitions) == (132, 1)
    assert plan.takes_tiles == takes_tiles


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (dataclasses.replace(make_request(), arch="sm_100"), "sm_100 is not sm_90"),
        (make_request(kv=FP16), "a float16 pool under bfloat16"),
        (make_request(8, kv=DType.FLOAT8), "a float8 pool under bfloat16"),
        (make_request(head_dim=96, value_head_dim=96), "head_dim=96"),
        (make_request(value_head_dim=64), "value_head_dim=64 beside head_dim=128"),
        (make_request(num_q_heads=129, num_kv_heads=1), "group_size=129"),
        (make_request(softmax_scale=-1.0), "softmax_scale=-1"),
        (make_request(rope=Rope.HALF_SPLIT, rotary_dim=10), "rotary_dim=10"),
        (make_request(rope=Rope.INTERLEAVED, rotary_dim=6), "rotary_dim=6"),
    ],
)
def test_what_is_not_covered_names_its_reason(request_: AttentionPlanRequest, reason: str) -> None:
    plan = plan_of(request_)
    assert plan.kernel == "portable"
    assert plan.blocks == 0
    assert reason in str(plan)


def test_features_are_covered() -> None:
    for features in (
        {"window": 100},
        {"softcap": 5.0},
        {"rope": Rope.HALF_SPLIT, "rotary_dim": 128},
        {"rope": Rope.INTERLEAVED, "rotary_dim": 12},
        {"num_q_heads": 128, "num_kv_heads": 1},
        {"head_dim": 64, "value_head_dim": 64},
        {"head_dim": 256, "value_head_dim": 256},
    ):
        assert refusal(make_request(**features)) is None


def test_a_plan_without_workspace_deals_its_tiles_out() -> None:
    """An explicit direct decode needs no workspace, so its engine has none."""
    direct = PolicyPlanner(explicit=Direct())
    assert direct.workspace_bytes(make_request()) == 0
    assert not plan_of(make_request(), direct).takes_tiles
    assert plan_of(make_request()).takes_tiles


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 7, 8, 48, 128]),
    st.integers(0, 4),
)
def test_every_split_of_the_tokens_has_blocks(lengths: list[int], group: int, padding: int) -> None:
    request = make_request(
        sum(lengths) + padding,
        len(lengths) + padding,
        num_q_heads=2 * group,
        num_kv_heads=2,
    )
    tile_tokens = TILE_ROWS // group
    needed = sum(-(-length // tile_tokens) for length in lengths) * 2
    assert needed <= most_tiles(request)


class FakeMaps:
    """The driver's call that encodes a map, and the types that it takes."""

    CUtensorMapDataType = SimpleNamespace(
        CU_TENSOR_MAP_DATA_TYPE_BFLOAT16="bf16", CU_TENSOR_MAP_DATA_TYPE_FLOAT16="fp16"
    )
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B="128 bytes")
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B="256 bytes")
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE="zeros")
    cuuint32_t = cuuint64_t = int

    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._error = error

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
        self.calls.append(arguments)
        block = bytes(range(tensor_maps.MAP_BYTES))
        import ctypes

        self.kept = ctypes.create_string_buffer(block, len(block))
        address = ctypes.addressof(self.kept)
        return (self._error, SimpleNamespace(getPtr=lambda: address))


def test_a_map_describes_the_pool_as_it_lies() -> None:
    driver = FakeMaps()
    code = tensor_maps.encode(driver, 4096, FP16, (10, 3, 128, 256), 64)
    assert code == bytes(range(128))
    kind, rank, address, dims, strides, box, steps, *_ = driver.calls[0]
    assert (kind, rank, address) == ("fp16", 4, 4096)
    assert dims == [64, 128, 4, 30]
    assert strides == [512, 128, 128 * 512]  # bytes between tokens, groups of columns, tiles
    assert box == [64, 64, 4, 1]
    assert steps == [1, 1, 1, 1]


def test_a_refused_map_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="cuTensorMapEncodeTiled"):
        tensor_maps.encode(FakeMaps(error=1), 4096, BF16, (1, 1, 128, 64), 128)
