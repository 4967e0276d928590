"""The tuner on a device: every candidate is timed, and the file it writes is what planners read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import PlanSource
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned_file import read_tuned, write_tuned
from paged_trt.plugins.launch.tuner import tune_request
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.plugins.operands import StepShape
from paged_trt.scripts.tune_device import on_device, timing_source

pytestmark = pytest.mark.gpu

REQUEST = AttentionPlanRequest(
    arch=None,
    attention=AttentionSpec(
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        value_head_dim=64,
        softmax_scale=0.125,
        rope=Rope.HALF_SPLIT,
        rotary_dim=64,
    ),
    activation_dtype=DType.FLOAT16,
    kv_cache_dtype=DType.FLOAT16,
    step=StepShape(num_tokens=3, num_seqs=3, table_width=32),
)


def test_every_candidate_is_timed_and_the_choice_is_read_back(tmp_path: Path) -> None:
    target = tuning_target(0)
    request = on_device(REQUEST, target)
    with timing_source(0, [request]) as time_plan:
        tuning = tune_request(request, time_plan)
    assert tuning.failures == {}
    assert set(tuning.microseconds) == set(candidates(request))
    assert min(tuning.microseconds.values()) > 0
    write_tuned([tuning.record()], target, tmp_path)
    planner = PolicyPlanner(explicit=None, tuned=read_tuned(target, tmp_path))
    found = planner.plan(request)
    assert (found.plan, found.source) == (tuning.chosen, PlanSource.TUNED)
    other = dataclasses.replace(target, driver="another")
    assert len(read_tuned(other, tmp_path)) == 0
