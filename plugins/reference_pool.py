"""Text of the stages of the reference function that touch the pool: where, store and read.

The dimension letters are those of `reference_body`, which joins the stages. A stage that is
used for keys and for values names them `$x`; `$source` is the float32 tensor to store,
`$dim` the head dim and `$pool_type` the ONNX number of the pool's element type.
"""

from __future__ import annotations

from typing import Final

from paged_trt.plugins.dtypes import DType

DESTINATION: Final = """
    # Where the W written tokens go: pool index (page, head, slot) [W, K, 3]. A token is
    # written when it is live, inside the table, and its page id is in [0, Z).
    page_index_unbounded = Div (position, tokens_per_page)
    slot = Mod (position, tokens_per_page)
    last_page_index = Sub (M, ones)
    page_index = Min (page_index_unbounded, last_page_index)
    is_in_table = Equal (page_index, page_index_unbounded)
    row_column = Unsqueeze (row, ones)
    page_index_column = Unsqueeze (page_index, ones)
    table_index = Concat <axis = 1> (row_column, page_index_column)
    table = Cast <to = 7> (page_table)
    page = GatherND (table, table_index)
    is_page_from_zero = GreaterOrEqual (page, zeros)
    is_page_to_end = Less (page, Z)
    is_page_valid = And (is_page_from_zero, is_page_to_end)
    is_placed = And (is_page_valid, is_in_table)
    is_written = And (is_placed, is_live)
    written_row = NonZero (is_written)
    written = Squeeze (written_row, zeros)
    W = Shape (written)
    written_page = Gather (page, written)
    written_slot = Gather (slot, written)
    K_scalar = Squeeze (K)
    head = Range (zero, K_scalar, one)
    index_parts_shape = Concat <axis = 0> (W, K, ones)
    page_of_index = Unsqueeze (written_page, axes_1_2)
    slot_of_index = Unsqueeze (written_slot, axes_1_2)
    head_of_index = Unsqueeze (head, axes_0_2)
    index_pages = Expand (page_of_index, index_parts_shape)
    index_heads = Expand (head_of_index, index_parts_shape)
    index_slots = Expand (slot_of_index, index_parts_shape)
    pool_index = Concat <axis = 2> (index_pages, index_heads, index_slots)
"""

SCALES: Final = """
    # Scales of the K heads, [K, 1] for new tokens and [K, 1, 1] for pages.
    key_scale = Gather <axis = 0> (kv_scales, zero)
    value_scale = Gather <axis = 0> (kv_scales, one)
    key_scale_of_token = Unsqueeze (key_scale, ones)
    value_scale_of_token = Unsqueeze (value_scale, ones)
    key_scale_of_page = Unsqueeze (key_scale, axes_1_2)
    value_scale_of_page = Unsqueeze (value_scale, axes_1_2)
"""

_STORE_CAST: Final = """
    # $x [T, K, dim] float32 in the pool's type: a rounding to nearest even, no scale.
    $x_stored = Cast <to = $pool_type> ($source)
"""

_STORE_FLOAT8: Final = """
    # $x / scale to float8: round to nearest even, saturate at 448, NaN stays NaN. No
    # standard op scatters float8; float32 holds each of its values, NaN signs included.
    $x_scaled = Div ($source, $x_scale_of_token)
    $x_float8 = Cast <to = $pool_type, saturate = 1> ($x_scaled)
    $x_stored = Cast <to = 1> ($x_float8)
"""

_STORE_INT8: Final = """
    # $x / scale to int8: round half to even, clamp to [-127, 127], NaN becomes 0.
    $x_scaled = Div ($source, $x_scale_of_token)
    $x_is_nan = IsNaN ($x_scaled)
    $x_number = Where ($x_is_nan, zero_f, $x_scaled)
    $x_integer = Round ($x_number)
    $x_int8_low = Constant <value: tensor = float {-127}> ()
    $x_int8_high = Constant <value: tensor = float {127}> ()
    $x_clamped = Clip ($x_integer, $x_int8_low, $x_int8_high)
    $x_stored = Cast <to = $pool_type> ($x_clamped)
"""

# The pool must have no other reader than this ScatterND: an executor may then bind the input
# and the output to one address, and onnxruntime updates the pool in place.
_SCATTER: Final = """
    # Write the W rows into the pool [Z, K, P, dim].
    $x_written = Gather <axis = 0> ($x_stored, written)
    $x_pool_out = ScatterND ($x_pool, pool_index, $x_written)
"""

_SCATTER_FLOAT8: Final = """
    # Write the W rows into the pool [Z, K, P, dim] by way of float32.
    $x_written = Gather <axis = 0> ($x_stored, written)
    $x_pool_wide = Cast <to = 1> ($x_pool)
    $x_pool_updated = ScatterND ($x_pool_wide, pool_index, $x_written)
    $x_pool_out = Cast <to = $pool_type> ($x_pool_updated)
"""

_READ: Final = """
    # Pages of the table as $x_read [N, K, L, dim] float32.
    $x_pages_narrow = Gather <axis = 0> ($x_pool_readable, readable_table)
    $x_pages_ordered = Transpose <perm = [0, 2, 1, 3, 4]> ($x_pages_narrow)
    $x_read_shape = Concat <axis = 0> (N, K, L, $dim)
    $x_read_narrow = Reshape ($x_pages_ordered, $x_read_shape)
    $x_read_unscaled = Cast <to = 1> ($x_read_narrow)
"""

_READ_PLAIN: Final = """
    $x_read = Identity ($x_read_unscaled)
"""

_READ_SCALED: Final = """
    $x_read = Mul ($x_read_unscaled, $x_scale_of_page)
"""


def store_text(kv_cache_dtype: DType) -> str:
    """Round new tokens to the pool's type and scatter them: `$x_pool_out`."""
    if kv_cache_dtype is DType.FLOAT8:
        return _STORE_FLOAT8 + _SCATTER_FLOAT8
    return (_STORE_INT8 if kv_cache_dtype is DType.INT8 else _STORE_CAST) + _SCATTER


def read_text(kv_cache_dtype: DType) -> str:
    """Pages of the table as float32: `$x_read`."""
    # Gather refuses float8 as well: read what was scattered, before the cast back.
    source = "$x_pool_updated" if kv_cache_dtype is DType.FLOAT8 else "$x_pool_out"
    text = _READ + (_READ_SCALED if kv_cache_dtype.is_quantised else _READ_PLAIN)
    return text.replace("$x_pool_readable", source)
