"""Per-head scales of quantised pools, as an executor takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from paged_trt.plugins.errors import ConfigError, ManifestError
from paged_trt.plugins.kv_scales import require_scales
from paged_trt.plugins.tensors import EngineSpec

Array = npt.NDArray[Any]


def checked_scales(spec: EngineSpec, kv_scales: Mapping[str, Array]) -> dict[str, Array]:
    """The scales of every layer with quantised pools; none where the pools are not.

    Args:
        spec: which scales the engine reads.
        kv_scales: scales input name -> `[2, num_kv_heads]` float32.

    Raises:
        ManifestError: scales are missing, unknown, misshapen or not positive and finite.
    """
    if not spec.kv_cache_dtype.is_quantised:
        return {}
    try:
        return {**require_scales(kv_scales, spec.layers, where="the engine's KV scales")}
    except ConfigError as error:
        raise ManifestError(f"{error}, and rebuild the engine with `--kv-scales`") from error
