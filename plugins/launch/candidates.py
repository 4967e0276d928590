"""Decode plans that are worth timing, whoever times them: the tuner and the benchmarks."""

from __future__ import annotations

from paged_trt.plugins.kv import tokens_in_pages
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
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.workspace import (
    block_columns,
    has_clusters,
    sharing_slots,
    visible_pages,
)


def decode_candidates(request: AttentionPlanRequest) -> tuple[AttentionPlan, ...]:
    """Plans of a decode step that are worth timing; some may pass a plan's workspace."""
    columns = request.step.num_seqs * block_columns(request.attention)
    pages, units = visible_pages(request), sharing_slots(request)
    plans: list[AttentionPlan] = [Direct()]
    if request.step.num_seqs > 1:
        plans.append(Balanced())
    # From half of the blocks that the device holds to four times as many.
    shares = [n for n in range(2, MOST_COUNTER_BLOCKS + 1) if units <= 2 * n * columns <= 8 * units]
    if has_clusters(request.arch):
        plans += [Cluster(blocks=size) for size in CLUSTER_BLOCKS if size in shares]
    wanted = {shares[0], units // columns, 2 * units // columns, shares[-1]} if shares else set()
    counts = sorted(n for n in wanted if n in shares and n <= 2 * pages)
    plans += [Counter(blocks=count) for count in counts]
    plans += [split_in(request, count) for count in counts]
    return tuple(dict.fromkeys(plans))


def split_in(request: AttentionPlanRequest, count: int) -> SplitKv:
    """Split of the longest sequence into about `count` partitions of whole pages."""
    tokens = tokens_in_pages(-(-visible_pages(request) // count))
    return SplitKv(partition_tokens=tokens, threshold_tokens=tokens)
