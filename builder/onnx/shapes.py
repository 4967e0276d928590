"""Shapes of all values of a model for one step, where the exporter left them open."""

from __future__ import annotations

from typing import Final

import onnx
import onnx_ir as ir

from paged_trt.builder.onnx.graph import tensor_shape, value_name

_SMALL_BYTES: Final = 1024
"""Tensors up to this size take part: shapes are computed from them, and not from weights."""


def shapes_of_step(
    model: ir.Model, inputs: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int | None, ...]]:
    """Shapes by value name, as onnx infers them; values that it cannot infer are left out.

    Args:
        model: the model; it is not changed and its weights are not read.
        inputs: shapes of graph inputs by name.
    """
    graph = onnx.GraphProto(name="shapes")
    for node in model.graph:
        graph.node.append(ir.to_proto(node))
    for graph_input in model.graph.inputs:
        name = value_name(graph_input)
        dtype = (graph_input.dtype or ir.DataType.INT64).value
        graph.input.append(onnx.helper.make_tensor_value_info(name, dtype, inputs.get(name)))
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.is_graph_input():
            continue
        if tensor.nbytes <= _SMALL_BYTES:
            graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
        else:
            dims = tensor_shape(tensor).numpy()
            graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.dtype.value, dims))
    opsets = [
        onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()
    ]
    proto = onnx.helper.make_model(graph, opset_imports=opsets)
    proto.ir_version = model.ir_version
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    # The pass is a help: what it cannot do leaves the shapes as open as they were.
    except Exception:
        return {}
    return {
        info.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else None
            for dim in info.type.tensor_type.shape.dim
        )
        for info in inferred.graph.value_info
        if info.type.tensor_type.HasField("shape")
    }
