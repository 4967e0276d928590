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
    SplitKv,
)
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import StepShape

HEADS_PER_TILE: Final = 8
"""Query heads of one tensor-core tile."""
FULL_WARPS: Final = 4
"""Warps of a block where a multiprocessor holds several, which cover each other's starts."""
LEAN_REGISTERS: Final = 124
"""Registers of keys, values, queries and accumulators up to which three such blocks fit, of 168
registers a thread, without a spill."""
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


def resident_blocks(
    head_dim: int, value_head_dim: int, group_size: int, *, kv_itemsize: int
) -> int:
    """Blocks of FULL_WARPS warps that a multiprocessor holds at once.

    Three, or two with two steps of keys and values in flight, where three have too few registers.
    """
    heads = head_tiles(group_size, value_head_dim)
    row_bytes = max(head_dim, value_head_dim) * kv_itemsize
    tiles = 4 if row_bytes <= 64 else 2 if row_bytes <= 128 else 1
    step = tiles * (head_dim + value_head_dim) * kv_itemsize // 8
    query = head_dim // 8 * heads
    registers = step + (value_head_dim // 4 + 4 * tiles) * heads + (query if query <= 16 else 0)
    return 3 if registers <= LEAN_REGISTERS else 2


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
    if isinstance(plan, Direct):
        return 1
    if isinstance(plan, Cluster | Counter):
        return plan.blocks
    if isinstance(plan, Balanced):
        attention, itemsize = request.attention, request.kv_cache_dtype.itemsize
        dims = (attention.head_dim, attention.value_head_dim, attention.group_size)
        return multiprocessors(request) * resident_blocks(*dims, kv_itemsize=itemsize)
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
