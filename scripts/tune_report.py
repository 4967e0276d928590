"""What `paged-trt tune` shows and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.errors import ExecutionError, PagedTrtError
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuner import Tuning
from paged_trt.scripts.error_output import plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneRun:
    """What one run of the tuner gave.

    Attributes:
        tunings: one per request that was timed.
        skipped: reason of each request that was not begun, or does not fit the device.
        failed: error of each request that was begun and failed.
    """

    tunings: list[Tuning] = dataclasses.field(default_factory=list)
    skipped: list[tuple[AttentionPlanRequest, str]] = dataclasses.field(default_factory=list)
    failed: list[tuple[AttentionPlanRequest, PagedTrtError]] = dataclasses.field(
        default_factory=list
    )

    def plan_failures(self) -> list[tuple[str, PagedTrtError]]:
        """Step and plan, and error, of each plan that failed in a step that was timed."""
        return [
            (f"{describe(tuning.request)}, plan {plan}", error)
            for tuning in self.tunings
            for plan, error in tuning.failures.items()
        ]

    def error(self) -> ExecutionError | None:
        """What to end with: the first failure is its cause; None where nothing failed."""
        steps = [(describe(request), error) for request, error in self.failed]
        failures = [*steps, *self.plan_failures()]
        if not failures:
            return None
        where, cause = failures[0]
        error = ExecutionError(
            f"{where} failed: {cause}; failed steps: {len(steps)}, failed plans of timed steps: "
            f"{len(failures) - len(steps)}; timed steps, which are kept: {len(self.tunings)}; run "
            "the command again for the others"
        )
        error.code = cause.code
        error.__cause__ = cause
        return error


def problem_lines(run: TuneRun) -> list[str]:
    """What was not timed: a line for each failure, and for each reason not to begin a step."""
    steps: dict[str, list[AttentionPlanRequest]] = {}
    for request, reason in run.skipped:
        steps.setdefault(reason, []).append(request)
    return [
        *(f"not timed: {_some(requests)}: {reason}" for reason, requests in steps.items()),
        *(f"failed: {describe(request)}: {error}" for request, error in run.failed),
        *(f"failed: {where}: {error}" for where, error in run.plan_failures()),
    ]


def _some(requests: Sequence[AttentionPlanRequest]) -> str:
    others = len(requests) - 1
    return describe(requests[0]) + (f", and {others} more" if others else "")


def describe(request: AttentionPlanRequest) -> str:
    """A request in one line."""
    attention, step = request.attention, request.step
    window = "" if attention.window == FULL_WINDOW else f", window {attention.window}"
    tokens = "" if request.is_decode else f"T {step.num_tokens}, "
    return (
        f"{attention.num_q_heads}/{attention.num_kv_heads} x {attention.head_dim} "
        f"{request.kv_cache_dtype.value}{window}, {tokens}N {step.num_seqs}, M {step.table_width}"
    )


def plans_table(requests: Sequence[AttentionPlanRequest]) -> Table:
    """What the planner would do, and what a tuner would time."""
    table = Table(title="Steps and their plans", title_justify="left")
    for name in ("layer and step", "plan", "why", "candidates"):
        table.add_column(name)
    planner = PolicyPlanner(explicit=None)
    for request in requests:
        planned = planner.plan(request)
        others = ", ".join(str(plan) for plan in candidates(request)[1:]) or "none"
        cells = (
            describe(request),
            f"{planned.plan} ({planned.source.value})",
            planned.reason,
            others,
        )
        table.add_row(*map(plain, cells))
    return table


def tunings_table(tunings: Sequence[Tuning]) -> Table:
    """Times of the heuristic's plan and of the fastest."""
    table = Table(title="Attention plans, median microseconds", title_justify="left")
    table.add_column("layer and step")
    for name in ("heuristic", "us", "fastest", "us", "speedup", "timed"):
        table.add_column(name, justify="right" if name in ("us", "speedup") else "left")
    for tuning in tunings:
        cells = (
            describe(tuning.request),
            tuning.heuristic,
            f"{tuning.microseconds[tuning.heuristic]:.2f}",
            tuning.chosen if tuning.chosen != tuning.heuristic else "the same",
            f"{tuning.microseconds[tuning.chosen]:.2f}",
            f"{tuning.speedup:.2f}",
            f"{len(tuning.microseconds)} plans"
            + (f", {len(tuning.failures)} failed" if tuning.failures else ""),
        )
        table.add_row(*map(plain, cells))
    return table


def to_json(run: TuneRun) -> dict[str, Any]:
    """Everything as JSON types."""
    return {
        "tunings": [
            {
                **tuning.record().model_dump(mode="json"),
                "all": {str(plan): value for plan, value in tuning.microseconds.items()},
                "failures": {str(plan): str(error) for plan, error in tuning.failures.items()},
            }
            for tuning in run.tunings
        ],
        "skipped": [
            {"request": describe(request), "reason": reason} for request, reason in run.skipped
        ],
        "failed": [
            {"request": describe(request), "code": error.code, "message": str(error)}
            for request, error in run.failed
        ],
    }
