"""The executable specification of PagedAttention: an ONNX function of standard ops.

`paged_attention_function` returns the function for one pool type. It travels in a model as
a model-local function: onnxruntime runs it on a CPU, TensorRT replaces it by the plugin,
and every numeric test compares with it. Inputs, outputs and semantics are those of the
contract; the body is written out in `reference_body`. TensorRT-RTX 1.7.1 cannot import the
body (it lacks NonZero): where the plugin is not found, the parse fails and nothing is inlined.
An executor may bind a pool input and its output to one address: the update is in place.

What the contract leaves open, this function decides:

- Rotation and the division by the scale are float32, one rounding per operation, and the
  stored number is rounded once more to the pool's type. Scales must be positive and finite;
  a float16 or bfloat16 pool ignores them.
- A NaN stays NaN in float16, bfloat16 and float8 (the sign of the byte is not specified)
  and is stored as 0 in int8. An infinity saturates in float8 and int8 as a number would.
- A value row that no query of its sequence can see in this step counts as zero, whatever
  it holds. A non-finite value row that one query sees may reach the other queries of the
  same sequence in the same step; it never reaches another sequence.
- Activations may also be float32: an executor that cannot run a bfloat16 model runs its
  float32 upcast through the same function. The output has the type of `query`.
- A step has at least one token row and one sequence row; `page_table` has at least one column.
"""

from __future__ import annotations

import functools
from typing import Final

import onnx
import onnx.parser

from paged_trt.plugins import reference_body
from paged_trt.plugins.dtypes import KV_CACHE_DTYPES, DType
from paged_trt.plugins.errors import UnsupportedError

OPSET: Final = 1
"""Opset version of the function's domain."""
INPUT_NAMES: Final = reference_body.INPUT_NAMES
"""Names of the function's inputs, in the order of the contract."""
OUTPUT_NAMES: Final = reference_body.OUTPUT_NAMES
"""Names of the function's outputs, in the order of the contract."""


def paged_attention_function(kv_cache_dtype: DType) -> onnx.FunctionProto:
    """The function for pools of one type; its `overload` is the value of that type.

    A node that calls it carries the same `overload`, so that one model may hold the
    functions of several pool types.

    Args:
        kv_cache_dtype: element type of both pools.

    Returns:
        A copy that the caller may change.

    Raises:
        UnsupportedError: no pool has this element type.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        names = ", ".join(sorted(dtype.value for dtype in KV_CACHE_DTYPES))
        raise UnsupportedError(
            f"a KV pool cannot hold {kv_cache_dtype.value}; choose one of {names}"
        )
    function = onnx.FunctionProto()
    function.CopyFrom(_parsed_function(kv_cache_dtype))
    return function


@functools.cache
def _parsed_function(kv_cache_dtype: DType) -> onnx.FunctionProto:
    function = onnx.parser.parse_function(reference_body.function_text(kv_cache_dtype))
    function.overload = kv_cache_dtype.value
    return function
