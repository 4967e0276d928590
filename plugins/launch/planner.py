"""Chooses the plan of a step, and bounds the workspace of every plan that it may choose.

The bound is asked for when an engine is built, perhaps on a machine without a GPU, and the plan
when it runs: so the bound holds for every device. A plan keeps the bound that it was built with,
so a larger one needs a new ABI_VERSION.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

from paged_trt.plugins.kv import pages_for_tokens, tokens_in_pages
from paged_trt.plugins.launch.candidates import decode_candidates
from paged_trt.plugins.launch.gather import (
    FEWEST_ROWS,
    GATHERS_UNASKED,
    UNASKED_HEAD_DIMS,
    as_gathered,
    layer_refusal,
    most_gather_bytes,
    query_rows,
    size_refusal,
)
from paged_trt.plugins.launch.kernels_prefill_sm90 import COUNTER_BYTES, plan_prefill
from paged_trt.plugins.launch.plans import (
    CLUSTER_BLOCKS,
    MOST_COUNTER_BLOCKS,
    AttentionPlan,
    Balanced,
    Cluster,
    Counter,
    Direct,
    Gather,
    PlanSource,
    PrefillPlan,
    SplitKv,
)
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import NO_TUNED_PLANS, TunedPlans
from paged_trt.plugins.launch.workspace import (
    MOST_MULTIPROCESSORS,
    block_columns,
    block_heads,
    has_clusters,
    multiprocessors,
    plan_workspace_bytes,
    sharing_slots,
    visible_pages,
)

# Measured on an H200 of 132 multiprocessors.
FULL_FACTOR: Final = 0.75
"""Blocks per multiprocessor from which one block for each (sequence, key head) fills the device."""
DIRECT_TOKENS: Final = 512
"""So few keys are read faster than blocks merge through memory."""
UNEVEN_TOKENS: Final = 4096
"""Longest sequences of a batch from which a schedule pays: it costs an even batch 3%, and without
it an uneven one takes as long as an even one of its longest sequence."""
SMALLEST_SHARE: Final = 64
"""Tokens below which a block of a cluster has too little to read."""
CLUSTER_TOKENS: Final = 1024
"""Longest sequences for which a cluster pays that leaves multiprocessors idle."""
FULL_CLUSTERS: Final = 0.75
"""Share of the blocks that the device holds from which clusters pay for longer sequences too."""
CLUSTER_SHARES: Final = {2: 1.0, 4: 0.75, 8: 0.5}
"""Share of the blocks that the device holds up to which clusters of a size run at once: a cluster
needs all of its blocks in one group of multiprocessors, and groups are of uneven sizes."""
MOST_MERGED_ELEMENTS: Final = 12288
"""Value elements of all partials of a (sequence, key head) beyond which a merge kernel is faster
than one last block: of 16 x 4 heads x 128 the block was (3%), of 16 x 8 x 128 the kernel (4%)."""
MOST_SLOTS: Final = 2 * 2 * MOST_MULTIPROCESSORS
"""Partials that no heuristic plan passes: two of each of two blocks on every
multiprocessor of a balanced decode."""


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
        gathers_unasked: whether prefill steps may gather without an explicit plan.
    """

    explicit: AttentionPlan | None
    tuned: TunedPlans = NO_TUNED_PLANS
    gathers_unasked: bool = GATHERS_UNASKED

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        """The explicit plan, else the tuned one, else the heuristic's; pure.

        `Gather` is about prefill steps; every other explicit plan is about decode steps.
        """
        if not request.is_decode:
            return self._prefill(request)
        if self.explicit is not None and not self.uses_tuned:
            return PlannedAttention(
                plan=self.explicit,
                source=PlanSource.EXPLICIT,
                reason="the engine was built with `--attention-plan`",
            )
        found = self.tuned.find(request)
        # The workspace was sized for the heuristic when the engine was built.
        if found is not None and not isinstance(found.plan, Gather) and _fits(found.plan, request):
            return PlannedAttention(
                plan=found.plan, source=PlanSource.TUNED, reason=found.explain()
            )
        return PlannedAttention(
            plan=_heuristic(request), source=PlanSource.HEURISTIC, reason=_reason(request)
        )

    @property
    def uses_tuned(self) -> bool:
        """Whether measured plans of decode steps count."""
        return self.explicit is None or isinstance(self.explicit, Gather)

    def may_gather(self, request: AttentionPlanRequest) -> bool:
        """Whether some step of a layer may gather, on some device where none is given.

        Args:
            request: any step of the layer.
        """
        is_allowed = isinstance(self.explicit, Gather) or (
            self.explicit is None
            and self.gathers_unasked
            and request.attention.head_dim in UNASKED_HEAD_DIMS
        )
        return is_allowed and layer_refusal(request) is None

    def _prefill(self, request: AttentionPlanRequest) -> PlannedAttention:
        gathers, source, reason = self._gathers(request)
        plan = plan_prefill(as_gathered(request) if gathers else request)
        if gathers:
            # Its workspace has room for the counter.
            plan = dataclasses.replace(plan, gathers=True, reason=reason)
        else:
            # An engine has the workspace of its decode steps, which may be none.
            has_counter = plan.takes_tiles and self.workspace_bytes(request) >= COUNTER_BYTES
            reason = f"{plan.reason}; {reason}" if reason else plan.reason
            plan = dataclasses.replace(plan, takes_tiles=has_counter, reason=reason)
        return PlannedAttention(plan=plan, source=source, reason=plan.reason)

    def _gathers(self, request: AttentionPlanRequest) -> tuple[bool, PlanSource, str]:
        """Whether a prefill step gathers, who says so, and why; empty where nothing is to say."""
        heuristic = PlanSource.HEURISTIC
        if request.arch is None or layer_refusal(request) is not None:
            return False, heuristic, ""
        if (problem := size_refusal(request)) is not None:
            return False, heuristic, f"gathering its pages needs {problem}"
        if isinstance(self.explicit, Gather):
            return True, PlanSource.EXPLICIT, "the engine was built with `--attention-plan gather`"
        if not self.may_gather(request):
            return False, heuristic, "only `--attention-plan gather` gathers its pages"
        found = self.tuned.find(request)
        # Rounded up, few tokens of many sequences look like a decode step.
        if found is not None and found.request.num_tokens > found.request.num_seqs:
            return isinstance(found.plan, Gather), PlanSource.TUNED, found.explain()
        rows = query_rows(request)
        return (
            rows >= FEWEST_ROWS,
            heuristic,
            f"gathering pays from {FEWEST_ROWS} query rows a key on, and each serves {rows}",
        )

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        """Bytes of workspace that no plan passes, on any device."""
        gathered = most_gather_bytes(largest) if self.may_gather(largest) else 0
        return max(gathered, self._decode_bytes(largest))

    def _decode_bytes(self, largest: AttentionPlanRequest) -> int:
        if self.explicit is not None and not self.uses_tuned:
            # Grows with N and with M, so the largest step needs most.
            return plan_workspace_bytes(
                self.explicit,
                dataclasses.replace(largest, num_multiprocessors=MOST_MULTIPROCESSORS),
            )
        attention, pages = largest.attention, visible_pages(largest)
        if tokens_in_pages(pages) <= DIRECT_TOKENS:
            return 0
        columns = largest.step.num_seqs * block_columns(attention)
        slots = min(MOST_SLOTS, columns * pages)
        slot_bytes = 4 * block_heads(attention) * (attention.value_head_dim + 1)
        return slots * slot_bytes + 4 * columns


def _fits(plan: AttentionPlan, request: AttentionPlanRequest) -> bool:
    """Whether a decode plan needs no more workspace than every engine without a policy has."""
    bound = PolicyPlanner(explicit=None, gathers_unasked=False).workspace_bytes(request)
    return plan_workspace_bytes(plan, request) <= bound


def candidates(
    request: AttentionPlanRequest, *, gathers_unasked: bool = GATHERS_UNASKED
) -> tuple[AttentionPlan, ...]:
    """Plans of a step worth timing, the heuristic's first.

    All fit the workspace of every engine that was built without a policy. Of a prefill step,
    `Direct` attends from the pool.

    Args:
        request: the step.
        gathers_unasked: as in `PolicyPlanner`.
    """
    if not request.is_decode:
        planner = PolicyPlanner(explicit=None, gathers_unasked=gathers_unasked)
        if not planner.may_gather(request) or size_refusal(request) is not None:
            return (Direct(),)
        pays = query_rows(request) >= FEWEST_ROWS
        return (Gather(), Direct()) if pays else (Direct(), Gather())
    first = _heuristic(request)
    others = [plan for plan in decode_candidates(request) if _fits(plan, request)]
    return tuple(dict.fromkeys((first, *others)))


def _heuristic(request: AttentionPlanRequest) -> AttentionPlan:
    """As many blocks as the device holds, or one for each (sequence, key head) if that fills it."""
    attention, num_seqs = request.attention, request.step.num_seqs
    columns = num_seqs * block_columns(attention)
    pages = visible_pages(request)
    tokens = tokens_in_pages(pages)
    # It has two partials for each block, however few pages there are, and the bound counts pages.
    if num_seqs > 1 and tokens > UNEVEN_TOKENS and _fits(Balanced(), request):
        return Balanced()
    if columns >= FULL_FACTOR * multiprocessors(request):
        return Direct()
    blocks = sharing_slots(request) // columns
    if blocks < 2:
        # Two each would take two rounds.
        return Balanced() if num_seqs > 1 and tokens > CLUSTER_TOKENS else Direct()
    if cluster := _cluster(request, columns, blocks):
        return cluster
    blocks = min(blocks, pages)
    if tokens <= DIRECT_TOKENS or blocks < 2:
        return Direct()
    elements = blocks * block_heads(attention) * attention.value_head_dim
    if blocks <= MOST_COUNTER_BLOCKS and elements <= MOST_MERGED_ELEMENTS:
        return Counter(blocks=blocks)
    # Whole pages: a partition of that many tokens, rounded up to its last page.
    partition = tokens_in_pages(pages_for_tokens(-(-tokens // blocks)))
    return SplitKv(partition_tokens=partition, threshold_tokens=partition)


def _cluster(request: AttentionPlanRequest, columns: int, blocks: int) -> Cluster | None:
    """The largest cluster that runs at once, where clusters win."""
    if not has_clusters(request.arch):
        return None
    tokens, slots = tokens_in_pages(visible_pages(request)), sharing_slots(request)
    fitting = [
        size
        for size in CLUSTER_BLOCKS
        if size <= blocks
        and size * SMALLEST_SHARE <= tokens
        and size * columns <= CLUSTER_SHARES[size] * slots
        and (tokens <= CLUSTER_TOKENS or size * columns >= FULL_CLUSTERS * slots)
    ]
    return Cluster(blocks=fitting[-1]) if fitting else None


def _reason(request: AttentionPlanRequest) -> str:
    """Why `_heuristic` chose its plan, in words."""
    plan = _heuristic(request)
    columns = request.step.num_seqs * block_columns(request.attention)
    tokens, units = tokens_in_pages(visible_pages(request)), multiprocessors(request)
    where = f"{columns} blocks of heads, up to {tokens} keys each, {units} multiprocessors"
    if isinstance(plan, Balanced):
        return f"{where}: all keys are shared evenly, because long sequences may differ in length"
    if isinstance(plan, Direct):
        if columns >= FULL_FACTOR * units:
            return f"{where}: one block each fills the device"
        return f"{where}: so few keys are read faster than blocks merge"
    if isinstance(plan, Cluster):
        return f"{where}: {plan.blocks} blocks share the keys of each and merge on chip"
    if isinstance(plan, Counter):
        return f"{where}: {plan.blocks} blocks share the keys of each, the last one merges"
    return f"{where}: so many partitions that a kernel of its own merges them"
