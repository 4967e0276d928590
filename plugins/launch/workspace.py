"""What a decode plan leaves in the workspace between its blocks, and how large it is.

Partial outputs come first, then their log-sum-exps, then counters. Nothing of it has a meaning
between two steps: the append kernel sets the counters to zero.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.kv import pages_for_tokens, tokens_in_pages
from paged_trt.plugins.launch.plans import (
    AttentionPlan,
    Balanced,
    Cluster,
    Counter,
    Direct,
    Gather,
    SplitKv,
)
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape

HEADS_PER_TILE: Final = 8
"""Query heads of one tensor-core tile."""
RESIDENT_WARPS: Final = 8
"""Warps of a multiprocessor: with 255 registers each they read as fast as twelve with 168."""
SMALL_BLOCK_WARPS: Final = 4
LARGEST_SHARED_ACCUMULATORS: Final = 1024
"""Value elements of all heads of a block up to which eight warps' share 48 KB of shared memory."""
USUAL_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200; taken where the device is not known."""
MOST_MULTIPROCESSORS: Final = 256
"""More are not filled: the workspace is bounded before the device is known."""
FIRST_CLUSTER_ARCH: Final = 90
_ITEM_BYTES: Final = 4


def head_tiles(group_size: int, value_head_dim: int) -> int:
    """Tiles of eight query heads that a block serves; larger groups take more blocks.

    Two tiles read the keys of a group of up to 16 once. Wide value heads keep to one: the
    accumulators of two would leave no registers for keys in flight.
    """
    return 2 if group_size > HEADS_PER_TILE and value_head_dim <= 128 else 1


def block_heads(attention: AttentionSpec) -> int:
    """Most query heads of one block."""
    tiles = head_tiles(attention.group_size, attention.value_head_dim)
    return min(attention.group_size, HEADS_PER_TILE * tiles)


def block_columns(attention: AttentionSpec) -> int:
    """Blocks that serve all query heads of a sequence, each with all of its keys."""
    tiles = head_tiles(attention.group_size, attention.value_head_dim)
    return attention.num_kv_heads * -(-attention.group_size // (HEADS_PER_TILE * tiles))


def architecture(arch: str | None) -> int:
    """Number of an architecture, such as 90 of `sm_90`; 0 where it is not known."""
    number = re.match(r"sm_(\d+)", arch or "")
    return int(number[1]) if number else 0


def has_clusters(arch: str | None) -> bool:
    """Whether the cluster kernel is used: it compiles from sm_90 on, and has run there only."""
    return architecture(arch) == FIRST_CLUSTER_ARCH


def sharing_warps(group_size: int, value_head_dim: int) -> int:
    """Warps of a block that shares the keys of a sequence with others.

    There is about one such block for each multiprocessor, so it has all eight warps, as long as
    their accumulators fit the static shared memory.
    """
    tiles = head_tiles(group_size, value_head_dim)
    fits = tiles * HEADS_PER_TILE * value_head_dim <= LARGEST_SHARED_ACCUMULATORS
    return RESIDENT_WARPS if fits else SMALL_BLOCK_WARPS


def sharing_slots(request: AttentionPlanRequest) -> int:
    """Such blocks that the device holds at once."""
    attention = request.attention
    warps = sharing_warps(attention.group_size, attention.value_head_dim)
    return multiprocessors(request) * (RESIDENT_WARPS // warps)


def multiprocessors(request: AttentionPlanRequest) -> int:
    """Multiprocessors that a plan counts on."""
    return min(request.num_multiprocessors or USUAL_MULTIPROCESSORS, MOST_MULTIPROCESSORS)


def split_partitions(plan: SplitKv, *, table_width: int, window: int) -> int:
    """Partitions of the grid of a split decode, from shapes only.

    A window starts anywhere in a page, and partitions start at a page: hence the page on top.
    """
    tokens = tokens_in_pages(table_width)
    if window != FULL_WINDOW:
        pages = pages_for_tokens(min(window, tokens)) + 1
        tokens = tokens_in_pages(min(pages, table_width))
    return max(1, -(-tokens // plan.partition_tokens))


def visible_pages(request: AttentionPlanRequest) -> int:
    """Pages of one sequence that a decode step may read."""
    single = SplitKv(partition_tokens=tokens_in_pages(1), threshold_tokens=0)
    return split_partitions(
        single, table_width=request.step.table_width, window=request.attention.window
    )


def plan_blocks(plan: AttentionPlan, request: AttentionPlanRequest) -> int:
    """Blocks that share keys: of a (sequence, key head), or of the whole batch where balanced."""
    if isinstance(plan, Direct | Gather):
        return 1
    if isinstance(plan, Cluster | Counter):
        return plan.blocks
    if isinstance(plan, Balanced):
        return multiprocessors(request) * (RESIDENT_WARPS // SMALL_BLOCK_WARPS)
    step = request.step
    return split_partitions(plan, table_width=step.table_width, window=request.attention.window)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkspace:
    """Sizes of the parts of a workspace.

    Attributes:
        rows: partial outputs of one head.
        value_head_dim: float32 elements of each.
        num_counters: int32.
    """

    rows: int
    value_head_dim: int
    num_counters: int

    @property
    def lse_offset(self) -> int:
        """Bytes in front of the log-sum-exps."""
        return _ITEM_BYTES * self.rows * self.value_head_dim

    @property
    def counter_offset(self) -> int:
        """Bytes in front of the counters."""
        return self.lse_offset + _ITEM_BYTES * self.rows

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return self.counter_offset + _ITEM_BYTES * self.num_counters


def decode_workspace(
    plan: AttentionPlan, attention: AttentionSpec, step: StepShape, blocks: int
) -> DecodeWorkspace:
    """Workspace of a decode step.

    Args:
        plan: the plan.
        attention: geometry of the layer.
        step: T, N and M.
        blocks: `plan_blocks`.
    """
    rows = num_counters = 0
    columns = step.num_seqs * block_columns(attention)
    if isinstance(plan, SplitKv):
        rows = step.num_seqs * attention.num_q_heads * blocks
    elif isinstance(plan, Counter):
        rows, num_counters = columns * blocks * block_heads(attention), columns
    elif isinstance(plan, Balanced):
        # A block starts in the middle of one row of keys and ends in the middle of another.
        rows, num_counters = 2 * blocks * block_heads(attention), columns
    return DecodeWorkspace(
        rows=rows, value_head_dim=attention.value_head_dim, num_counters=num_counters
    )


def plan_workspace_bytes(plan: AttentionPlan, request: AttentionPlanRequest) -> int:
    """Bytes of workspace of a decode step."""
    blocks = plan_blocks(plan, request)
    return decode_workspace(plan, request.attention, request.step, blocks).num_bytes
