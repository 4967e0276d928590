"""float32 in place of bfloat16, for a CPU that multiplies no bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE
from paged_trt.plugins.operands import ALIASES

_TYPE_ATTRIBUTES: Final = frozenset({"to", "dtype", "output_dtype"})
"""Attributes of standard operators whose integer is an element type."""


def upcast_bfloat16(model: ir.Model) -> None:
    """Make float32 of bfloat16 everywhere but in the pools and in PagedAttention itself.

    The function of PagedAttention takes float32 activations with bfloat16 pools, so keys and
    values are rounded as they are on a device.
    """
    pools = _pools(model.graph)
    _upcast_values([*model.graph.inputs, *model.graph.outputs], keep=pools)
    _upcast_graph(model.graph, keep=pools)
    for function in model.functions.values():
        if function.domain != OP_DOMAIN:
            _upcast_nodes(function, keep=pools)


def _pools(graph: ir.Graph) -> set[ir.Value]:
    """Pools of all PagedAttention nodes, by their place: a user's model names them at will."""
    nodes = [node for node in graph if (node.domain, node.op_type) == (OP_DOMAIN, OP_TYPE)]
    pools = [
        value
        for node in nodes
        for output, operand in ALIASES.items()
        for value in (node.inputs[operand], node.outputs[output])
    ]
    return {value for value in pools if value is not None}


def _upcast_graph(graph: ir.Graph, *, keep: set[ir.Value]) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and value.dtype == ir.DataType.BFLOAT16:
            value.const_value = _upcast_tensor(value.const_value)
            value.dtype = ir.DataType.FLOAT
    _upcast_nodes(graph, keep=keep)


def _upcast_nodes(nodes: Iterable[ir.Node], *, keep: set[ir.Value]) -> None:
    for node in nodes:
        _upcast_values(node.outputs, keep=keep)
        for attribute in tuple(node.attributes.values()):
            _upcast_attribute(node, attribute, keep=keep)


def _upcast_attribute(node: ir.Node, attribute: ir.Attr, *, keep: set[ir.Value]) -> None:
    if attribute.is_ref():
        return
    if attribute.type == ir.AttributeType.GRAPH:
        _upcast_values([*attribute.as_graph().inputs], keep=keep)
        _upcast_graph(attribute.as_graph(), keep=keep)
    elif attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        if tensor.dtype == ir.DataType.BFLOAT16:
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _upcast_tensor(tensor))
    elif (
        attribute.type == ir.AttributeType.INT
        and attribute.name in _TYPE_ATTRIBUTES
        and attribute.as_int() == ir.DataType.BFLOAT16
    ):
        node.attributes[attribute.name] = ir.AttrInt64(attribute.name, ir.DataType.FLOAT.value)


def _upcast_values(values: Iterable[ir.Value], *, keep: set[ir.Value]) -> None:
    for value in values:
        if value.dtype == ir.DataType.BFLOAT16 and value not in keep:
            value.dtype = ir.DataType.FLOAT


def _upcast_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """float32 of the same numbers, made when it is asked for: weights may be large."""

    def load() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)

    shape = ir.Shape(tuple(int(dim) for dim in tensor.numpy().shape))
    return ir.LazyTensor(load, dtype=ir.DataType.FLOAT, shape=shape, name=tensor.name)
