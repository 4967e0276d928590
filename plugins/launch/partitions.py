"""How many partitions of a split decode have work, for a sequence of a given length.

The grid is sized from shapes by `workspace.split_partitions`; on the device each sequence
counts its own partitions from its length, as `kernels/partitions.cuh` does and as this says.
"""

from __future__ import annotations

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.kv import page_of_position, tokens_in_pages
from paged_trt.plugins.launch.plans import SplitKv


def active_partitions(plan: SplitKv, *, token_count: int, window: int) -> int:
    """Partitions that one sequence of a decode step keeps busy.

    Args:
        plan: the split.
        token_count: keys of the sequence, the step's own token included; 0 for a padding row.
        window: keys visible to the left including self, or FULL_WINDOW.

    Returns:
        0 for a padding row; 1 where no more than `threshold_tokens` keys are visible.
    """
    if token_count <= 0:
        return 0
    visible = token_count if window == FULL_WINDOW else min(token_count, window)
    if visible <= plan.threshold_tokens:
        return 1
    first_of_page = tokens_in_pages(page_of_position(token_count - visible))
    return (token_count - 1 - first_of_page) // plan.partition_tokens + 1
