"""Hopper's prefill kernels: what they cover, what to compile, how many blocks, what to pass.

Everything else of a prefill step falls to the portable kernel of `kernels_prefill`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from paged_trt.plugins.attention import Rope
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.launch import tensor_maps
from paged_trt.plugins.launch.args import PrefillSm90Args, TensorMap
from paged_trt.plugins.launch.kernels_decode import ELEMENT_TYPES, KernelBuild
from paged_trt.plugins.launch.plans import PrefillPlan
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest

HEAD_DIMS: Final = (64, 128, 256)
TILE_ROWS: Final = 128
"""Query rows of a tile: tokens times the heads of a group."""
THREADS: Final = 384
USUAL_MULTIPROCESSORS: Final = 132
MOST_PARTITIONS: Final = 8
"""Blocks of a cluster; more than 8 are not portable."""
PAGES_PER_PARTITION: Final = 2
"""Fewer keys than these are not worth a merge."""

MOST_DEALT: Final = 3
"""Tiles of a block that are dealt out; more are taken from a counter."""
DEALT_PAGES: Final = 4
"""Tiles of sequences of no more pages are dealt out, however many: they cost so little that taking
one from a counter shows. On an H200, 16 x 512 tokens took 105.2 us instead of 110.1, of which about
3.7 were for clearing the counter, as appends do since; at 16 x 1,024 clearing was all there was."""
COUNTER_BYTES: Final = 4
"""Workspace of a step whose blocks take tiles."""

EncodeMap = Callable[..., bytes]


def refusal(request: AttentionPlanRequest) -> str | None:
    """Why these kernels do not cover a layer; None where they do."""
    attention = request.attention
    rotary_step = {Rope.NONE: 1, Rope.HALF_SPLIT: 8, Rope.INTERLEAVED: 4}[attention.rope]
    for is_refused, reason in (
        (not re.fullmatch(r"sm_90a?", request.arch or ""), f"{request.arch} is not sm_90"),
        (
            request.kv_cache_dtype is not request.activation_dtype,
            f"a {request.kv_cache_dtype.value} pool under {request.activation_dtype.value}",
        ),
        (
            not _has_dims(attention.head_dim, attention.value_head_dim),
            f"head_dim={attention.head_dim}"
            if attention.value_head_dim == attention.head_dim
            else f"value_head_dim={attention.value_head_dim} beside head_dim={attention.head_dim}",
        ),
        (attention.group_size > TILE_ROWS, f"group_size={attention.group_size}"),
        (attention.softmax_scale <= 0, f"softmax_scale={attention.softmax_scale}"),
        (attention.rotary_dim % rotary_step != 0, f"rotary_dim={attention.rotary_dim}"),
    ):
        if is_refused:
            return reason
    return None


def _has_dims(head_dim: int, value_head_dim: int) -> bool:
    return head_dim == value_head_dim and head_dim in HEAD_DIMS


def plan_prefill(request: AttentionPlanRequest) -> PrefillPlan:
    """Kernel of a prefill step; pure.

    A step with fewer query tiles than multiprocessors splits the keys of each tile.
    """
    reason = refusal(request)
    if reason is not None:
        return PrefillPlan(kernel="portable", reason=f"hopper's kernel has no {reason}")
    tiles = most_tiles(request)
    units = request.num_multiprocessors or USUAL_MULTIPROCESSORS
    most = min(units // tiles, request.step.table_width // PAGES_PER_PARTITION, MOST_PARTITIONS)
    if most < 2:
        return PrefillPlan(
            kernel="hopper",
            reason="sm_90, dims and types covered",
            blocks=min(tiles, units),
            takes_tiles=tiles > MOST_DEALT * units and request.step.table_width > DEALT_PAGES,
        )
    partitions = 1 << (most.bit_length() - 1)  # clusters of a power of two
    return PrefillPlan(
        kernel="hopper",
        reason=f"at most {tiles} query tiles on {units} multiprocessors",
        blocks=tiles * partitions,
        partitions=partitions,
    )


def most_tiles(request: AttentionPlanRequest) -> int:
    """Query tiles of a step, however its tokens fall on its sequences."""
    step, attention = request.step, request.attention
    tile_tokens = TILE_ROWS // attention.group_size
    # Each sequence may leave its last tile almost empty; none has fewer than one token.
    sequences = min(step.num_seqs, step.num_tokens)
    blocks = (step.num_tokens + sequences * (tile_tokens - 1)) // tile_tokens
    return max(1, blocks) * attention.num_kv_heads


def prefill_sm90_build(key: KernelKey) -> KernelBuild:
    """The kernel of a key; that of an 8-bit pool reads what was gathered out of it.

    Raises:
        UnsupportedError: the path is another one, or a type or dim is not covered.
    """
    is_split = key.path is KernelPath.PREFILL_SM90_SPLIT
    if not is_split and key.path is not KernelPath.PREFILL_SM90:
        raise UnsupportedError(f"{key.path.value} is no prefill kernel of Hopper")
    is_scaled = key.kv_cache_dtype.is_quantised
    has_type = is_scaled or key.activation_dtype is key.kv_cache_dtype
    has_dims = _has_dims(key.head_dim, key.value_head_dim)
    if not has_dims or not has_type or key.group_size > TILE_ROWS:
        raise UnsupportedError(
            f"{key}: Hopper's prefill kernel takes equal head dims of {HEAD_DIMS}, one type or a "
            f"gathered pool, and groups of up to {TILE_ROWS}"
        )
    arguments = (
        ELEMENT_TYPES[key.activation_dtype],
        *(key.head_dim, key.value_head_dim, key.group_size),
        *(str(flag).lower() for flag in (key.has_window, key.has_softcap, is_split, is_scaled)),
    )
    return KernelBuild(
        source="prefill_sm90.cu",
        name_expression=f"paged_trt::prefill_sm90<{', '.join(map(str, arguments))}>",
        threads=THREADS,
        shared_bytes=shared_bytes(key.head_dim),
    )


def key_tile_tokens(head_dim: int) -> int:
    """Keys of one step of the loop: wide heads leave registers for 64."""
    return 64 if head_dim > 128 else 128


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block."""
    row_bytes = head_dim * 2
    queries = (1 if head_dim > 128 else 2) * TILE_ROWS * row_bytes
    keys_and_values = (2 + 3) * key_tile_tokens(head_dim) * row_bytes
    barriers, work, alignment = 128, 64, 1024
    return queries + keys_and_values + barriers + work + alignment


def set_pool_maps(
    block: PrefillSm90Args,
    key_pool: int,
    value_pool: int,
    *,
    request: AttentionPlanRequest,
    pool: KvPoolSpec,
    encode_map: EncodeMap | None = None,
) -> None:
    """Write the tensor maps of the pools into an argument block.

    Args:
        block: the argument block.
        key_pool: address.
        value_pool: address.
        request: types and dims; the pool's type is that of the activations.
        pool: page geometry.
        encode_map: as `tensor_maps.encode_pool_map`.

    Raises:
        ExecutionError: the driver refused a map.
    """
    encode = encode_map or tensor_maps.encode_pool_map
    attention = request.attention
    for name, address, dim in (
        ("key_map", key_pool, attention.head_dim),
        ("value_map", value_pool, attention.value_head_dim),
    ):
        shape = pool.pool_shape(attention.num_kv_heads, dim)
        code = encode(address, request.kv_cache_dtype, shape, key_tile_tokens(dim))
        setattr(block, name, TensorMap.from_buffer_copy(code))
