"""Prefill kernels: what to compile, how to launch it.

The tile is a template argument, so it is chosen here and nowhere else. The grid follows from T,
N and the head counts alone: it has room for every way in which T tokens may fall on N
sequences, and a block finds its sequence on the device. A launch needs no other CUDA call,
except that a kernel with more than 48 KB of dynamic shared memory is allowed it once, at load.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_decode import (
    ELEMENT_TYPES,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    Grid,
    KernelBuild,
)
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.operands import StepShape

KIB: Final = 1024
MULTIPROCESSOR_SHARED_BYTES: Final = {
    80: 164 * KIB,
    87: 164 * KIB,
    90: 228 * KIB,
    100: 228 * KIB,
    103: 228 * KIB,
    110: 228 * KIB,
}
"""Shared memory of a multiprocessor by architecture; every other one has the smallest."""
SMALLEST_SHARED_BYTES: Final = 100 * KIB
"""sm_86, sm_89 and sm_120, and what an unknown architecture has at least."""
RESERVED_SHARED_BYTES: Final = KIB
"""What CUDA takes of it for each block."""
STATIC_SHARED_BYTES: Final = 128
"""Static shared memory of a block, rounded up to the alignment of the dynamic part."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """Shape of the work of a block.

    Attributes:
        rows: query rows, one per token and query head of a group.
        tokens: keys of one step of the loop.
        warps: each takes `rows / warps` rows, 16 or 32.
        stages: key tiles in shared memory, and as many value tiles.
    """

    rows: int
    tokens: int
    warps: int
    stages: int

    def shared_bytes(self, key: KernelKey) -> int:
        """Dynamic shared memory of a block."""
        itemsize = key.kv_cache_dtype.itemsize
        query = self.rows * _padded_row_bytes(key.head_dim * 2)
        keys = self.tokens * _padded_row_bytes(key.head_dim * itemsize)
        values = self.tokens * _padded_row_bytes(key.value_head_dim * itemsize)
        # bf16 queries beside 8-bit keys are scaled row by row into the range of float16.
        scales_rows = key.activation_dtype is DType.BFLOAT16 and key.kv_cache_dtype.is_quantised
        factors = self.rows * 4 if scales_rows else 0
        return query + self.stages * (keys + values) + factors


def prefill_tile(key: KernelKey) -> PrefillTile:
    """Tile of the kernel of a key.

    Every warp reads all keys and values of a tile from shared memory, so 32 rows a warp halve
    that traffic, which else costs as much as the products. Their accumulators fit the 255
    registers up to 128 value columns: 128 floats of output and, at 64 keys, 64 of scores. Two
    such blocks of four warps share a multiprocessor, one computing while the other waits at a
    barrier; where their 128 rows do not fit twice, 64 rows of 16 a warp do. Wider value heads
    take 16 rows a warp and one block of eight warps, which reads each key once for 128 rows.

    More stages start the copy of a tile 128 keys ahead instead of 64. They are taken where they
    do not cost the second block.
    """
    narrow = key.value_head_dim <= 128
    blocks = 2 if narrow else 1
    for rows, warps in ((128, 4 if narrow else 8), (64, 4)):
        tokens = 32 if rows == warps * 32 and _is_short_of_registers(key) else 64
        for tokens_ahead in (128, 64):
            stages = tokens_ahead // tokens
            tile = PrefillTile(rows=rows, tokens=tokens, warps=warps, stages=stages)
            if _fits(tile, key, blocks):
                return tile
    # Only on the smallest multiprocessors, with key heads beyond 128: one block has to do.
    return PrefillTile(rows=64, tokens=64, warps=4, stages=1)


def _is_short_of_registers(key: KernelKey) -> bool:
    """Whether scores of 64 keys, at 32 rows a warp, would spill: measured with ptxas 13."""
    if key.value_head_dim <= 96:
        return False
    if key.kv_cache_dtype is DType.FLOAT8:
        return key.head_dim > 128 or _architecture(key) != 90
    is_converted = key.kv_cache_dtype not in {key.activation_dtype, DType.INT8}
    return key.head_dim > 128 or is_converted


def _architecture(key: KernelKey) -> int:
    number = re.match(r"sm_(\d+)", key.arch or "")
    return int(number[1]) if number else 0


def _fits(tile: PrefillTile, key: KernelKey, blocks: int) -> bool:
    available = MULTIPROCESSOR_SHARED_BYTES.get(_architecture(key), SMALLEST_SHARED_BYTES)
    block = tile.shared_bytes(key) + STATIC_SHARED_BYTES + RESERVED_SHARED_BYTES
    return blocks * block <= available


def _padded_row_bytes(row_bytes: int) -> int:
    """Bytes of a row in shared memory: `SharedTile` of `kernels/shared_tile.cuh`."""
    chunks = row_bytes // 16
    return row_bytes if chunks % 8 == 0 else (chunks | 1) * 16


def prefill_build(key: KernelKey, tile: PrefillTile | None = None) -> KernelBuild:
    """The prefill kernel of a key.

    Args:
        key: types, head dims and group.
        tile: another tile than `prefill_tile(key)`, for measurements.

    Raises:
        UnsupportedError: a type or a head dim is not covered, or the path is another.
    """
    _check(key)
    tile = tile or prefill_tile(key)
    arguments = (
        ELEMENT_TYPES[key.activation_dtype],
        ELEMENT_TYPES[key.kv_cache_dtype],
        *(key.head_dim, key.value_head_dim, key.group_size),
        *(tile.rows, tile.tokens, tile.warps, tile.stages),
    )
    return KernelBuild(
        source="prefill.cu",
        name_expression=f"paged_trt::prefill<{', '.join(map(str, arguments))}>",
        threads=tile.warps * 32,
        shared_bytes=tile.shared_bytes(key),
    )


def _check(key: KernelKey) -> None:
    if key.path is not KernelPath.PREFILL:
        raise UnsupportedError(f"{key.path.value} is no prefill kernel")
    if key.activation_dtype not in ACTIVATION_DTYPES or key.kv_cache_dtype not in ELEMENT_TYPES:
        raise UnsupportedError(
            f"no kernel reads {key.activation_dtype.value} with a {key.kv_cache_dtype.value} pool; "
            "activations are float16 or bfloat16"
        )
    for name, dim in (("head_dim", key.head_dim), ("value_head_dim", key.value_head_dim)):
        if dim % HEAD_DIM_STEP or not 0 < dim <= MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{name}={dim} has no prefill kernel; it must be a multiple of {HEAD_DIM_STEP} "
                f"up to {MAX_HEAD_DIM}"
            )


def prefill_grid(
    key: KernelKey, step: StepShape, *, num_kv_heads: int, tile: PrefillTile | None = None
) -> Grid:
    """Grid of one launch: key heads x tiles, in one dimension.

    Each sequence may leave its last tile almost empty, and so may the padding after the last
    one; blocks without a tile end at once.

    Args:
        key: the kernel's key.
        step: T, N and M.
        num_kv_heads: key heads of the layer.
        tile: as given to `prefill_build`.
    """
    tile = tile or prefill_tile(key)
    rows = step.num_tokens * key.group_size
    tiles = (rows + (step.num_seqs + 1) * (tile.rows - 1)) // tile.rows
    return (tiles * num_kv_heads, 1, 1)
