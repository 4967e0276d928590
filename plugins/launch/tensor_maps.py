"""Tensor maps: what the bulk tensor copies of Hopper know of a pool."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from paged_trt.plugins import cuda
from paged_trt.plugins.cuda import check
from paged_trt.plugins.dtypes import DType

BOX_COLUMNS: Final = 64
"""Columns of 16-bit elements in a row of a box: 128 bytes, the widest swizzle."""
MAP_BYTES: Final = 128
_TYPES: Final = {
    DType.BFLOAT16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    DType.FLOAT16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
}


@functools.lru_cache(maxsize=4096)
def encode_pool_map(address: int, dtype: DType, shape: tuple[int, ...], box_tokens: int) -> bytes:
    """Map of a pool; a box is whole rows of one (page, key head).

    Its dims are (column within 64, token, group of 64 columns, (page, key head)). What lies
    outside, such as the first page that the pool does not have, arrives as zeros.
    Encoding asks nothing of the device, so a captured step may do it; maps are kept, since the
    pools of an engine stay where they are.

    Args:
        address: of the pool; a multiple of 16.
        dtype: a 16-bit type.
        shape: `[num_pages, num_kv_heads, 128, head_dim]`, head_dim a multiple of 64.
        box_tokens: tokens of a box, up to 128.

    Raises:
        ExecutionError: the driver refused the map.
    """
    return encode(cuda.driver(), address, dtype, shape, box_tokens)


def encode(
    driver: Any, address: int, dtype: DType, shape: tuple[int, ...], box_tokens: int
) -> bytes:
    """`encode_pool_map` with a driver of the caller's."""
    pages, heads, tokens, head_dim = shape
    groups, row_bytes = head_dim // BOX_COLUMNS, head_dim * dtype.itemsize
    dims = (BOX_COLUMNS, tokens, groups, pages * heads)
    strides = (row_bytes, BOX_COLUMNS * dtype.itemsize, tokens * row_bytes)
    box = (BOX_COLUMNS, box_tokens, groups, 1)
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, _TYPES[dtype]),
            len(dims),
            address,
            [driver.cuuint64_t(dim) for dim in dims],
            [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(dim) for dim in box],
            [driver.cuuint32_t(1) for _ in dims],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
