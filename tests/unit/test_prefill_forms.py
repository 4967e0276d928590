"""Forms of Hopper's prefill kernel: asked for by name, never planned."""

from __future__ import annotations

import dataclasses

import pytest

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.dispatch import kernel_keys
from paged_trt.plugins.launch.kernels_prefill_sm90 import ANY_DIMS, plan_prefill, prefill_sm90_build
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import PlanSource, PrefillPlan
from paged_trt.plugins.launch.prefill_forms import name_of, parse_forms, prefill_candidates
from paged_trt.plugins.launch.registry import KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape
from paged_trt.scripts.kernel_bench.ours import FixedPrefillPlanner


def request(
    head_dim: int = 128, value_head_dim: int = 0, *, tokens: int = 8192, arch: str = "sm_90"
) -> AttentionPlanRequest:
    return AttentionPlanRequest(
        arch=arch,
        attention=AttentionSpec(
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=head_dim,
            value_head_dim=value_head_dim or head_dim,
            softmax_scale=0.1,
        ),
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=DType.BFLOAT16,
        step=StepShape(num_tokens=tokens, num_seqs=1, table_width=64),
        num_multiprocessors=132,
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_first_candidate_is_what_the_planner_takes(head_dim: int) -> None:
    step = request(head_dim)
    first, *others = prefill_candidates(step)
    assert first == plan_prefill(step)
    assert not first.forms
    assert all(plan.forms or plan.takes_tiles != first.takes_tiles for plan in others)
    names = [name_of(plan, (first, *others)) for plan in (first, *others)]
    assert names[0] == "today"
    assert len(set(names)) == len(names)
    assert ("scores-ahead" in names) == (head_dim == 64)


def test_steps_with_split_keys_have_one_plan() -> None:
    (plan,) = prefill_candidates(request(tokens=64))
    assert plan.partitions > 1


@pytest.mark.parametrize("dims", [(96, 96), (80, 80), (192, 128), (64, 128)])
def test_other_dims_are_planned_only_by_name(dims: tuple[int, int]) -> None:
    step = request(*dims)
    planned = PolicyPlanner(explicit=None).plan(step).plan
    assert isinstance(planned, PrefillPlan)
    assert planned.kernel == "portable"
    plans = prefill_candidates(step)
    assert all(plan.kernel == "hopper" and ANY_DIMS in plan.forms for plan in plans)
    key = kernel_keys(step, plans[0])[1]
    assert prefill_sm90_build(key).macros == ()
    with pytest.raises(UnsupportedError, match="equal head dims"):
        prefill_sm90_build(dataclasses.replace(key, forms=()))


@pytest.mark.parametrize("dims", [(100, 100), (272, 272)])
def test_dims_that_no_form_takes_have_no_candidate(dims: tuple[int, int]) -> None:
    assert prefill_candidates(request(*dims)) == ()
    assert prefill_candidates(request(arch="sm_80")) == ()


def test_a_plan_of_a_form_asks_for_its_kernel() -> None:
    step = request()
    plan = dataclasses.replace(plan_prefill(step), forms=("overlap", "short-end"))
    planner = FixedPrefillPlanner(plan)
    assert planner.plan(step).plan is plan
    assert planner.plan(step).source is PlanSource.EXPLICIT
    append, prefill = kernel_keys(step, plan)
    assert append.forms == ()
    assert append.path is KernelPath.APPEND
    macros = prefill_sm90_build(prefill).macros
    assert macros == ("PREFILL_OVERLAP", "PREFILL_SHORT_END")
    assert "overlap+short-end" in str(plan)
    assert "overlap, short-end" in str(prefill)
    assert prefill_sm90_build(kernel_keys(step, plan_prefill(step))[1]).macros == ()


def test_names_of_forms() -> None:
    assert parse_forms("") == ()
    assert parse_forms("overlap+short-end") == ("overlap", "short-end")
    with pytest.raises(UnsupportedError, match="no form `overlop`; it has overlap"):
        parse_forms("overlop")
