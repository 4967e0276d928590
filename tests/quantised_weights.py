"""Quantises the weights of a dense model: DequantizeLinear nodes before its products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.load import load_model

BLOCK = 32
_CODES: dict[str, Any] = {
    "int8": np.int8,
    "uint8": np.uint8,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}


def quantise_weights(source: Path, target: Path, *, kind: str) -> dict[str, str]:
    """Write a model whose products read quantised weights.

    Args:
        source: a dense model.
        target: where the other goes, with its weights in the file.
        kind: type of the codes, with one scale per column; `-blocks` for one scale per BLOCK
            rows of a column, `-zeros` for zero points of 0, `-shifted` for zero points of 1.
            Unsigned codes have their zero points in the middle.

    Returns:
        Type by name of each quantised weight.
    """
    model = load_model(source)
    graph = model.graph
    found: dict[str, str] = {}
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or weight.const_value is None:
            continue
        array = weight.const_value.numpy().astype(np.float32)
        parts = _quantised(array, kind, weight.const_value.dtype)
        inputs = [_value(graph, f"{weight.name}/{suffix}", each) for suffix, each in parts]
        is_blocked = kind.endswith("-blocks")
        attributes = {"axis": 0, "block_size": BLOCK} if is_blocked else {"axis": 1}
        dequantise = ir.node("DequantizeLinear", inputs, attributes=attributes)
        dequantise.outputs[0].name = f"{weight.name}/dequantised"
        dequantise.outputs[0].type = ir.TensorType(weight.const_value.dtype)
        dequantise.outputs[0].shape = ir.Shape(array.shape)
        graph.insert_before(node, dequantise)
        node.replace_input_with(1, dequantise.outputs[0])
        found[str(inputs[0].name)] = str(inputs[0].dtype and inputs[0].dtype.name)
        if not weight.uses():
            del graph.initializers[str(weight.name)]
    target.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, target, external_data=f"{target.name}.data")
    return found


def _quantised(array: Any, kind: str, dtype: ir.DataType) -> list[tuple[str, Any]]:
    name, _, shape = kind.partition("-")
    is_blocked = shape == "blocks"
    limit = 7 if "4" in name else 127
    rows = array.shape[0]
    blocks = array.reshape(rows // BLOCK, BLOCK, -1) if is_blocked else array[None]
    scales = np.maximum(np.abs(blocks).max(1), 1e-3) / limit
    # The scale that is stored is the one that the rounding uses.
    scales = scales.astype(dtype.numpy())
    codes = np.clip(np.rint(blocks / scales[:, None].astype(np.float32)), -limit, limit)
    zero = limit + 1 if name[0] == "u" else int(shape == "shifted")
    codes = (codes.reshape(array.shape) + zero).astype(np.int16).astype(_CODES[name])
    scale = scales if is_blocked else scales[0]
    parts = [(name, codes), ("scale", scale)]
    if zero or shape == "zeros":
        parts.append(("zero", np.full(scale.shape, zero, _CODES[name])))
    return parts


def _value(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
    )
    graph.register_initializer(value)
    return value
