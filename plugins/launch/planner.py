"""Chooses the plan of a step, and bounds the workspace of every plan that it may choose.

The bound is asked for when an engine is built, perhaps on a machine without a GPU, and the plan
when it runs: so the bound holds for every device. A plan keeps the bound that it was built with,
so a larger one needs a new ABI_VERSION.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

from paged_trt.plugins.kv import pages_for_tokens, tokens_in_pages
from paged_trt.plugins.launch.kernels_decode import (
    HEADS_PER_TILE,
    head_tiles,
    split_partitions,
    split_workspace_bytes,
)
from paged_trt.plugins.launch.kernels_prefill_sm90 import plan_prefill
from paged_trt.plugins.launch.plans import (
    AttentionPlan,
    Direct,
    PlanSource,
    PrefillPlan,
    SplitKv,
)
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import NO_TUNED_PLANS, TunedPlans

USUAL_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200; taken where the device is not known."""
MOST_MULTIPROCESSORS: Final = 256
"""More are not filled by a split: the workspace is bounded before the device is known."""
DIRECT_FACTOR: Final = 1.5
"""Blocks per multiprocessor from which a direct decode reads as fast as a split one (measured
on an H200: 200 blocks on 132 multiprocessors)."""
MOST_PARTITIONS: Final = 64
"""More are slower to merge than they are to read."""
DIRECT_TOKENS: Final = 512
"""So few keys are read faster than a merge kernel starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttention:
    """A plan, who chose it, and why, in words."""

    plan: AttentionPlan | PrefillPlan
    source: PlanSource
    reason: str


class Planner(Protocol):
    """Pure choice of a plan."""

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """Plan of one step."""

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """Bytes that no plan passes for any step up to the sizes of `largest`."""


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyPlanner:
    """Follows an explicit policy, else what was measured on this device, else shapes.

    Attributes:
        explicit: the user's plan, which switches tuning off; None leaves the choice open.
        tuned: plans that `paged-trt tune` measured on this device.
    """

    explicit: AttentionPlan | None
    tuned: TunedPlans = NO_TUNED_PLANS

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """The explicit plan, else the tuned one, else the heuristic's; pure.

        Explicit and tuned plans are about decoding.
        """
        if not request.is_decode:
            prefill = plan_prefill(request)
            return PlannedAttention(
                plan=prefill, source=PlanSource.HEURISTIC, reason=prefill.reason
            )
        if self.explicit is not None:
            return PlannedAttention(
                plan=self.explicit,
                source=PlanSource.EXPLICIT,
                reason="the engine was built with `--attention-plan`",
            )
        found = self.tuned.find(request)
        # The workspace was sized for the heuristic when the engine was built.
        if found is not None and _fits(found.plan, request):
            return PlannedAttention(
                plan=found.plan, source=PlanSource.TUNED, reason=found.explain()
            )
        return PlannedAttention(
            plan=_heuristic(request), source=PlanSource.HEURISTIC, reason=_sizes(request)
        )

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """Bytes of partial results that no plan passes, on any device."""
        if self.explicit is not None:
            # Grows with N and with M, so the largest step needs most.
            return plan_workspace_bytes(self.explicit, largest)
        attention, step = largest.attention, largest.step
        pages = _visible_pages(largest)
        if tokens_in_pages(pages) <= DIRECT_TOKENS:
            return 0
        # N * Hkv * partitions of a split: twice fewer blocks than make a direct decode, or one
        # for each multiprocessor; and never more than every sequence with every page.
        split_rows = min(
            int(2 * DIRECT_FACTOR * MOST_MULTIPROCESSORS),
            step.num_seqs * attention.num_kv_heads * pages,
        )
        row_bytes = 4 * (attention.value_head_dim + 1)
        return split_rows * attention.group_size * row_bytes


def plan_workspace_bytes(plan: AttentionPlan, request: AttentionPlanRequest) -> int:
    """Bytes of partial results of one step under a plan."""
    if not isinstance(plan, SplitKv):
        return 0
    partitions = split_partitions(
        plan, table_width=request.step.table_width, window=request.attention.window
    )
    return split_workspace_bytes(request.step, request.attention, partitions)


def _fits(plan: AttentionPlan, request: AttentionPlanRequest) -> bool:
    """Whether a plan needs no more workspace than every engine without a policy has."""
    bound = PolicyPlanner(explicit=None).workspace_bytes(request)
    return plan_workspace_bytes(plan, request) <= bound


def _sizes(request: AttentionPlanRequest) -> str:
    """What the heuristic went by."""
    units = request.num_multiprocessors or f"{USUAL_MULTIPROCESSORS} (assumed)"
    return (
        f"{request.step.num_seqs} sequences x {request.attention.num_kv_heads} key heads x "
        f"{tokens_in_pages(_visible_pages(request))} keys on {units} multiprocessors"
    )


def candidates(request: AttentionPlanRequest) -> tuple[AttentionPlan, ...]:
    """Plans worth timing, the heuristic's first; all fit the workspace of every engine."""
    first = _heuristic(request)
    if not request.is_decode:
        return (first,)
    others: list[AttentionPlan] = [Direct()]
    pages = _visible_pages(request)
    parts = 2
    while parts <= min(pages, MOST_PARTITIONS):
        tokens = tokens_in_pages(-(-pages // parts))
        others.append(SplitKv(partition_tokens=tokens, threshold_tokens=tokens))
        parts *= 2
    others = [plan for plan in others if plan != first and _fits(plan, request)]
    return (first, *dict.fromkeys(others))


def _heuristic(request: AttentionPlanRequest) -> AttentionPlan:
    """About one block for each multiprocessor, and at least two partitions where it splits."""
    attention = request.attention
    tile = HEADS_PER_TILE * head_tiles(attention.group_size, attention.value_head_dim)
    blocks = request.step.num_seqs * attention.num_kv_heads * -(-attention.group_size // tile)
    units = min(request.num_multiprocessors or USUAL_MULTIPROCESSORS, MOST_MULTIPROCESSORS)
    tokens = tokens_in_pages(_visible_pages(request))
    if blocks >= DIRECT_FACTOR * units or tokens <= DIRECT_TOKENS:
        return Direct()
    partitions = max(2, units // blocks)
    # Whole pages: a partition of that many tokens, rounded up to its last page.
    partition = tokens_in_pages(pages_for_tokens(-(-tokens // partitions)))
    return SplitKv(partition_tokens=partition, threshold_tokens=partition)


def _visible_pages(request: AttentionPlanRequest) -> int:
    """Pages of one sequence that a decode step may read."""
    single = SplitKv(partition_tokens=tokens_in_pages(1), threshold_tokens=0)
    return split_partitions(
        single, table_width=request.step.table_width, window=request.attention.window
    )
