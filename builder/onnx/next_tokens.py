"""Greedy choice of the next token, inside the engine.

ONNX ties an ArgMax to the lowest id; TensorRT makes it a TopK, and documents no order of equal
values. So the choice is spelt out: the lowest id among those whose logit equals the largest one.
A row without a largest value gets NO_NEXT_TOKEN or `vocab_size`, which no vocabulary holds.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.graph import Emitter
from paged_trt.plugins.tensors import NEXT_TOKENS, NO_NEXT_TOKEN


def emit_next_tokens(
    graph: ir.Graph, logits: ir.Value, *, vocab_size: int, dtype: ir.DataType
) -> ir.Value:
    """Add the nodes that choose the next token of each row.

    Args:
        graph: the graph to change.
        logits: `[num_seqs, vocab_size]`.
        vocab_size: number of token ids.
        dtype: type of the logits.

    Returns:
        `[num_seqs]` int64: the lowest id of the largest logit; NO_NEXT_TOKEN where a logit is
        NaN, `vocab_size` where all are minus infinity.
    """
    emit = Emitter(graph, "/paged_trt/next_tokens")
    axis = emit.integers([-1])
    ids = emit.constant(np.arange(vocab_size, dtype=np.int32)[None], "ids")
    none = emit.constant(np.array([[vocab_size]], np.int32), "none")
    lowest = emit.constant(np.array([[-np.inf]], dtype.numpy()), "minus_infinity")
    not_a_number = emit.constant(np.array([[NO_NEXT_TOKEN]], np.int32), "not_a_number")
    largest = emit.op("ReduceMax", [logits, axis], "largest", {"keepdims": 1}, dtype=dtype)
    is_largest = emit.op("Equal", [logits, largest], "is_largest", dtype=ir.DataType.BOOL)
    is_finite = emit.op("Greater", [largest, lowest], "has_largest", dtype=ir.DataType.BOOL)
    is_choice = emit.op("And", [is_largest, is_finite], "is_choice", dtype=ir.DataType.BOOL)
    choices = emit.op("Where", [is_choice, ids, none], "choices", dtype=ir.DataType.INT32)
    is_nan = emit.op("IsNaN", [logits], "is_nan", dtype=ir.DataType.BOOL)
    marked = emit.op("Where", [is_nan, not_a_number, choices], "marked", dtype=ir.DataType.INT32)
    first = emit.op("ReduceMin", [marked, axis], "first", {"keepdims": 0}, dtype=ir.DataType.INT32)
    return emit.op("Cast", [first], NEXT_TOKENS, {"to": ir.DataType.INT64}, dtype=ir.DataType.INT64)
