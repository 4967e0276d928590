"""Text of the reference function, in the ONNX textual syntax, stage by stage.

The stages run in the order of the contract. Dimension letters:

    T token rows of the step         N sequence rows            M page-table width
    P tokens per page                L = M * P positions        Z pages of the pool
    H query heads                    K key/value heads          G = H / K query heads per KV head
    D key head dim                   V value head dim           R rotated lanes (0: no rope)
    Q most tokens of one sequence in this step (at least 1)
    W tokens that are written

Two choices keep the function cheap on a CPU and free of leaks between sequences:

- Packed tokens are laid out on a grid `[N, Q]`, so that a sequence meets its own pages
  only: scores are `[N, H, Q, L]` and never `[H, T, N * L]`, and a NaN of one sequence
  cannot reach another.
- The pool stays in its own type and layout. Only the W new rows are scattered into it and
  only the pages that the table names are read from it.
"""

from __future__ import annotations

from typing import Final

from paged_trt.plugins import kv, reference_pool
from paged_trt.plugins.dtypes import DType

INPUT_NAMES: Final = (
    "query",
    "key",
    "value",
    "key_pool",
    "value_pool",
    "page_table",
    "query_start_offsets",
    "past_lens",
    "rope_cos_sin",
    "kv_scales",
    "sinks",
)
OUTPUT_NAMES: Final = ("output", "key_pool_out", "value_pool_out")

# Attributes without a default have no neutral value. The body takes sizes from shapes, which
# cannot disagree with the tensors; the plugin reads the attributes.
_SIGNATURE: Final = f"""
<domain: "paged_trt", opset_import: ["" : 23]>
PagedAttention <
    num_q_heads, num_kv_heads, head_dim, value_head_dim,
    num_pages, max_pages_per_seq, max_batch_size, softmax_scale,
    window: int = -1, rope: int = 0, rotary_dim: int = 0, softcap: float = 0.0,
    plugin_version: string = "1", plugin_namespace: string = "paged_trt"
> ({", ".join(INPUT_NAMES)}) => ({", ".join(OUTPUT_NAMES)})
"""

_CONSTANTS: Final = f"""
    # `zero` is a scalar, `zeros` a vector of one element; a vector may serve as axis 0, 1, 2.
    zero = Constant <value: tensor = int64 {{0}}> ()
    one = Constant <value: tensor = int64 {{1}}> ()
    zeros = Constant <value: tensor = int64[1] {{0}}> ()
    ones = Constant <value: tensor = int64[1] {{1}}> ()
    twos = Constant <value: tensor = int64[1] {{2}}> ()
    lasts = Constant <value: tensor = int64[1] {{-1}}> ()
    zero_f = Constant <value: tensor = float {{0}}> ()
    one_f = Constant <value: tensor = float {{1}}> ()
    minus_infinity = Constant <value_float: float = -inf> ()
    axes_1_2 = Constant <value: tensor = int64[2] {{1, 2}}> ()
    axes_0_2 = Constant <value: tensor = int64[2] {{0, 2}}> ()
    axes_1_3 = Constant <value: tensor = int64[2] {{1, 3}}> ()
    tokens_per_page = Constant <value: tensor = int64[1] {{{kv.TOKENS_PER_PAGE}}}> ()

    T = Shape <start = 0, end = 1> (query)
    H = Shape <start = 1, end = 2> (query)
    D = Shape <start = 2, end = 3> (query)
    K = Shape <start = 1, end = 2> (key)
    V = Shape <start = 2, end = 3> (value)
    Z = Shape <start = 0, end = 1> (key_pool)
    N = Shape <start = 0, end = 1> (page_table)
    M = Shape <start = 1, end = 2> (page_table)
    G = Div (H, K)
    L = Mul (M, tokens_per_page)
"""

_TOKENS: Final = """
    # Sequence row and position of each token, [T] each. A token belongs to the row that
    # counts the ends at or before it; padding tokens count N and are not live.
    offsets = Cast <to = 7> (query_start_offsets)
    past = Cast <to = 7> (past_lens)
    starts = Slice (offsets, zeros, lasts)
    offsets_size = Shape (offsets)
    ends = Slice (offsets, ones, offsets_size)
    counts = Sub (ends, starts)
    T_scalar = Squeeze (T)
    token = Range (zero, T_scalar, one)
    token_column = Unsqueeze (token, ones)
    is_past_end = GreaterOrEqual (token_column, ends)
    is_past_end_int = Cast <to = 7> (is_past_end)
    row_unbounded = ReduceSum <keepdims = 0> (is_past_end_int, ones)
    is_live = Less (row_unbounded, N)
    last_row = Sub (N, ones)
    row = Min (row_unbounded, last_row)
    row_start = Gather (starts, row)
    row_past = Gather (past, row)
    index_in_row = Sub (token, row_start)
    position = Add (index_in_row, row_past)
"""

_ROTATION: Final = """
    # Per rotated lane [R]: is it the second of its pair, where is the other one, and which
    # column of the table turns the pair. Half-split pairs (i, i + R/2), interleaved pairs
    # (2i, 2i + 1). With rope = 0 no lane is rotated: R = 0 and every tensor here is empty.
    rope_mode = Constant <value_int: int = @rope> ()
    is_rotated = Greater (rope_mode, zero)
    is_interleaved = Greater (rope_mode, one)
    half = Shape <start = 2, end = 3> (rope_cos_sin)
    whole = Mul (half, twos)
    R = Where (is_rotated, whole, zeros)
    R_scalar = Squeeze (R)
    lane = Range (zero, R_scalar, one)
    lane_of_half = Div (lane, half)
    lane_in_half = Mod (lane, half)
    lane_of_two = Div (lane, twos)
    lane_in_two = Mod (lane, twos)
    second_in_pair = Where (is_interleaved, lane_in_two, lane_of_half)
    is_second = Greater (second_in_pair, zeros)
    table_column = Where (is_interleaved, lane_of_two, lane_in_half)
    distance = Where (is_interleaved, ones, half)
    lane_after = Add (lane, distance)
    lane_before = Sub (lane, distance)
    partner = Where (is_second, lane_before, lane_after)

    # Factors [T, 1, R]. Padding tokens may lie past the table: any row will do for them.
    max_positions = Shape <start = 0, end = 1> (rope_cos_sin)
    last_position = Sub (max_positions, ones)
    table_row = Min (position, last_position)
    cos_sin = Gather <axis = 0> (rope_cos_sin, table_row)
    cosine_of_pair = Gather <axis = 1> (cos_sin, zero)
    sine_of_pair = Gather <axis = 1> (cos_sin, one)
    cosine_of_lane = Gather <axis = 1> (cosine_of_pair, table_column)
    sine_unsigned = Gather <axis = 1> (sine_of_pair, table_column)
    sine_negative = Neg (sine_unsigned)
    sine_of_lane = Where (is_second, sine_unsigned, sine_negative)
    cosine = Unsqueeze (cosine_of_lane, ones)
    sine = Unsqueeze (sine_of_lane, ones)
"""

_ROTATE: Final = """
    # $x [T, heads, D] to $x_rotated, float32, one rounding per operation.
    $x_float = Cast <to = 1> ($x)
    $x_lanes = Slice ($x_float, zeros, R, twos)
    $x_rest = Slice ($x_float, R, D, twos)
    $x_partners = Gather <axis = 2> ($x_lanes, partner)
    $x_cosine = Mul ($x_lanes, cosine)
    $x_sine = Mul ($x_partners, sine)
    $x_turned = Add ($x_cosine, $x_sine)
    $x_rotated = Concat <axis = 2> ($x_turned, $x_rest)
"""

_ROTATE_QUERY: Final = _ROTATE.replace("$x", "query")
_ROTATE_KEY: Final = _ROTATE.replace("$x", "key")
_CAST_VALUE: Final = """
    value_float = Cast <to = 1> (value)
"""

_COLUMNS: Final = """
    # A pool column is a position of a row, [N, L]. Invalid page ids read page 0 and mask it.
    is_id_from_zero = GreaterOrEqual (table, zeros)
    is_id_to_end = Less (table, Z)
    is_id_valid = And (is_id_from_zero, is_id_to_end)
    readable_table = Where (is_id_valid, table, zeros)
    is_id_valid_column = Unsqueeze (is_id_valid, twos)
    page_positions_shape = Concat <axis = 0> (N, M, tokens_per_page)
    is_id_valid_wide = Expand (is_id_valid_column, page_positions_shape)
    columns_shape = Concat <axis = 0> (N, L)
    is_column_valid = Reshape (is_id_valid_wide, columns_shape)
    L_scalar = Squeeze (L)
    column = Range (zero, L_scalar, one)

    # Grid of the step, [N, Q]: cell (n, i) is token starts[n] + i at position past[n] + i.
    # Cells past a row's count repeat some token and no output row reads them.
    Q_or_zero = ReduceMax <keepdims = 0> (counts)
    Q_scalar = Max (Q_or_zero, one)
    Q = Unsqueeze (Q_scalar, zeros)
    cell = Range (zero, Q_scalar, one)
    starts_column = Unsqueeze (starts, ones)
    past_column = Unsqueeze (past, ones)
    cell_token_unbounded = Add (starts_column, cell)
    last_token = Sub (T, ones)
    cell_token = Min (cell_token_unbounded, last_token)
    cell_position = Add (past_column, cell)

    # Position p sees max(0, p - window + 1) .. p: is_visible [N, Q, L].
    window_size = Constant <value_int: int = @window> ()
    has_window = GreaterOrEqual (window_size, zero)
    window_reach = Sub (window_size, one)
    cell_first_windowed = Sub (cell_position, window_reach)
    cell_first = Where (has_window, cell_first_windowed, zero)
    cell_position_column = Unsqueeze (cell_position, twos)
    cell_first_column = Unsqueeze (cell_first, twos)
    is_causal = LessOrEqual (column, cell_position_column)
    is_in_window = GreaterOrEqual (column, cell_first_column)
    is_in_reach = And (is_causal, is_in_window)
    is_column_valid_of_cell = Unsqueeze (is_column_valid, ones)
    is_visible = And (is_in_reach, is_column_valid_of_cell)

    # Columns that no query of the step can see, [N, L]: their value rows count as zero.
    first_cell = Slice (cell_first, zeros, ones, ones)
    row_length = Add (past, counts)
    row_end = Unsqueeze (row_length, ones)
    is_column_stored = Less (column, row_end)
    is_column_reached = GreaterOrEqual (column, first_cell)
    is_column_needed = And (is_column_stored, is_column_reached)
    is_column_read = And (is_column_needed, is_column_valid)
    is_value_read = Unsqueeze (is_column_read, axes_1_3)
"""

_SCORES: Final = """
    # Scores [N, K, G, Q, L]: softcap * tanh(q.k * scale / softcap), then the mask.
    query_cells = Gather <axis = 0> (query_rotated, cell_token)
    query_grid_shape = Concat <axis = 0> (N, Q, K, G, D)
    query_grid = Reshape (query_cells, query_grid_shape)
    query_by_head = Transpose <perm = [0, 2, 3, 1, 4]> (query_grid)
    GQ = Mul (G, Q)
    query_rows_shape = Concat <axis = 0> (N, K, GQ, D)
    query_rows = Reshape (query_by_head, query_rows_shape)
    key_columns = Transpose <perm = [0, 1, 3, 2]> (key_read)
    products = MatMul (query_rows, key_columns)
    scale = Constant <value_float: float = @softmax_scale> ()
    scores_scaled = Mul (products, scale)
    softcap_limit = Constant <value_float: float = @softcap> ()
    has_softcap = Greater (softcap_limit, zero_f)
    scores_capped = If (has_softcap) <
        then_branch = capped () => (scores_with_softcap) {
            scores_in_cap = Div (scores_scaled, softcap_limit)
            scores_tanh = Tanh (scores_in_cap)
            scores_with_softcap = Mul (scores_tanh, softcap_limit)
        },
        else_branch = uncapped () => (scores_without_softcap) {
            scores_without_softcap = Identity (scores_scaled)
        }
    >
    scores_shape = Concat <axis = 0> (N, K, G, Q, L)
    scores_unmasked = Reshape (scores_capped, scores_shape)
    is_visible_of_head = Unsqueeze (is_visible, axes_1_2)
    scores = Where (is_visible_of_head, scores_unmasked, minus_infinity)
"""

_SOFTMAX: Final = """
    # Softmax in float32 with the sink as one more logit of value zero. Where every logit
    # is -inf, the shift is 0 and the divisor 1: the row is 0 and not NaN.
    sinks_shape = Concat <axis = 0> (K, G, ones, ones)
    sink = Reshape (sinks, sinks_shape)
    scores_peak = ReduceMax <keepdims = 1> (scores, lasts)
    peak = Max (scores_peak, sink)
    is_peak_missing = Equal (peak, minus_infinity)
    shift = Where (is_peak_missing, zero_f, peak)
    scores_shifted = Sub (scores, shift)
    weights = Exp (scores_shifted)
    sink_shifted = Sub (sink, shift)
    sink_weight = Exp (sink_shifted)
    weights_sum = ReduceSum <keepdims = 1> (weights, lasts)
    total = Add (weights_sum, sink_weight)
    is_total_zero = Equal (total, zero_f)
    divisor = Where (is_total_zero, one_f, total)

    # Weighted values [N, K, G, Q, V]; dividing here touches fewer elements than [.., L].
    weight_rows_shape = Concat <axis = 0> (N, K, GQ, L)
    weight_rows = Reshape (weights, weight_rows_shape)
    value_rows = Where (is_value_read, value_read, zero_f)
    sums_rows = MatMul (weight_rows, value_rows)
    sums_shape = Concat <axis = 0> (N, K, G, Q, V)
    sums = Reshape (sums_rows, sums_shape)
    attended = Div (sums, divisor)
"""

_OUTPUT: Final = """
    # Back from the grid to packed tokens [T, H, V]; padding tokens are exactly 0.
    attended_by_cell = Transpose <perm = [0, 3, 1, 2, 4]> (attended)
    output_grid_shape = Concat <axis = 0> (N, Q, H, V)
    output_grid = Reshape (attended_by_cell, output_grid_shape)
    last_cell = Sub (Q, ones)
    cell_of_token = Min (index_in_row, last_cell)
    cell_of_token_column = Unsqueeze (cell_of_token, ones)
    grid_index = Concat <axis = 1> (row_column, cell_of_token_column)
    output_gathered = GatherND (output_grid, grid_index)
    is_live_of_token = Unsqueeze (is_live, axes_1_2)
    output_float = Where (is_live_of_token, output_gathered, zero_f)
    output = CastLike (output_float, query)
"""


def function_text(kv_cache_dtype: DType) -> str:
    """Text of the function for one pool type, ready for `onnx.parser.parse_function`.

    Args:
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
    """
    store = reference_pool.store_text(kv_cache_dtype)
    read = reference_pool.read_text(kv_cache_dtype)
    stages = [
        *(_CONSTANTS, _TOKENS, _ROTATION, _ROTATE_QUERY, _ROTATE_KEY, _CAST_VALUE),
        reference_pool.DESTINATION,
        reference_pool.SCALES if kv_cache_dtype.is_quantised else "",
        *(_of_key(store), _of_value(store), _COLUMNS, _of_key(read), _of_value(read)),
        *(_SCORES, _SOFTMAX, _OUTPUT),
    ]
    body = "".join(stages).replace("$pool_type", str(kv_cache_dtype.onnx))
    return f"{_SIGNATURE}{{{body}}}\n"


def _of_key(stage: str) -> str:
    return stage.replace("$x", "key").replace("$source", "key_rotated").replace("$dim", "D")


def _of_value(stage: str) -> str:
    return stage.replace("$x", "value").replace("$source", "value_float").replace("$dim", "V")
