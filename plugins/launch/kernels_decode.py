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
from typing import Final, TypeVar

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.kv import KvPoolSpec, pages_for_tokens, tokens_in_pages
from paged_trt.plugins.launch import args
from paged_trt.plugins.launch.plans import SplitKv
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
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
    KernelPath.DECODE_SPLIT: args.DecodeSplitArgs,
    KernelPath.MERGE: args.MergeArgs,
}
"""Argument struct of each path."""
HEADS_PER_TILE: Final = 8
"""Query heads of one tensor-core tile."""
MAX_HEAD_DIM: Final = 256
HEAD_DIM_STEP: Final = 16
CHUNK_ELEMENTS: Final = 8
"""Elements that a thread of the append kernel moves at once."""
APPEND_THREADS: Final = 256
MERGE_THREADS: Final = 128
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


def kernel_build(key: KernelKey) -> KernelBuild:
    """The kernel of a key.

    Raises:
        UnsupportedError: the path has no kernel here, or a head dim or type is not covered.
    """
    _check(key)
    activation, kv = ELEMENT_TYPES[key.activation_dtype], ELEMENT_TYPES[key.kv_cache_dtype]
    dims = f"{key.head_dim}, {key.value_head_dim}"
    if key.path is KernelPath.APPEND:
        name, threads = f"append<{activation}, {kv}, {dims}>", APPEND_THREADS
        return _build(key, name, threads)
    if key.path is KernelPath.MERGE:
        return _build(key, f"merge<{activation}, {key.value_head_dim}>", MERGE_THREADS)
    tiles = head_tiles(key.group_size, key.value_head_dim)
    warps = decode_warps(key.path, tiles, key.value_head_dim)
    name = f"{key.path.value}<{activation}, {kv}, {dims}, {key.group_size}, {warps}, {tiles}>"
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


def head_tiles(group_size: int, value_head_dim: int) -> int:
    """Tiles of eight query heads that a block serves; larger groups take more blocks.

    Two tiles read the keys of a group of up to 16 once. Wide value heads keep to one: the
    accumulators of two would leave no registers for keys in flight.
    """
    return 2 if group_size > HEADS_PER_TILE and value_head_dim <= 128 else 1


def decode_warps(path: KernelPath, tiles: int, value_head_dim: int) -> int:
    """Warps of a decode block.

    A direct grid is large: two blocks of four warps on a multiprocessor cover each other's
    starts and ends. A split grid has about one block per multiprocessor, so the block has all
    eight warps, as long as their accumulators fit the 48 KB of static shared memory.
    """
    if path is KernelPath.DECODE_DIRECT:
        return 4
    return 8 if tiles * HEADS_PER_TILE * value_head_dim <= 1024 else 4


def split_partitions(plan: SplitKv, *, table_width: int, window: int) -> int:
    """Partitions of the grid of a split decode, from shapes only.

    A window starts anywhere in a page, and partitions start at a page: hence the page on top.
    """
    tokens = tokens_in_pages(table_width)
    if window != FULL_WINDOW:
        pages = pages_for_tokens(min(window, tokens)) + 1
        tokens = tokens_in_pages(min(pages, table_width))
    return max(1, -(-tokens // plan.partition_tokens))


def partial_output_elements(step: StepShape, attention: AttentionSpec, partitions: int) -> int:
    """Float32 elements of a split's `partial_output`, which `partial_lse` follows."""
    return step.num_seqs * attention.num_q_heads * partitions * attention.value_head_dim


def split_workspace_bytes(step: StepShape, attention: AttentionSpec, partitions: int) -> int:
    """Bytes of workspace of a split decode. Its contents mean nothing between launches."""
    rows = step.num_seqs * attention.num_q_heads * partitions
    return 4 * (partial_output_elements(step, attention, partitions) + rows)


def kernel_grid(
    key: KernelKey, build: KernelBuild, step: StepShape, *, num_kv_heads: int, partitions: int = 1
) -> Grid:
    """Grid of one launch.

    Args:
        key: the kernel's key.
        build: `kernel_build(key)`.
        step: T, N and M.
        num_kv_heads: key heads of the layer.
        partitions: `split_partitions` of a split decode.
    """
    sequences = min(step.num_seqs, GRID_LIMIT)
    if key.path is KernelPath.APPEND:
        chunks = num_kv_heads * (key.head_dim + key.value_head_dim) // CHUNK_ELEMENTS
        return (step.num_tokens, min(-(-chunks // build.threads), GRID_LIMIT), 1)
    if key.path is KernelPath.MERGE:
        return (num_kv_heads * key.group_size, sequences, 1)
    head_blocks = -(-key.group_size // (HEADS_PER_TILE * build.head_tiles))
    return (partitions * head_blocks, num_kv_heads, sequences)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallAddresses:
    """Device addresses and strides of one attention call.

    Attributes:
        operands: address of each operand, in the order of `Operand`.
        token_strides: elements between two token rows of query, key and value.
        output: address of output 0, dense token rows.
        workspace: address of `split_workspace_bytes` bytes; 0 for a direct decode.
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
    plan: SplitKv | None = None,
) -> Struct:
    """Argument block of one launch.

    Args:
        struct: one of `ARGUMENTS`.
        addresses: where the tensors are.
        attention: geometry of the layer.
        pool: page geometry.
        step: T, N and M.
        plan: the plan of a split decode and its merge; None otherwise.

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
    }
    if plan is not None:
        values |= _split_values(addresses.workspace, plan, attention, step)
    # Arrays, such as tensor maps, are left to those who encode them.
    return struct(
        **{
            name: values[name]
            for name, kind, *_ in struct._fields_
            if not issubclass(kind, ctypes.Array)
        }
    )


def _scalars(attention: AttentionSpec, pool: KvPoolSpec, step: StepShape) -> dict[str, int | float]:
    return {
        "num_tokens": step.num_tokens,
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


def _split_values(
    workspace: int, plan: SplitKv, attention: AttentionSpec, step: StepShape
) -> dict[str, int]:
    partitions = split_partitions(plan, table_width=step.table_width, window=attention.window)
    outputs = partial_output_elements(step, attention, partitions)
    return {
        "partial_output": workspace,
        "partial_lse": workspace + 4 * outputs,
        "partition_tokens": plan.partition_tokens,
        "threshold_tokens": plan.threshold_tokens,
        "num_partitions": partitions,
    }
