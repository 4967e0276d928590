"""The model file of the reference executor: checked, and upcast where a CPU needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ManifestError, SpecMismatchError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE
from paged_trt.plugins.onnx_tensors import model_tensors
from paged_trt.plugins.operands import Operand, Output
from paged_trt.plugins.tensors import EngineSpec, Role, TensorSpec, key_pool_name

if TYPE_CHECKING:
    # It takes half a second to import, and only an upcast needs it.
    import onnx_ir as ir


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A model whose interface is that of its engine.

    Attributes:
        path: the file as it was built.
        changed: the model with float32 in place of bfloat16, or with more outputs; None where
            the file is run as it is.
        is_upcast: whether onnxruntime runs float32 in place of bfloat16.
        layer_names: outputs that hold the attention output of each layer.
    """

    path: Path
    changed: ir.Model | None
    is_upcast: bool = False
    layer_names: tuple[str, ...] = ()

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """The file to load; a changed model lives no longer than the context."""
        if self.changed is None:
            yield self.path
            return
        import onnx_ir as ir

        with tempfile.TemporaryDirectory(prefix="paged-trt-") as folder:
            path = Path(folder) / self.path.name
            ir.save(self.changed, path, external_data=f"{path.name}.data")
            yield path


def open_reference_model(
    path: Path, spec: EngineSpec, *, keeps_layers: bool = False
) -> ReferenceModel:
    """Read a model and compare its inputs and outputs with the tensor table.

    Args:
        path: an ONNX file, its weights beside it.
        spec: interface that the model must have.
        keeps_layers: add the attention output of each layer to the outputs.

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
    _check_locations(path, proto)
    _check_interface(path, proto.graph, spec)
    is_upcast = spec.activation_dtype is DType.BFLOAT16
    if not (is_upcast or keeps_layers):
        return ReferenceModel(path, None)
    import onnx_ir as ir

    from paged_trt.runtime.reference_upcast import upcast_bfloat16

    model = ir.load(path)
    if is_upcast:
        upcast_bfloat16(model)
    names = _mark_layers(model, spec) if keeps_layers else ()
    return ReferenceModel(path, model, is_upcast, names)


def _mark_layers(model: ir.Model, spec: EngineSpec) -> tuple[str, ...]:
    """Make the attention output of each layer an output of the model; their names by layer."""
    marked = {}
    for node in model.graph:
        if (node.domain, node.op_type) == (OP_DOMAIN, OP_TYPE):
            pool, attended = node.inputs[Operand.KEY_POOL], node.outputs[Output.OUTPUT]
            marked["" if pool is None else pool.name] = attended
    values = [marked[key_pool_name(layer)] for layer in range(len(spec.layers))]
    # An engine that was built with `--layer-outputs` has them already.
    model.graph.outputs.extend(value for value in values if not value.is_graph_output())
    return tuple(str(value.name) for value in values)


def _check_locations(path: Path, model: onnx.ModelProto) -> None:
    """External data must be files of the model's own directory, which the manifest covers."""
    folder = path.parent.resolve()
    for tensor in model_tensors(model):
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
