"""Keeps the logits of last tokens only.

The LM head is the largest matmul of a step. Its rows are gathered before it, wherever the
logits are a chain of element-wise nodes behind one product with a weight, and otherwise behind
the whole model: the result is the same, only the work is not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.graph import Emitter, constant_array, operand
from paged_trt.plugins.tensors import LOGITS

_UNARY: Final = frozenset({"Cast", "Identity", "Tanh", "Neg", "Sigmoid"})
_BINARY: Final = frozenset({"Mul", "Div", "Add", "Sub"})
_PRODUCTS: Final = frozenset({"MatMul", "MatMulNBits"})


def gather_last_tokens(graph: ir.Graph, logits: ir.Value, offsets: ir.Value) -> ir.Value:
    """Reduce `logits` to the last token of each sequence row.

    Args:
        graph: the graph to change.
        logits: `[1, num_tokens, vocab]`.
        offsets: `query_start_offsets`, `[num_seqs + 1]` int32.

    Returns:
        `[num_seqs, vocab]`; a padding row repeats the logits of some other token.
    """
    emit = Emitter(graph, "/paged_trt/last_tokens")
    rows = _last_rows(emit, offsets)
    head = _head_product(logits)
    if head is None:
        gathered = _gather(emit, logits, rows)
        return emit.op("Squeeze", [gathered, emit.integers([0])], LOGITS, dtype=logits.dtype)
    hidden = head.inputs[0]
    if hidden is None:
        raise AssertionError(f"{head.name} has no input")
    head.replace_input_with(0, _gather(emit, hidden, rows))
    return emit.op("Squeeze", [logits, emit.integers([0])], LOGITS, dtype=logits.dtype)


def _last_rows(emit: Emitter, offsets: ir.Value) -> ir.Value:
    """`max(offsets[1:] - 1, 0)`, `[num_seqs]` int64."""
    ends = emit.op(
        "Slice",
        [
            offsets,
            emit.integers([1]),
            emit.integers([np.iinfo(np.int64).max]),
            emit.integers([0]),
        ],
        "ends",
        dtype=ir.DataType.INT32,
    )
    wide = emit.op("Cast", [ends], "ends_int64", {"to": ir.DataType.INT64}, dtype=ir.DataType.INT64)
    last = emit.op("Sub", [wide, emit.integers([1])], "last", dtype=ir.DataType.INT64)
    return emit.op("Max", [last, emit.integers([0])], "rows", dtype=ir.DataType.INT64)


def _gather(emit: Emitter, value: ir.Value, rows: ir.Value) -> ir.Value:
    return emit.op("Gather", [value, rows], "Gather", {"axis": 1}, dtype=value.dtype)


def _head_product(logits: ir.Value) -> ir.Node | None:
    """The product with the head's weight, where only element-wise nodes lie behind it."""
    value = logits
    while (node := value.producer()) is not None:
        if len(value.uses()) + value.is_graph_output() != 1:
            return None
        if node.op_type in _PRODUCTS:
            return node if _multiplies_weight(node) else None
        following = _elementwise_input(node)
        if following is None:
            return None
        value = following
    return None


def _multiplies_weight(node: ir.Node) -> bool:
    weight = operand(node, 1)
    producer = None if weight is None else weight.producer()
    # Tied embeddings are transposed before the product.
    if producer is not None and producer.op_type in {"Transpose", "Cast", "Identity"}:
        weight = producer.inputs[0]
    return weight is not None and weight.is_initializer()


def _elementwise_input(node: ir.Node) -> ir.Value | None:
    if node.domain != "":
        return None
    if node.op_type in _UNARY:
        return node.inputs[0]
    if node.op_type in _BINARY:
        computed = [each for each in node.inputs if each is not None and _varies(each)]
        return computed[0] if len(computed) == 1 else None
    return None


def _varies(value: ir.Value) -> bool:
    # A scalar or a row of the vocabulary goes with every token; a larger constant might not.
    array = constant_array(value)
    return array is None or array.ndim > 1
