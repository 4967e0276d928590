"""The model file of the reference executor: checked, and upcast where a CPU needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ManifestError, SpecMismatchError
from paged_trt.plugins.reference import DOMAIN
from paged_trt.plugins.tensors import EngineSpec, Role, TensorSpec

_TYPE_ATTRIBUTES: Final = frozenset({"to", "dtype", "output_dtype"})
"""Attributes of standard operators whose integer is an element type."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model whose interface is that of its engine.

    Attributes:
        path: the file as it was built.
        upcast: the model with float32 in place of bfloat16; None where nothing changes.
    """

    path: Path
    upcast: ir.Model | None

    @property
    def is_upcast(self) -> bool:
        """Whether onnxruntime runs float32 in place of bfloat16."""
        return self.upcast is not None

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """The file to load; the upcast lives no longer than the context."""
        if self.upcast is None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="paged-trt-") as folder:
            path = Path(folder) / self.path.name
            ir.save(self.upcast, path, external_data=f"{path.name}.data")
            yield path


def open_reference_model(path: Path, spec: EngineSpec) -> ReferenceModel:
    """Read a model and compare its inputs and outputs with the tensor table.

    Args:
        path: an ONNX file, its weights beside it.
        spec: interface that the model must have.

    Raises:
        ManifestError: the file is no ONNX model, or its weights lie outside its directory.
        SpecMismatchError: a tensor is missing, unknown, or of another type or shape.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's and onnx's errors share no base class
        raise ManifestError(
            f"{path} is no readable ONNX model ({error}); rebuild with `paged-trt build`"
        ) from error
    _check_locations(path, proto.graph)
    _check_interface(path, proto.graph, spec)
    if spec.activation_dtype is not DType.BFLOAT16:
        return ReferenceModel(path, None)
    model = ir.load(path)
    upcast_bfloat16(model)
    return ReferenceModel(path, model)


def _check_locations(path: Path, graph: onnx.GraphProto) -> None:
    """External data must be files of the model's own directory, which the manifest covers."""
    folder = path.parent.resolve()
    for tensor in _tensors(graph):
        for entry in tensor.external_data:
            if entry.key != "location":
                continue
            target = (folder / entry.value).resolve()
            if target.parent != folder:
                raise ManifestError(
                    f"{path}: the data of `{tensor.name}` lie at {target}, outside {folder}; "
                    "rebuild with `paged-trt build`"
                )
            if not target.is_file():
                raise ManifestError(
                    f"{path}: {target.name} holds the data of `{tensor.name}` and does not "
                    "exist; copy it too, or rebuild with `paged-trt build`"
                )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _tensors(subgraph)


def _check_interface(path: Path, graph: onnx.GraphProto, spec: EngineSpec) -> None:
    tensors = spec.tensors()
    sides = (
        (graph.input, [each for each in tensors if each.role.is_input], "inputs"),
        (graph.output, [each for each in tensors if not each.role.is_input], "outputs"),
    )
    for values, wanted, side in sides:
        found = {value.name: value for value in values}
        if missing := [each.name for each in wanted if each.name not in found]:
            raise SpecMismatchError(missing[0], "present", "no such tensor", where=str(path))
        if unknown := sorted(set(found) - {each.name for each in wanted}):
            raise SpecMismatchError(side, len(wanted), f"`{unknown[0]}` as well", where=str(path))
        for tensor in wanted:
            _check_tensor(path, found[tensor.name], tensor)


def _check_tensor(path: Path, value: onnx.ValueInfoProto, tensor: TensorSpec) -> None:
    kind = value.type.tensor_type
    if kind.elem_type != tensor.dtype.onnx:
        found = onnx.TensorProto.DataType.Name(kind.elem_type)
        raise SpecMismatchError(
            f"{tensor.name}.dtype", tensor.dtype.value, found.lower(), where=str(path)
        )
    dims = [dim.dim_value if dim.HasField("dim_value") else "?" for dim in kind.shape.dim]
    wanted = [dim if isinstance(dim, int) else "?" for dim in tensor.dims]
    # Outputs of a rewritten model need not repeat what shape inference can tell.
    unknown_is_fine = tensor.role is Role.RESULT
    if len(dims) != len(wanted) or any(
        mine != theirs and not (unknown_is_fine and theirs == "?")
        for mine, theirs in zip(wanted, dims, strict=True)
    ):
        raise SpecMismatchError(f"{tensor.name}.dims", wanted, dims, where=str(path))


def upcast_bfloat16(model: ir.Model) -> None:
    """Make float32 of bfloat16 everywhere but in the pools and in PagedAttention itself.

    The function of PagedAttention takes float32 activations with bfloat16 pools, so keys and
    values are rounded as they are on a device.
    """
    pools = {
        value
        for value in (*model.graph.inputs, *model.graph.outputs)
        if value.name is not None and value.name.startswith(("key_pool", "value_pool"))
    }
    _upcast_values([*model.graph.inputs, *model.graph.outputs], keep=pools)
    _upcast_graph(model.graph, keep=pools)
    for function in model.functions.values():
        if function.domain != DOMAIN:
            _upcast_nodes(function, keep=pools)


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
