"""Opens a model as the reference of a comparison, whatever it is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import onnx
import onnx_ir as ir

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.dense import Decoder, DenseDecoder, open_session
from paged_trt.runtime.dense_paged import (
    IdentityPagesDecoder,
    add_missing_functions,
    load_scales,
    paged_nodes,
    read_paged_signature,
)
from paged_trt.runtime.dense_signature import load_graph, read_signature
from paged_trt.runtime.reference_model import ReferenceModel
from paged_trt.runtime.reference_upcast import upcast_bfloat16

UPCAST_NOTE: Final = "onnxruntime computes no bfloat16 on a CPU: run as its float32 upcast"


def open_decoder(path: Path) -> Decoder:
    """A dense model, or one that holds PagedAttention nodes, ready to decode.

    Raises:
        ConfigError: the file is missing or no ONNX model.
        UnsupportedError: its interface is unknown, or onnxruntime is missing or refuses it.
    """
    model = load_graph(path)
    is_paged = bool(paged_nodes(model))
    changed = is_paged and add_missing_functions(model)
    upcast = _has_bfloat16(model)
    notes = (UPCAST_NOTE,) if upcast else ()
    if not (changed or upcast):
        return _decoder(open_session(path), model, path, notes)
    with _rewritten(path, model, upcast=upcast) as file:
        return _decoder(open_session(file), load_graph(file), path, notes)


def _decoder(session: Any, model: onnx.ModelProto, path: Path, notes: tuple[str, ...]) -> Decoder:
    if not paged_nodes(model):
        return DenseDecoder(session, read_signature(model), notes)
    signature = read_paged_signature(model)
    scales = load_scales(path.parent, signature)
    return IdentityPagesDecoder(session, signature, scales=scales, notes=notes)


@contextlib.contextmanager
def _rewritten(path: Path, model: onnx.ModelProto, *, upcast: bool) -> Iterator[Path]:
    """A temporary copy of the model as onnxruntime can run it."""
    try:
        graph = ir.from_proto(model)
        ir.external_data.set_base_dir(graph.graph, path.resolve().parent)
        if upcast:
            upcast_bfloat16(graph)
        # A save reads the weights, which is where a missing data file shows.
        with ReferenceModel(path, graph).file() as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot copy {path} with its weights: {error}") from error


def _has_bfloat16(model: onnx.ModelProto) -> bool:
    bfloat16 = onnx.TensorProto.BFLOAT16
    values = (*model.graph.input, *model.graph.output)
    return any(value.type.tensor_type.elem_type == bfloat16 for value in values) or any(
        tensor.data_type == bfloat16 for tensor in model.graph.initializer
    )
