"""Append, decode and merge kernels: what to compile, how to launch it, what to pass it.

A launch needs no CUDA call besides the launch itself: shared memory is static, the grid follows
from T, N and the number of partitions. Warps and head tiles of a block are template arguments,
so they are chosen here and nowhere else; what follows from them is derived in
`kernels/decode_config.cuh`.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.launch import args
from paged_trt.plugins.launch.plans import AttentionPlan, Direct, SplitKv
from paged_trt.plugins.launch.registry import USUAL, KernelKey, KernelPath, KernelVariant
from paged_trt.plugins.launch.workspace import (
    HEADS_PER_TILE,
    SMALL_BLOCK_WARPS,
    decode_workspace,
    head_tiles,
    sharing_warps,
)
from paged_trt.plugins.operands import Operand, StepShape

Grid = tuple[int, int, int]
Struct = TypeVar("Struct", bound=ctypes.Structure)

ELEMENT_TYPES: Final = {
    DType.FLOAT16: "__half",
    DType.BFLOAT16: "__nv_bfloat16",
    DType.FLOAT8: "paged_trt::Float8",
    DType.INT8: "paged_trt::Int8",
}
"""C++ name of each element type."""
ARGUMENTS: Final[Mapping[KernelPath, type[ctypes.Structure]]] = {
    KernelPath.APPEND: args.AppendArgs,
    KernelPath.DECODE_DIRECT: args.DecodeDirectArgs,
    KernelPath.DECODE_CLUSTER: args.DecodeDirectArgs,
    KernelPath.DECODE_COUNTER: args.DecodeCounterArgs,
    KernelPath.DECODE_BALANCED: args.DecodeCounterArgs,
    KernelPath.DECODE_SPLIT: args.DecodeSplitArgs,
    KernelPath.MERGE: args.MergeArgs,
}
"""Argument struct of each path."""
MAX_HEAD_DIM: Final = 256
HEAD_DIM_STEP: Final = 16
WARP_LANES: Final = 32
LANE_ELEMENTS: Final = 16
"""Elements of a head that a lane of the append kernel moves in a round."""
APPEND_THREADS: Final = 128
APPEND_WARPS: Final = 1024
"""Warps of an append that keep a device busy; one of more rounds gives several to each."""
MOST_APPEND_ROUNDS: Final = 4
"""Rounds of a warp, all in flight at once."""
MOST_BALANCED_ROUNDS: Final = 4
"""Blocks of a balanced grid for each one that shares keys: where lengths differ, the others are
launched to do nothing."""
MERGE_THREADS: Final = 128
WIDEST_CLUSTER_KEYS: Final = 128
"""Queries of two tiles of wider heads, beside what a cluster sends, pass 48 KB of shared memory."""
GRID_LIMIT: Final = 65535
"""Largest second and third dimension of a grid; the kernels walk over sequences beyond it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """How one kernel is compiled and launched.

    Attributes:
        source: file in the kernel directory.
        name_expression: the instance, for NVRTC.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        head_tiles: tiles of query heads that a block serves; 0 where it does not matter.
    """

    source: str
    name_expression: str
    threads: int
    shared_bytes: int = 0
    head_tiles: int = 0


def kernel_build(key: KernelKey, variant: KernelVariant = USUAL) -> KernelBuild:
    """The kernel of a key.

    Args:
        key: what it is compiled for.
        variant: how it differs from what engines run; a benchmark's.

    Raises:
        UnsupportedError: the path has no kernel here, or a head dim or type is not covered.
    """
    _check(key)
    activation, kv = ELEMENT_TYPES[key.activation_dtype], ELEMENT_TYPES[key.kv_cache_dtype]
    dims = f"{key.head_dim}, {key.value_head_dim}"
    features = key.features.value | variant.bits(key.path)
    if key.path is KernelPath.APPEND:
        name = f"append<{activation}, {kv}, {dims}, {features}>"
        return _build(key, name, APPEND_THREADS)
    if key.path is KernelPath.MERGE:
        return _build(key, f"merge<{activation}, {key.value_head_dim}>", MERGE_THREADS)
    tiles = head_tiles(key.group_size, key.value_head_dim)
    if key.path is KernelPath.DECODE_CLUSTER and key.head_dim > WIDEST_CLUSTER_KEYS:
        tiles = 1
    warps = variant.warps or decode_warps(key)
    block = f"{key.group_size}, {warps}, {tiles}, {features}"
    name = f"{key.path.value}<{activation}, {kv}, {dims}, {block}>"
    return _build(key, name, warps * 32, tiles)


def _build(key: KernelKey, name: str, threads: int, tiles: int = 0) -> KernelBuild:
    return KernelBuild(
        source=f"{key.path.value}.cu",
        name_expression=f"paged_trt::{name}",
        threads=threads,
        head_tiles=tiles,
    )


def _check(key: KernelKey) -> None:
    if key.path not in ARGUMENTS:
        raise UnsupportedError(f"{key.path.value} is no kernel of a decode step")
    if key.activation_dtype not in ACTIVATION_DTYPES or key.kv_cache_dtype not in ELEMENT_TYPES:
        raise UnsupportedError(
            f"no kernel reads {key.activation_dtype.value} with a {key.kv_cache_dtype.value} pool; "
            "activations are float16 or bfloat16"
        )
    for name, dim in (("head_dim", key.head_dim), ("value_head_dim", key.value_head_dim)):
        if dim % HEAD_DIM_STEP or not 0 < dim <= MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name}={dim} has no decode kernel; it must be a multiple of {HEAD_DIM_STEP} up "
                f"to {MAX_HEAD_DIM}"
            )


def decode_warps(key: KernelKey) -> int:
    """Warps of a decode block.

    A direct or balanced grid is large: two small blocks on a multiprocessor cover each other's
    starts and ends.
    """
    if key.path in {KernelPath.DECODE_DIRECT, KernelPath.DECODE_BALANCED}:
        return SMALL_BLOCK_WARPS
    return sharing_warps(key.group_size, key.value_head_dim)


def append_rounds(*, num_kv_heads: int, head_dim: int, value_head_dim: int) -> int:
    """Rounds in which the append kernel moves a token's keys and values: whole heads of a warp."""
    heads = (WARP_LANES // (dim // LANE_ELEMENTS) for dim in (head_dim, value_head_dim))
    return sum(-(-num_kv_heads // each) for each in heads)


def rounds_per_append_warp(num_tokens: int, rounds: int) -> int:
    """Rounds of one warp: the warps of few tokens are many, for nothing else hides their latency.

    Args:
        num_tokens: T.
        rounds: `append_rounds` of the layer.
    """
    wanted = max(1, num_tokens * rounds // APPEND_WARPS)
    return min(1 << (wanted - 1).bit_length(), MOST_APPEND_ROUNDS)


def kernel_grid(
    key: KernelKey, build: KernelBuild, step: StepShape, *, num_kv_heads: int, partitions: int = 1
) -> Grid:
    """Grid of one launch.

    Args:
        key: the kernel's key.
        build: `kernel_build(key)`.
        step: T, N and M.
        num_kv_heads: key heads of the layer.
        partitions: `plan_blocks` of the plan.
    """
    sequences = min(step.num_seqs, GRID_LIMIT)
    if key.path is KernelPath.APPEND:
        rounds = append_rounds(
            num_kv_heads=num_kv_heads, head_dim=key.head_dim, value_head_dim=key.value_head_dim
        )
        parts = -(-rounds // rounds_per_append_warp(step.num_tokens, rounds))
        return (-(-step.num_tokens * WARP_LANES // build.threads), parts, 1)
    if key.path is KernelPath.MERGE:
        return (num_kv_heads * key.group_size, sequences, 1)
    head_blocks = -(-key.group_size // (HEADS_PER_TILE * build.head_tiles))
    if key.path is KernelPath.DECODE_BALANCED:
        columns = step.num_seqs * num_kv_heads * head_blocks
        is_idle_cheap = columns <= MOST_BALANCED_ROUNDS * partitions
        return (max(partitions, columns) if is_idle_cheap else partitions, 1, 1)
    return (partitions * head_blocks, num_kv_heads, sequences)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallAddresses:
    """Device addresses and strides of one attention call.

    Attributes:
        operands: address of each operand, in the order of `Operand`.
        token_strides: elements between two token rows of query, key and value.
        output: address of output 0, dense token rows.
        workspace: address of `plan_workspace_bytes` bytes; 0 where the plan needs none.
    """

    operands: tuple[int, ...]
    token_strides: tuple[int, int, int]
    output: int
    workspace: int = 0


def fill_arguments(
    struct: type[Struct],
    addresses: CallAddresses,
    *,
    attention: AttentionSpec,
    pool: KvPoolSpec,
    step: StepShape,
    plan: AttentionPlan = Direct(),  # noqa: B008 - frozen
    blocks: int = 1,
    gathered: Mapping[str, int] = MappingProxyType({}),
) -> Struct:
    """Argument block of one launch.

    Args:
        struct: one of `ARGUMENTS`.
        addresses: where the tensors are.
        attention: geometry of the layer.
        pool: page geometry.
        step: T, N and M.
        plan: the plan of a decode step; of a prefill, none is asked for.
        blocks: `plan_blocks` of the plan.
        gathered: fields that only a step that gathers has.

    Raises:
        KeyError: a field of `struct` has no value, such as a split's without a plan.
    """
    values: dict[str, int | float] = {
        **{operand.name.lower(): addresses.operands[operand] for operand in Operand},
        **_scalars(attention, pool, step),
        "output": addresses.output,
        "tile_counter": 0,
        "query_token_stride": addresses.token_strides[0],
        "key_token_stride": addresses.token_strides[1],
        "value_token_stride": addresses.token_strides[2],
        "output_token_stride": attention.num_q_heads * attention.value_head_dim,
        **_shared_values(addresses.workspace, plan, attention, step, blocks),
        **gathered,
    }
    # Arrays, such as tensor maps, are left to those who encode them.
    return struct(
        **{
            name: values[name]
            for name, kind, *_ in struct._fields_
            if not issubclass(kind, ctypes.Array)
        }
    )


def _scalars(attention: AttentionSpec, pool: KvPoolSpec, step: StepShape) -> dict[str, int | float]:
    rounds = append_rounds(
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        value_head_dim=attention.value_head_dim,
    )
    return {
        "num_tokens": step.num_tokens,
        "rounds_per_warp": rounds_per_append_warp(step.num_tokens, rounds),
        "num_seqs": step.num_seqs,
        "table_width": step.table_width,
        "num_pages": pool.num_pages,
        "num_q_heads": attention.num_q_heads,
        "num_kv_heads": attention.num_kv_heads,
        "rope": int(attention.rope),
        "rotary_dim": attention.rotary_dim,
        "window": attention.window,
        "softmax_scale": attention.softmax_scale,
        "softcap": attention.softcap,
    }


def _shared_values(
    address: int, plan: AttentionPlan, attention: AttentionSpec, step: StepShape, blocks: int
) -> dict[str, int]:
    """Where the parts of the workspace are, and who uses them."""
    workspace = decode_workspace(plan, attention, step, blocks)
    values = {
        "partial_output": address,
        "partial_lse": address + workspace.lse_offset,
        "counters": address + workspace.counter_offset,
        "num_counters": workspace.num_counters,
        "num_blocks": blocks,
    }
    if isinstance(plan, SplitKv):
        values |= {
            "partition_tokens": plan.partition_tokens,
            "threshold_tokens": plan.threshold_tokens,
            "num_partitions": blocks,
        }
    return values
