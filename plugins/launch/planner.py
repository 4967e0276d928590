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
from paged_trt.plugins.launch.kernels_prefill_sm90 import COUNTER_BYTES, plan_prefill
from paged_trt.plugins.launch.plans import (
    AttentionPlan,
    Direct,
    PlanSource,
    PrefillPlan,
    SplitKv,
)
from paged_trt.plugins.launch.requests import AttentionPlanRequest

USUAL_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200; taken where the device is not known."""
MOST_MULTIPROCESSORS: Final = 256
"""More are not filled by a split: the workspace is bounded before the device is known."""
DIRECT_FACTOR: Final = 1.5
"""Blocks per multiprocessor from which a direct decode reads as fast as a split one (measured
on an H200: 200 blocks on 132 multiprocessors)."""
DIRECT_TOKENS: Final = 512
"""So few keys are read faster than a merge kernel starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttention:
    """A plan and who chose it."""

    plan: AttentionPlan | PrefillPlan
    source: PlanSource


class Planner(Protocol):
    """Pure choice of a plan."""

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """Plan of one step."""

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """Bytes that no plan passes for any step up to the sizes of `largest`."""


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyPlanner:
    """Follows an explicit policy where there is one, and shapes otherwise.

    Attributes:
        explicit: the user's plan; None leaves the choice to the planner.
    """

    explicit: AttentionPlan | None

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """The explicit plan, else the heuristic's; pure. Explicit plans are about decoding."""
        if not request.is_decode:
            return PlannedAttention(plan=self._prefill(request), source=PlanSource.HEURISTIC)
        if self.explicit is not None:
            return PlannedAttention(plan=self.explicit, source=PlanSource.EXPLICIT)
        return PlannedAttention(plan=_heuristic(request), source=PlanSource.HEURISTIC)

    def _prefill(self, request: AttentionPlanRequest) -> PrefillPlan:
        plan = plan_prefill(request)
        # A plan has the workspace of its decode steps, which may be none.
        has_counter = plan.takes_tiles and self.workspace_bytes(request) >= COUNTER_BYTES
        return dataclasses.replace(plan, takes_tiles=has_counter)

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """Bytes of partial results that no plan passes, on any device."""
        if isinstance(self.explicit, Direct):
            return 0
        attention, step = largest.attention, largest.step
        if self.explicit is not None:
            partitions = split_partitions(
                self.explicit, table_width=step.table_width, window=attention.window
            )
            # Grows with N and with M, so the largest step needs most.
            return split_workspace_bytes(step, attention, partitions)
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
