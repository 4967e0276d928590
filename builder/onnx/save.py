"""Writes a model as `model.onnx` and `model.onnx.data`, small tensors in the first."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import onnx_ir as ir

from paged_trt.plugins.manifest import MODEL_DATA_FILE, MODEL_FILE

_INLINE_BYTES: Final = 1024
"""Tensors up to this size stay in the model file, so that tools read constants without the data."""


def save_model(model: ir.Model, directory: Path) -> Path:
    """Write `model` and its data; tensors are streamed one by one.

    Args:
        model: the model; it is not changed.
        directory: an existing folder, not the one that the model was loaded from.

    Returns:
        Path of the model file.

    Raises:
        OSError: a file cannot be written.
    """
    path = Path(directory) / MODEL_FILE
    ir.save(model, path, external_data=MODEL_DATA_FILE, size_threshold_bytes=_INLINE_BYTES)
    return path


def inline_small_tensors(model: ir.Model) -> None:
    """Move small external tensors into the model, where `save_model` leaves them.

    Exporters put every weight into the data file. onnx's checker sees the small ones, and looks
    for that file in the working directory.
    """
    values = [
        value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
        and value.const_value.nbytes <= _INLINE_BYTES
    ]
    tensors = [value.const_value for value in values if value.const_value is not None]
    loaded = ir.external_data.convert_tensors_from_external(tensors)
    for value, tensor in zip(values, loaded, strict=True):
        value.const_value = tensor
