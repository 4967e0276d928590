"""Attention plans, the planner seam, and the log."""

from __future__ import annotations

import logging

import paged_models
import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import Direct, PlanSource, SplitKv, parse_attention_plan
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.trt import LogLines


def make_request(num_tokens: int = 2) -> AttentionPlanRequest:
    return AttentionPlanRequest(
        arch="sm_90",
        attention=paged_models.make_spec().layers[0],
        activation_dtype=DType.FLOAT16,
        kv_cache_dtype=DType.FLOAT8,
        step=StepShape(num_tokens=num_tokens, num_seqs=2, table_width=3),
    )


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("auto", None),
        ("direct", Direct()),
        ("split:512", SplitKv(partition_tokens=512, threshold_tokens=512)),
        ("split:256:1024", SplitKv(partition_tokens=256, threshold_tokens=1024)),
        ("split:128:0", SplitKv(partition_tokens=128, threshold_tokens=0)),
    ],
)
def test_plans_are_read(text: str, plan: Direct | SplitKv | None) -> None:
    assert parse_attention_plan(text) == plan
    if plan is not None:
        assert parse_attention_plan(str(plan)) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "split",
        "split:",
        "split:0",
        "split:-128",
        "split:100",
        "split:1:2:3",
        "Direct",
        "split:²",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_attention_plan(text)


def test_an_explicit_plan_wins() -> None:
    planner = PolicyPlanner(explicit=parse_attention_plan("split:128"))
    assert planner.plan(make_request()).source is PlanSource.EXPLICIT
    assert PolicyPlanner(explicit=None).plan(make_request()).source is PlanSource.HEURISTIC
    assert planner.workspace_bytes(make_request()) > 0


def test_log_lines_keep_warnings_and_forward(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines()
    with caplog.at_level(logging.DEBUG, "paged_trt.tensorrt"):
        for number in range(100):
            lines.add(logging.INFO, f"info {number}")
        assert lines.tail(2) == "info 98\ninfo 99"
        lines.add(logging.WARNING, "careful")
        lines.add(logging.DEBUG, "flood")
    assert lines.warnings == ["careful"]
    assert lines.tail() == "careful"
    assert "flood" not in lines.last
    assert len(lines.last) < 100
    assert len(caplog.records) == 102
