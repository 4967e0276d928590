"""Small mistakes in the function body must not pass the comparison with NumPy."""

from __future__ import annotations

import numpy_attention
import onnx.parser
import pytest
from golden.reference_cases import RAGGED, Case, compare, make_inputs, make_model, run_model

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.reference_body import function_text

# name: (case, text of the body, what a mistake would have written)
MUTATIONS = {
    "window one too wide": (
        Case(**RAGGED, window=7),
        "window_reach = Sub (window_size, one)",
        "window_reach = Identity (window_size)",
    ),
    "window sees the poison before it": (
        Case(**RAGGED, window=7),
        "is_in_reach = And (is_causal, is_in_window)",
        "is_in_reach = Identity (is_causal)",
    ),
    "not causal": (
        Case(**RAGGED),
        "is_causal = LessOrEqual (",
        "is_causal = GreaterOrEqual (",
    ),
    "self is masked": (Case(**RAGGED), "is_causal = LessOrEqual (", "is_causal = Less ("),
    "sink is scaled": (
        Case(**RAGGED, has_sinks=True),
        "sink = Reshape (sinks, sinks_shape)",
        "sink_scaled = Mul (sinks, scale)\n sink = Reshape (sink_scaled, sinks_shape)",
    ),
    "sink is forgotten": (
        Case(**RAGGED, has_sinks=True),
        "total = Add (weights_sum, sink_weight)",
        "total = Identity (weights_sum)",
    ),
    "softcap before the scale": (
        Case(**RAGGED, softcap=0.7),
        "scores_in_cap = Div (scores_scaled, softcap_limit)",
        "scores_in_cap = Div (products, softcap_limit)",
    ),
    "int8 reaches -128": (
        Case(lengths=[40], pasts=[0], kv=DType.INT8, seed=3),
        "key_int8_low = Constant <value: tensor = float {-127}>",
        "key_int8_low = Constant <value: tensor = float {-128}>",
    ),
    "int8 truncates": (
        Case(**RAGGED, kv=DType.INT8),
        "value_integer = Round (value_number)",
        "value_integer = Identity (value_number)",
    ),
    "float8 does not saturate": (
        Case(lengths=[200], pasts=[0], kv=DType.FLOAT8, seed=3),
        "saturate = 1> (value_scaled)",
        "saturate = 0> (value_scaled)",
    ),
    "scale of the key for the value": (
        Case(**RAGGED, kv=DType.FLOAT8),
        "value_scale = Gather <axis = 0> (kv_scales, one)",
        "value_scale = Gather <axis = 0> (kv_scales, zero)",
    ),
    "rotation of the wrong sign": (
        Case(**RAGGED, rope=1),
        "sine_of_lane = Where (is_second, sine_unsigned, sine_negative)",
        "sine_of_lane = Where (is_second, sine_negative, sine_unsigned)",
    ),
    "rotation ignores the past": (
        Case(**RAGGED, rope=2),
        "table_row = Min (position, last_position)",
        "table_row = Min (index_in_row, last_position)",
    ),
    "poison reaches the value product": (
        Case(**RAGGED),
        "value_rows = Where (is_value_read, value_read, zero_f)",
        "value_rows = Identity (value_read)",
    ),
    "padding tokens are kept": (
        Case(**RAGGED, padding_tokens=2),
        "output_float = Where (is_live_of_token, output_gathered, zero_f)",
        "output_float = Identity (output_gathered)",
    ),
    "padding tokens are written": (
        Case(**RAGGED, padding_tokens=2),
        "is_written = And (is_placed, is_live)",
        "is_written = Identity (is_placed)",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str) -> None:
    case, text, mistake = MUTATIONS[name]
    body = function_text(case.kv)
    assert body.count(text) == 1
    inputs = make_inputs(case)
    if case.kv.is_quantised:
        inputs["kv_scales"][:] = inputs["kv_scales"] * [[1.0], [2.0]]
        # Large enough to meet both ends of the range.
        inputs["key"] *= 4
        inputs["value"][::2] *= 2000
    expected = numpy_attention.paged_attention(inputs, case.settings)
    function = onnx.parser.parse_function(body)
    compare(case, run_model(make_model(case, function), inputs), expected)
    mutated = onnx.parser.parse_function(body.replace(text, mistake))
    actual = run_model(make_model(case, mutated), inputs)
    with pytest.raises(AssertionError):
        compare(case, actual, expected)
