"""Per-head scales of quantised pools, as an executor takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ManifestError
from paged_trt.plugins.tensors import EngineSpec, Role, TensorSpec

Array = npt.NDArray[Any]


def checked_scales(spec: EngineSpec, kv_scales: Mapping[str, Array]) -> dict[str, Array]:
    """The scales of every layer with quantised pools.

    Args:
        spec: which scales the engine reads.
        kv_scales: scales input name -> `[2, num_kv_heads]` float32.

    Raises:
        ManifestError: scales are missing, unknown, misshapen or not positive.
    """
    wanted = {each.name: each for each in spec.tensors() if each.role is Role.SCALES}
    if unknown := sorted(set(kv_scales) - set(wanted)):
        raise ManifestError(
            f"`{unknown[0]}` is no scales input of this engine, which has {len(wanted)}; "
            "rebuild the engine"
        )
    return {name: _checked_scale(each, kv_scales) for name, each in wanted.items()}


def _checked_scale(tensor: TensorSpec, kv_scales: Mapping[str, Array]) -> Array:
    if tensor.name not in kv_scales:
        raise ManifestError(
            f"the scales `{tensor.name}` are missing, found {len(kv_scales)} others; "
            "rebuild the engine with its KV scales"
        )
    array = kv_scales[tensor.name]
    if array.shape != tensor.dims or array.dtype != np.float32:
        raise ManifestError(
            f"the scales `{tensor.name}` must be {list(tensor.dims)} float32, found "
            f"{list(array.shape)} {array.dtype}; rebuild the engine"
        )
    if not (np.isfinite(array) & (array > 0)).all():
        raise ManifestError(
            f"the scales `{tensor.name}` must be positive and finite, found {array.min()} to "
            f"{array.max()}; calibrate them again"
        )
    return np.ascontiguousarray(array)
