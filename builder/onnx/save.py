"""Writes a model as `model.onnx` and `model.onnx.data`."""

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
