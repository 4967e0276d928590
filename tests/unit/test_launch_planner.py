"""The planner: pure, within its own workspace bound, and every key in a partition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.fields import ABI_VERSION
from paged_trt.plugins.launch.candidates import decode_candidates
from paged_trt.plugins.launch.planner import PolicyPlanner, _reason
from paged_trt.plugins.launch.plans import (
    AttentionPlan,
    Balanced,
    Cluster,
    Counter,
    Direct,
    PlanSource,
    SplitKv,
    parse_attention_plan,
)
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.workspace import plan_workspace_bytes, split_partitions
from paged_trt.plugins.operands import StepShape

PAGE = 128
HEURISTIC = PolicyPlanner(explicit=None)


def make_request(
    num_seqs: int,
    width: int,
    *,
    kv_heads: int = 8,
    group: int = 4,
    value_dim: int = 128,
    window: int = -1,
    units: int | None = 132,
    arch: str = "sm_90",
) -> AttentionPlanRequest:
    return AttentionPlanRequest(
        arch=arch,
        attention=AttentionSpec(
            num_q_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=128,
            value_head_dim=value_dim,
            softmax_scale=0.1,
            window=window,
        ),
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=DType.BFLOAT16,
        step=StepShape(num_tokens=num_seqs, num_seqs=num_seqs, table_width=width),
        num_multiprocessors=units,
    )


@st.composite
def requests(draw: st.DrawFn) -> AttentionPlanRequest:
    return make_request(
        draw(st.integers(1, 300)),
        draw(st.integers(1, 1100)),
        kv_heads=draw(st.integers(1, 40)),
        group=draw(st.integers(1, 40)),
        value_dim=draw(st.sampled_from([16, 128, 192, 256])),
        window=draw(st.one_of(st.just(-1), st.integers(1, 200_000))),
        units=draw(st.one_of(st.none(), st.integers(1, 400))),
        arch=draw(st.sampled_from(["sm_80", "sm_90", "sm_120"])),
    )


def explicit_plans() -> st.SearchStrategy[AttentionPlan | None]:
    splits = st.builds(
        SplitKv,
        partition_tokens=st.integers(1, 64).map(lambda pages: pages * PAGE),
        threshold_tokens=st.integers(0, 5000),
    )
    return st.one_of(
        st.none(),
        st.just(Direct()),
        st.just(Balanced()),
        st.builds(Cluster, blocks=st.sampled_from([2, 4, 8])),
        st.builds(Counter, blocks=st.integers(2, 64)),
        splits,
    )


@given(requests(), explicit_plans(), st.integers(0, 200), st.integers(0, 500))
def test_no_step_passes_the_bound(
    request: AttentionPlanRequest, explicit: AttentionPlan | None, seqs: int, width: int
) -> None:
    """The bound is asked for without a device, for the largest step of a profile."""
    planner = PolicyPlanner(explicit=explicit)
    step = request.step
    largest = dataclasses.replace(
        request,
        arch=None,
        num_multiprocessors=None,
        step=StepShape(
            num_tokens=step.num_tokens + seqs,
            num_seqs=step.num_seqs + seqs,
            table_width=step.table_width + width,
        ),
    )
    plan = planner.plan(request).plan
    assert plan_workspace_bytes(plan, request) <= planner.workspace_bytes(largest)


@pytest.mark.parametrize("units", [None, 20, 132, 148, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_few_heads_of_few_sequences_stay_within_the_bound(kv_heads: int, units: int | None) -> None:
    """A balanced decode leaves partials by block, and the bound counts them by page."""
    for num_seqs, width in itertools.product((2, 3, 4, 8), (33, 40, 64, 128)):
        request = make_request(num_seqs, width, kv_heads=kv_heads, units=units)
        needed = plan_workspace_bytes(HEURISTIC.plan(request).plan, request)
        assert needed <= HEURISTIC.workspace_bytes(request), (num_seqs, width)


@given(requests())
def test_a_heuristic_split_covers_the_table(request: AttentionPlanRequest) -> None:
    plan = HEURISTIC.plan(request).plan
    if not isinstance(plan, SplitKv):
        return
    assert plan.partition_tokens % PAGE == 0
    tokens = request.step.table_width * PAGE
    if request.attention.window == -1:
        partitions = split_partitions(plan, table_width=request.step.table_width, window=-1)
        assert partitions * plan.partition_tokens >= tokens
        assert (partitions - 1) * plan.partition_tokens < tokens
        assert partitions > 1


@given(requests())
def test_clusters_are_planned_for_sm_90_only(request: AttentionPlanRequest) -> None:
    plans = (HEURISTIC.plan(request).plan, *decode_candidates(request))
    assert request.arch == "sm_90" or not any(isinstance(plan, Cluster) for plan in plans)


@given(requests())
def test_candidates_are_few_and_differ(request: AttentionPlanRequest) -> None:
    candidates = decode_candidates(request)
    assert Direct() in candidates
    assert len(set(candidates)) == len(candidates) <= 16


@given(requests())
def test_the_reason_names_the_shapes(request: AttentionPlanRequest) -> None:
    reason = _reason(request)
    units = min(request.num_multiprocessors or 132, 256)
    assert f"{units} multiprocessors" in reason
    assert "blocks of heads" in reason


@given(explicit_plans())
def test_a_plan_is_read_back_from_its_text(plan: AttentionPlan | None) -> None:
    assert parse_attention_plan("auto" if plan is None else str(plan)) == plan


@given(requests())
def test_plans_are_pure(request: AttentionPlanRequest) -> None:
    assert HEURISTIC.plan(request) == HEURISTIC.plan(request)
    assert HEURISTIC.plan(request).source is PlanSource.HEURISTIC


@given(requests(), st.sampled_from([Direct(), SplitKv(partition_tokens=256, threshold_tokens=0)]))
def test_an_explicit_plan_is_followed(request: AttentionPlanRequest, plan: AttentionPlan) -> None:
    planned = PolicyPlanner(explicit=plan).plan(request)
    assert (planned.plan, planned.source) == (plan, PlanSource.EXPLICIT)


MEASURED = [
    # sequences, tokens, key heads; on sm_90, elsewhere
    (1, 1024, 8, "cluster:8", "counter:8"),
    (1, 4096, 8, "counter:16", "counter:16"),
    (1, 16384, 8, "counter:16", "counter:16"),
    (1, 4096, 32, "counter:4", "counter:4"),
    (8, 1024, 8, "cluster:2", "counter:2"),
    (8, 4096, 8, "cluster:2", "counter:2"),
    (8, 16384, 8, "balanced", "balanced"),  # lengths may differ a lot
    (16, 4096, 8, "direct", "direct"),  # 128 blocks, one for each multiprocessor
    (32, 4096, 8, "direct", "direct"),
    (32, 16384, 8, "balanced", "balanced"),
    (10, 2048, 8, "balanced", "balanced"),  # 80 blocks: two each would take two rounds
    (1, 512, 8, "cluster:8", "direct"),  # read before blocks merge through memory
    (1, 131072, 1, "split:1024:1024", "split:1024:1024"),
]


@pytest.mark.parametrize(("num_seqs", "tokens", "kv_heads", "on_sm_90", "elsewhere"), MEASURED)
def test_measured_shapes(
    num_seqs: int, tokens: int, kv_heads: int, on_sm_90: str, elsewhere: str
) -> None:
    found = [
        str(HEURISTIC.plan(request).plan)
        for request in (
            make_request(num_seqs, tokens // PAGE, kv_heads=kv_heads, arch=arch)
            for arch in ("sm_90", "sm_80")
        )
    ]
    assert found == [on_sm_90, elsewhere]


# sequences, tokens, key heads, group, value head dim
MANY_PARTIALS = [
    (1, 4096, 8, 4, 128, "counter:16"),
    (1, 4096, 8, 8, 128, "split:256:256"),
    (1, 16384, 8, 8, 128, "split:1024:1024"),
    (1, 4096, 4, 7, 128, "split:128:128"),
    (1, 4096, 2, 8, 128, "split:128:128"),
    (1, 16384, 8, 4, 256, "split:512:512"),
    (8, 4096, 8, 4, 256, "counter:4"),
]


@pytest.mark.parametrize("case", MANY_PARTIALS, ids=str)
def test_many_partials_have_a_merge_kernel(case: tuple[int, int, int, int, int, str]) -> None:
    num_seqs, tokens, kv_heads, group, value_dim, plan = case
    request = make_request(
        num_seqs, tokens // PAGE, kv_heads=kv_heads, group=group, value_dim=value_dim, arch="sm_80"
    )
    assert str(HEURISTIC.plan(request).plan) == plan


def test_plans_that_exist_hold_the_workspace_of_this_version() -> None:
    """The size is written into a plan when it is built: larger needs a new ABI_VERSION."""
    split = PolicyPlanner(explicit=SplitKv(partition_tokens=256, threshold_tokens=256))
    found = [
        planner.workspace_bytes(make_request(num_seqs, width, group=4))
        for planner in (HEURISTIC, split)
        for num_seqs, width in ((1, 8), (4, 64), (256, 1024))
    ]
    quantised = dataclasses.replace(make_request(4, 64), kv_cache_dtype=DType.FLOAT8)
    found.append(HEURISTIC.workspace_bytes(quantised))
    assert (ABI_VERSION, found) == (
        3,
        [132_128, 2_113_664, 2_121_728, 66_048, 2_113_536, 2_164_260_864, 134_218_756],
    )


def test_the_bound_of_a_large_engine_is_small() -> None:
    assert HEURISTIC.workspace_bytes(make_request(256, 1024, group=8)) < 5 << 20
    assert HEURISTIC.workspace_bytes(make_request(1, 4)) == 0
