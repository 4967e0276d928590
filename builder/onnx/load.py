"""Loads an ONNX file that nobody vouches for.

The proto is parsed without its external data. Every tensor is then checked against the
bytes that hold it, so that reading one later can neither leave the model's folder nor run
past the end of a file. Weights stay on disk and are mapped when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath

import google.protobuf.message
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from paged_trt.builder.onnx.save import inline_small_tensors
from paged_trt.plugins.errors import ConfigError, OnnxRewriteError
from paged_trt.plugins.fields import OP_DOMAIN
from paged_trt.plugins.onnx_tensors import model_tensors
from paged_trt.plugins.path_hints import missing_data, not_a_model

MINIMUM_OPSET = 18
"""Oldest ai.onnx opset that is read: below it, reductions and Split spell axes differently."""
_EXPORT_AGAIN = "export the model again"
_MAX_DIM = 2**40
_MAX_NODES = 10**6
"""Nodes after inlining: functions that call functions may double them at every level."""
_MAX_NESTING = 64
"""Functions inside functions."""


def load_model(path: Path) -> ir.Model:
    """Read a model, with its weights mapped from disk.

    Model-local functions other than PagedAttention's reference are inlined, so that the
    survey sees the nodes that exporters hide in them.

    Args:
        path: the `.onnx` file; external data lies in its folder.

    Raises:
        ConfigError: there is no such file.
        OnnxRewriteError: the file, or a data file that it names, is damaged, too new, or
            points outside the folder.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(not_a_model(path))
    proto = _parse(path)
    _check_text(proto, path.name)
    _check_versions(proto, path.name)
    if not proto.graph.node:
        raise OnnxRewriteError(path.name, "the graph has no nodes", _EXPORT_AGAIN)
    _check_size(proto, path.name)
    folder = path.resolve().parent
    _refuse_sparse(proto)
    for tensor in model_tensors(proto):
        _check_tensor(tensor, folder)
    try:
        model = ir.from_proto(proto)
        _check_links(model.graph)
        ir.external_data.set_base_dir(model.graph, folder)
        inline_small_tensors(model)
        InlinePass(criteria=lambda function: function.domain != OP_DOMAIN)(model)
        model.graph.sort()
        for node in model.graph.all_nodes():
            # An attribute of a type that its content does not have shows when it is written.
            ir.to_proto(node)
    # Whatever a malformed graph trips over becomes one named error.
    except Exception as error:
        raise OnnxRewriteError(
            path.name, f"the graph is malformed ({error})", _EXPORT_AGAIN
        ) from error
    return model


def _parse(path: Path) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        data = path.read_bytes()
        if not data:
            # An empty message is a valid one, whose opset would be what is missing.
            raise OnnxRewriteError(path.name, "the file is empty", "copy or export it again")
        proto.ParseFromString(data)
    except google.protobuf.message.DecodeError as error:
        raise OnnxRewriteError(
            path.name,
            f"{path.stat().st_size} bytes that are no ONNX model, or only a part of one",
            "copy or export the file again",
        ) from error
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be read ({error.strerror})") from error
    return proto


def _check_text(message: google.protobuf.message.Message, name: str) -> None:
    """Refuse names that are no UTF-8: protobuf hands them out as bytes."""
    for field, content in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = [content] if isinstance(content, str | bytes) else content
            if any(isinstance(text, bytes) for text in texts):
                raise OnnxRewriteError(
                    name, f"field `{field.name}` holds bytes that are no text", _EXPORT_AGAIN
                )
        elif field.type == field.TYPE_MESSAGE:
            parts = [content] if hasattr(content, "ListFields") else content
            for part in parts:
                _check_text(part, name)


def _check_versions(proto: onnx.ModelProto, name: str) -> None:
    if proto.ir_version > onnx.IR_VERSION:
        raise OnnxRewriteError(
            name,
            f"IR version {proto.ir_version} is newer than {onnx.IR_VERSION}",
            "upgrade with `pip install --upgrade onnx`, or export for an older IR version",
        )
    versions = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    version = versions.get("ai.onnx")
    newest = onnx.defs.onnx_opset_version()
    if version is None:
        raise OnnxRewriteError(name, "no version of the standard opset is named", _EXPORT_AGAIN)
    if version > newest:
        raise OnnxRewriteError(
            name,
            f"opset {version} is newer than {newest}",
            "upgrade with `pip install --upgrade onnx`, or export for an older opset",
        )
    if version < MINIMUM_OPSET:
        raise OnnxRewriteError(
            name,
            f"opset {version} is older than {MINIMUM_OPSET}",
            "export again with `opset_version=23`",
        )


def _check_size(proto: onnx.ModelProto, name: str) -> None:
    """Refuse functions that would unfold to more nodes than any model has."""
    functions = {(each.domain, each.name, each.overload): each for each in proto.functions}
    known: dict[tuple[str, str, str], int] = {}

    def unfolded(nodes: Iterable[onnx.NodeProto], nesting: int) -> int:
        if nesting > _MAX_NESTING:
            raise OnnxRewriteError(
                name,
                f"its functions or graphs nest deeper than {_MAX_NESTING}, or call themselves",
                _EXPORT_AGAIN,
            )
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in functions and key not in known:
                known[key] = unfolded(functions[key].node, nesting + 1)
            count += known.get(key, 1)
            for found in node.attribute:
                bodies = [found.g, *found.graphs] if found.HasField("g") else found.graphs
                count += sum(unfolded(body.node, nesting + 1) for body in bodies)
        return count

    count = unfolded(proto.graph.node, 0)
    if count > _MAX_NODES:
        raise OnnxRewriteError(
            name,
            f"its functions unfold to {count} nodes, over the limit of {_MAX_NODES}",
            "export without functions",
        )


def _refuse_sparse(proto: onnx.ModelProto) -> None:
    for sparse in proto.graph.sparse_initializer:
        raise OnnxRewriteError(
            sparse.values.name or proto.graph.name,
            "sparse initializers are not supported",
            "store the weights as dense tensors",
        )


def _check_tensor(tensor: onnx.TensorProto, folder: Path) -> None:
    name = tensor.name or "(tensor without a name)"
    expected = _expected_bytes(tensor, name)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(tensor, folder, expected=expected, name=name)
    elif tensor.HasField("raw_data"):
        if expected != len(tensor.raw_data):
            raise OnnxRewriteError(
                name,
                f"the shape needs {expected} bytes and the file holds {len(tensor.raw_data)}",
                _EXPORT_AGAIN,
            )
    else:
        try:
            onnx.numpy_helper.to_array(tensor)
        except Exception as error:
            raise OnnxRewriteError(
                name, f"its values do not fit its shape ({error})", _EXPORT_AGAIN
            ) from error


def _expected_bytes(tensor: onnx.TensorProto, name: str) -> int | None:
    """Bytes of the tensor's data; None for strings, which have no fixed size."""
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        raise OnnxRewriteError(
            name, f"element type {tensor.data_type} is unknown", "upgrade onnx-ir, or export again"
        ) from None
    if dtype is ir.DataType.UNDEFINED:
        raise OnnxRewriteError(name, "the tensor has no element type", _EXPORT_AGAIN)
    if any(not 0 <= dim <= _MAX_DIM for dim in tensor.dims):
        raise OnnxRewriteError(name, f"the shape {list(tensor.dims)} is impossible", _EXPORT_AGAIN)
    if dtype is ir.DataType.STRING:
        return None
    return math.ceil(math.prod(tensor.dims) * dtype.bitwidth / 8)


def _check_external(
    tensor: onnx.TensorProto, folder: Path, *, expected: int | None, name: str
) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    data = _data_file(location, folder, name)
    size = data.stat().st_size
    try:
        offset = int(entries.get("offset", "0"))
        length = int(entries.get("length", str(max(size - offset, 0))))
    except ValueError:
        raise OnnxRewriteError(
            name, f"offset or length in `{location}` is no number", _EXPORT_AGAIN
        ) from None
    if offset < 0 or length < 0 or offset + length > size:
        raise OnnxRewriteError(
            name,
            f"bytes {offset} to {offset + length} are outside `{location}` of {size} bytes",
            "copy the data file again, or export again",
        )
    if expected is None or length != expected:
        raise OnnxRewriteError(
            name,
            f"the shape needs {expected} bytes and `{location}` holds {length} of them",
            _EXPORT_AGAIN,
        )


def _check_links(graph: ir.Graph) -> None:
    """Refuse values that nothing produces.

    Raises:
        ValueError: which one.
    """
    read = [value for node in graph.all_nodes() for value in node.inputs if value is not None]
    for value in (*read, *graph.outputs):
        if not _has_origin(value):
            raise ValueError(f"nothing produces `{value.name}`")


def _has_origin(value: ir.Value) -> bool:
    return value.producer() is not None or value.is_graph_input() or value.const_value is not None


def _data_file(location: str, folder: Path, name: str) -> Path:
    windows = PureWindowsPath(location)
    # The Windows view of a path sees the separators and roots of both systems.
    escapes = bool(windows.anchor) or ".." in windows.parts or "\0" in location
    if not location or escapes:
        raise OnnxRewriteError(
            name,
            f"its data lies at `{location}`, which is no path inside the model's folder",
            "put the data file beside the model and export with a relative location",
        )
    try:
        data = (folder / location).resolve()
        links = data.stat().st_nlink if data.is_file() else 0
    except OSError as error:
        raise OnnxRewriteError(
            name,
            f"its data file `{location[:80]}` cannot be opened ({error.strerror})",
            "put the data file beside the model",
        ) from error
    if not data.is_relative_to(folder):
        raise OnnxRewriteError(
            name,
            f"its data file `{location}` is a link that leaves the model's folder",
            "copy the data file beside the model",
        )
    if links == 0:
        raise OnnxRewriteError(
            name,
            f"its data file `{location}` is missing from `{folder}`",
            missing_data(folder / location),
        )
    if links > 1:
        # A hard link may be a file of another folder; the reader of weights refuses it as well.
        raise OnnxRewriteError(
            name,
            f"its data file `{location}` has {links} hard links, and 1 is allowed",
            "make a real copy of the data file",
        )
    return data
