"""Float16 products with float32 sums, spelt so that TensorRT keeps them.

TensorRT sums float16 products in float16, which costs several roundings of the result; every
other runtime sums them in float32. Where both operands are cast to float32 and the result is
cast back, TensorRT-RTX takes the float16 kernel with float32 sums.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir
from onnx_ir import tape

PRODUCTS: Final = frozenset({"MatMul", "Gemm"})


def sum_in_float32(model: ir.Model) -> int:
    """Cast the operands of every float16 product to float32 and its result back, in place.

    Returns:
        How many products were found. One whose type no operand tells is left alone.
    """
    nodes = [node for node in model.graph if _is_float16_product(node)]
    for node in nodes:
        _widen(model.graph, node)
    return len(nodes)


def _is_float16_product(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in PRODUCTS:
        return False
    # The operands of a product have one type, so the one that tells speaks for all.
    return any(_dtype(value) is ir.DataType.FLOAT16 for value in (*node.inputs, *node.outputs))


def _dtype(value: ir.Value | None) -> ir.DataType | None:
    if value is None:
        return None
    if value.dtype is not None:
        return value.dtype
    if value.const_value is not None:
        return value.const_value.dtype
    source = value.producer()
    if source is not None and source.op_type in {"Transpose", "Identity", "Reshape"}:
        return _dtype(source.inputs[0])
    return None


def _widen(graph: ir.Graph, node: ir.Node) -> None:
    before = tape.Tape()
    for index, value in enumerate(node.inputs):
        if value is not None:
            wide = before.op("Cast", [value], {"to": ir.DataType.FLOAT})
            node.replace_input_with(index, wide)
    graph.insert_before(node, list(before.nodes))
    (output,) = node.outputs
    after = tape.Tape()
    narrow = after.op("Cast", [output], {"to": ir.DataType.FLOAT16})
    (cast,) = after.nodes
    output.replace_all_uses_with(narrow, replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    narrow.name, output.name = output.name, f"{output.name}_float32"
    narrow.type, output.type = output.type, ir.TensorType(ir.DataType.FLOAT)
    narrow.shape = output.shape
    graph.insert_after(node, [cast])
    for made in (*before.nodes, cast):
        made.name = made.name or f"{node.name}/{made.outputs[0].name}/Cast"
