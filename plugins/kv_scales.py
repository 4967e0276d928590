"""Scales of a quantised KV pool: one file format and one check, for every reader of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import KV_CACHE_DTYPES, DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import write_bytes
from paged_trt.plugins.tensors import kv_scales_name

Array = npt.NDArray[Any]
_MAX_BYTES: Final = 2**26
DTYPE_ENTRY: Final = "kv_cache_dtype"
"""Entry of a scales file's metadata: the type of the pool that its scales are for."""


def read_scales_file(path: Path) -> dict[str, Array]:
    """Tensors of a safetensors file, unchecked.

    Raises:
        ConfigError: there is no such file, it is too large for scales, or it is damaged.
    """
    import safetensors
    import safetensors.numpy

    if not path.is_file():
        raise ConfigError(
            f"there is no file of KV scales at `{path}`; make one with "
            "`paged-trt calibrate MODEL.onnx -o FILE` and pass it with `--kv-scales FILE`"
        )
    if path.stat().st_size > _MAX_BYTES:
        raise ConfigError(
            f"`{path}` has {path.stat().st_size} bytes and scales need fewer than {_MAX_BYTES}; "
            "pass the file of the scales, not of the weights"
        )
    try:
        return dict(safetensors.numpy.load_file(path))
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise ConfigError(
            f"`{path}` is no safetensors file of float32 tensors ({error}); make it again with "
            "`paged-trt calibrate MODEL.onnx -o FILE`"
        ) from error


def require_scales_for(path: Path, dtype: DType) -> None:
    """Refuse scales of another quantised type: both fit every check, and one type saturates.

    Args:
        path: a scales file that `read_scales_file` has read.
        dtype: type of the pool. A file that names none, as other tools write it, fits.

    Raises:
        ConfigError: the file says that its scales are for another type.
    """
    import safetensors

    with safetensors.safe_open(path, framework="numpy") as file:
        named = (file.metadata() or {}).get(DTYPE_ENTRY)
    if named in {each.value for each in KV_CACHE_DTYPES - {dtype}}:
        raise ConfigError(
            f"`{path}` holds scales of a {named} KV cache and this one is {dtype.value}; pass "
            f"`--kv-cache-dtype {named}`, or make others with `paged-trt calibrate MODEL.onnx -o "
            f"FILE --kv-cache-dtype {dtype.value}`"
        )


def write_scales_file(
    path: Path, scales: Mapping[str, npt.NDArray[np.float32]], *, metadata: Mapping[str, str]
) -> None:
    """Write a scales file beside its place, then rename it: a reader never sees half of it.

    Args:
        path: the file; one that is there is replaced.
        scales: `kv_scales.{i}` -> `[2, num_kv_heads]` float32.
        metadata: what they were made from, for people; `DTYPE_ENTRY` is checked by builds.

    Raises:
        OSError: the file cannot be written.
    """
    import safetensors.numpy

    data = safetensors.numpy.save(dict(scales), metadata=dict(metadata))
    write_bytes(path, data)


def require_scales(
    tensors: Mapping[str, Array], layers: Sequence[AttentionSpec], *, where: str
) -> dict[str, npt.NDArray[np.float32]]:
    """The scales of all layers, `[2, num_kv_heads]` float32 each: key row, value row.

    Args:
        tensors: `kv_scales.{i}` -> scales of layer i.
        layers: attention of each layer.
        where: what holds the tensors, for messages.

    Raises:
        ConfigError: a tensor is missing, unknown, misshapen, of another type, or not positive
            and finite.
    """
    names = [kv_scales_name(index) for index in range(len(layers))]
    missing = [name for name in names if name not in tensors]
    unknown = sorted(tensors.keys() - set(names))
    if missing or unknown:
        raise ConfigError(
            f"{where} must hold {len(names)} tensors, {names[0]} to {names[-1]}; missing "
            f"{missing[:3]}, unknown {unknown[:3]}; write one tensor per attention layer"
        )
    for name, layer in zip(names, layers, strict=True):
        _check(name, tensors[name], layer, where)
    return {name: np.ascontiguousarray(tensors[name], np.float32) for name in names}


def _check(name: str, scales: Array, layer: AttentionSpec, where: str) -> None:
    expected = (2, layer.num_kv_heads)
    if scales.dtype != np.float32 or scales.shape != expected:
        raise ConfigError(
            f"`{name}` in {where} must be float32 {list(expected)}, found {scales.dtype} "
            f"{list(scales.shape)}; write one key row and one value row of all KV heads"
        )
    is_usable = np.isfinite(scales) & (scales > 0)
    if not is_usable.all():
        raise ConfigError(
            f"`{name}` in {where} holds {float(scales[~is_usable][0])}, and scales must be "
            "positive and finite; calibrate them again"
        )
