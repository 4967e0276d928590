"""Converts the floating type of a model."""

from __future__ import annotations

import onnx_ir as ir

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError


def convert_dtype(model: ir.Model, *, source: DType, target: DType) -> None:
    """Convert in place.

    Raises:
        UnsupportedError: always, for now.
    """
    raise UnsupportedError(
        f"{source.value} cannot be converted to {target.value} yet; export in {target.value}"
    )
