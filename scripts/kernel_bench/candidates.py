"""Everything worth trying on a cell: plans, sizes of blocks, variants of kernels.

More than the planner weighs: what wins here is what the planner and the kernels should learn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

from paged_trt.plugins.launch.candidates import split_in
from paged_trt.plugins.launch.dispatch import kernel_paths
from paged_trt.plugins.launch.kernels_decode import MOST_APPEND_ROUNDS
from paged_trt.plugins.launch.planner import candidates
from paged_trt.plugins.launch.plans import (
    CLUSTER_BLOCKS,
    MOST_COUNTER_BLOCKS,
    AttentionPlan,
    Balanced,
    Cluster,
    Counter,
    Direct,
    SplitKv,
)
from paged_trt.plugins.launch.registry import USUAL, KernelPath, KernelVariant
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.workspace import (
    RESIDENT_WARPS,
    SMALL_BLOCK_WARPS,
    block_columns,
    has_clusters,
    multiprocessors,
    sharing_slots,
    sharing_warps,
    visible_pages,
)

FILLINGS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Times that the blocks which share keys fill the device."""
SMALL: Final = KernelVariant(warps=SMALL_BLOCK_WARPS)
LARGE: Final = KernelVariant(warps=RESIDENT_WARPS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run a cell.

    Attributes:
        plan: of a decode; None leaves it to the planner.
        variant: of the kernel that is timed.
        append_rounds: rounds of a warp of an append; None as in engines.
    """

    plan: AttentionPlan | None = None
    variant: KernelVariant = USUAL
    append_rounds: int | None = None

    def __str__(self) -> str:
        name = str(self.plan) if self.plan is not None else "append"
        if self.append_rounds is not None:
            name += f" {self.append_rounds} rounds"
        return name if self.variant == USUAL else f"{name}, {self.variant}"


def decode_candidates(request: AttentionPlanRequest) -> list[Candidate]:
    """Plans of a decode step in blocks of either size, the heuristic's first."""
    usual = [*candidates(request), Direct(), Balanced(), *_shared(request, sharing_slots(request))]
    found = [Candidate(plan=plan) for plan in usual]
    attention = request.attention
    if sharing_warps(attention.group_size, attention.value_head_dim) > SMALL_BLOCK_WARPS:
        slots = multiprocessors(request) * (RESIDENT_WARPS // SMALL_BLOCK_WARPS)
        small = [plan for plan in _shared(request, slots) if not isinstance(plan, SplitKv)]
        found += [Candidate(plan=plan, variant=SMALL) for plan in small]
        found.append(Candidate(plan=Direct(), variant=LARGE))
    return _runnable(request, found)


def _shared(request: AttentionPlanRequest, slots: int) -> Iterator[AttentionPlan]:
    """Plans whose blocks share the keys of a (sequence, key head), for a device of that many."""
    columns = request.step.num_seqs * block_columns(request.attention)
    most = min(MOST_COUNTER_BLOCKS, 2 * visible_pages(request))
    for filling in FILLINGS:
        blocks = int(filling * slots) // columns
        if 2 <= blocks <= most:
            yield Counter(blocks=blocks)
            yield split_in(request, blocks)
    if has_clusters(request.arch):
        for size in CLUSTER_BLOCKS:
            if FILLINGS[0] * slots / 2 <= size * columns <= 2 * slots:
                yield Cluster(blocks=size)


def variants_of(request: AttentionPlanRequest, best: Iterable[Candidate]) -> list[Candidate]:
    """Kernels of these candidates with another depth."""
    found = [
        dataclasses.replace(each, variant=dataclasses.replace(each.variant, other_depth=True))
        for each in best
    ]
    return _runnable(request, found)


def _runnable(request: AttentionPlanRequest, found: Iterable[Candidate]) -> list[Candidate]:
    """Without twins: a direct plan of few blocks has large ones anyway."""
    kept = []
    for each in dict.fromkeys(found):
        is_small_grid = isinstance(each.plan, Direct) and (
            KernelPath.DECODE_COUNTER in kernel_paths(request, each.plan)
        )
        if not (is_small_grid and each.variant.warps):
            kept.append(each)
    return kept


def append_candidates() -> list[Candidate]:
    """The append as engines cut it, and every other cut."""
    cuts = [Candidate(append_rounds=rounds) for rounds in range(1, MOST_APPEND_ROUNDS + 1)]
    return [Candidate(), *cuts]
