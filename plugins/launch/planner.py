"""Chooses the plan of a step, and bounds the workspace of every plan that it may choose."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from paged_trt.plugins.launch.plans import AttentionPlan, Direct, PlanSource
from paged_trt.plugins.launch.requests import AttentionPlanRequest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttention:
    """A plan and who chose it."""

    plan: AttentionPlan
    source: PlanSource


class Planner(Protocol):
    """Pure choice of a plan."""

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """Plan of one step."""

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """Bytes that no plan passes for any step up to the sizes of `largest`."""


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyPlanner:
    """Follows an explicit policy where there is one, and is direct otherwise.

    Attributes:
        explicit: the user's plan; None leaves the choice to the planner.
    """

    explicit: AttentionPlan | None

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """The explicit plan, else Direct."""
        del request
        if self.explicit is not None:
            return PlannedAttention(plan=self.explicit, source=PlanSource.EXPLICIT)
        return PlannedAttention(plan=Direct(), source=PlanSource.HEURISTIC)

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """0: no kernel of this version writes a workspace."""
        del largest
        return 0
