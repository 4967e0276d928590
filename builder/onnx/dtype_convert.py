"""Converts the floating type of a model, for `--dtype`.

From float32, some values stay float32 (see `float_islands`), and casts are put at their shores,
so that the types are consistent under a strongly typed TensorRT. Between float16 and bfloat16
everything of the one type becomes the other. Weights are converted one by one when the model is
written.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from paged_trt.builder.onnx.float_islands import FloatKinds, Kind
from paged_trt.builder.onnx.graph import Array, Emitter, node_name, tensor_shape, value_name
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, OnnxRewriteError

_SCOPE: Final = "/paged_trt/dtype"
_FLOAT16_MAX: Final = float(np.finfo(np.float16).max)
_TYPE_ATTRIBUTES: Final = ("to", "dtype")


def convert_dtype(model: ir.Model, *, source: DType, target: DType) -> None:
    """Convert a rewritten model in place.

    Args:
        model: a rewritten model, whose outputs have their final types already.
        source: float type of the model's activations.
        target: float16 or bfloat16.

    Raises:
        ConfigError: a weight is outside the range of `target`.
        OnnxRewriteError: a node's type cannot be converted.
    """
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    old, new = ir.DataType(source.onnx), ir.DataType(target.onnx)
    if source is DType.FLOAT32:
        _convert_float32(model.graph, new)
    else:
        _replace_type(model.graph, old, new)
    model.graph.sort()
    # The float32 weights that nothing reads any more would double the file.
    RemoveUnusedNodesPass()(model)


def _replace_type(graph: ir.Graph, old: ir.DataType, new: ir.DataType) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype is old:
            _set_tensor(value, _converted(value.const_value, new))
    for node in graph:
        for name, found in list(node.attributes.items()):
            if name in _TYPE_ATTRIBUTES and found.value == old:
                node.attributes[name] = ir.AttrInt64(name, new.value)
            elif found.type is ir.AttributeType.TENSOR and found.value.dtype is old:
                node.attributes[name] = ir.AttrTensor(name, _converted(found.value, new))


def _convert_float32(graph: ir.Graph, new: ir.DataType) -> None:
    kinds = FloatKinds(graph)
    shores = _Shores(graph, kinds, new)
    for node in list(graph):
        if node.domain == "" and node.op_type in {"RandomNormal", "RandomUniform", "EyeLike"}:
            raise OnnxRewriteError(
                node_name(node),
                f"{node.op_type} has a type of its own, which cannot be converted",
                f"export the model in {new.name.lower()}",
            )
        for index in range(len(node.inputs)):
            shores.convert_input(node, index)
        if node.op_type == "Cast" and kinds.of(node.outputs[0]) is Kind.LOW:
            node.attributes["to"] = ir.AttrInt64("to", new.value)
        if node.op_type == "ConstantOfShape" and kinds.of(node.outputs[0]) is Kind.LOW:
            value = node.attributes.get("value")
            tensor = ir.tensor(np.zeros(1, np.float32)) if value is None else value.value
            node.attributes["value"] = ir.AttrTensor("value", _converted(tensor, new))
    for output in list(graph.outputs):
        if output.dtype is new and kinds.of(output) is Kind.ISLAND:
            _cast_output(graph, output, new)


class _Shores:
    """Converts what a node reads, where kind and need differ."""

    def __init__(self, graph: ir.Graph, kinds: FloatKinds, new: ir.DataType) -> None:
        self._emit = Emitter(graph, _SCOPE)
        self._graph, self._kinds, self._new = graph, kinds, new
        self._converted: dict[tuple[ir.Value, Kind], ir.Value] = {}

    def convert_input(self, node: ir.Node, index: int) -> None:
        wanted = self._kinds.wanted(node, index)
        value = node.inputs[index]
        if value is None or wanted is Kind.NO_FLOAT:
            return
        kind = self._kinds.of(value)
        if kind is wanted or (kind is Kind.CONSTANT and wanted is Kind.ISLAND):
            return
        key = (value, wanted)
        if key not in self._converted:
            self._converted[key] = (
                self._low_weight(value) if kind is Kind.CONSTANT else self._cast(value, wanted)
            )
        node.replace_input_with(index, self._converted[key])

    def _cast(self, value: ir.Value, wanted: Kind) -> ir.Value:
        dtype = self._new if wanted is Kind.LOW else ir.DataType.FLOAT
        name = f"{value_name(value)}/{dtype.name.lower()}"
        return self._emit.op("Cast", [value], name, {"to": dtype})

    def _low_weight(self, value: ir.Value) -> ir.Value:
        if value.const_value is None:
            raise AssertionError(f"{value.name} has no data")
        name = f"{value_name(value)}/{self._new.name.lower()}"
        tensor = _converted(value.const_value, self._new, name=name)
        result = ir.Value(name=name, const_value=tensor)
        _set_tensor(result, tensor)
        self._graph.register_initializer(result)
        return result


def _set_tensor(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    value.const_value = tensor
    value.type = ir.TensorType(tensor.dtype)
    value.shape = tensor_shape(tensor)


def _converted(
    tensor: ir.TensorProtocol, new: ir.DataType, *, name: str | None = None
) -> ir.LazyTensor:
    """`tensor` in another type; it is read here for its range, and again when it is written."""
    if new is ir.DataType.FLOAT16:
        _check_range(tensor.numpy(), str(tensor.name))
        _unmap(tensor)

    def convert() -> ir.TensorProtocol:
        converted = ir.tensor(tensor.numpy().astype(new.numpy()))
        _unmap(tensor)
        return converted

    return ir.LazyTensor(
        convert,
        dtype=new,
        shape=tensor_shape(tensor),
        name=name or tensor.name,
    )


def _unmap(tensor: ir.TensorProtocol) -> None:
    """Let go of a weight's pages: what is mapped counts as this process's memory."""
    if isinstance(tensor, ir.ExternalTensor):
        # Where a view of the weight is alive, its pages stay.
        with contextlib.suppress(BufferError):
            tensor.release()


def _check_range(array: Array, name: str) -> None:
    if array.size == 0:
        return
    largest = max(abs(float(array.max())), abs(float(array.min())))
    if np.isinf(largest):
        # An infinity is one in float16 too; only finite numbers may not become one.
        finite = array[np.isfinite(array)].astype(np.float32)
        largest = float(np.abs(finite).max(initial=0))
    if largest > _FLOAT16_MAX:
        raise ConfigError(
            f"`{name}` holds {largest:g}, over float16's {_FLOAT16_MAX:g}; pass `--dtype bfloat16`"
        )


def _cast_output(graph: ir.Graph, value: ir.Value, new: ir.DataType) -> None:
    name, shape = value_name(value), value.shape
    value.name = f"{name}/float32"
    cast = Emitter(graph, _SCOPE).op("Cast", [value], name, {"to": new}, dtype=new)
    cast.name, cast.shape = name, shape
    index = list(graph.outputs).index(value)
    graph.outputs[index] = cast
