"""Opens an engine directory: manifest first, hashes next, only then what they cover."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load

from paged_trt.plugins.errors import ConfigError, ManifestError, UnsupportedError
from paged_trt.plugins.hops import check_hops
from paged_trt.plugins.manifest import (
    KV_SCALES_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    EngineManifest,
    check_files,
    read_checked,
    read_manifest,
)
from paged_trt.runtime.executor import PIPELINES_BY_DEFAULT, Executor
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor
from paged_trt.runtime.tensorrt_loader import open_engine

EXECUTORS: Final = ("auto", "tensorrt", "reference")
"""Values of `--executor`."""
_LOG: Final = logging.getLogger("paged_trt")


def load_engine(
    directory: Path | str,
    executor: str = "auto",
    *,
    device: int = 0,
    pipelines: bool = PIPELINES_BY_DEFAULT,
) -> Executor:
    """Open an engine directory.

    Args:
        directory: what `paged-trt build` wrote.
        executor: `tensorrt` runs the plan, `reference` runs `model.onnx` on a CPU, `auto`
            takes the first that can run; a fall back to the reference is one of the
            executor's notes.
        device: number of the CUDA device that runs the plan.
        pipelines: load what decode steps need to overlap on a GPU; `EngineCore` makes use of it.

    Raises:
        ConfigError: there is no executor of that name.
        ManifestError: the manifest or a file that it describes is missing or another one;
            no other file was interpreted.
        SpecMismatchError: the manifest or the model disagrees with its spec.
        UnsupportedError: the executor cannot run here, or the directory has no model for it.
        KernelError: a kernel did not compile or load.
        ExecutionError: the device has too little memory, or TensorRT refused.
    """
    if executor not in EXECUTORS:
        raise ConfigError(f"`{executor}` is no executor; choose one of {', '.join(EXECUTORS)}")
    folder = Path(directory)
    manifest = _checked_manifest(folder)
    if executor == "reference":
        return _load_reference(folder, manifest, notes=())
    scales = _scales(folder, manifest)
    try:
        return open_engine(folder, manifest, kv_scales=scales, ordinal=device, pipelines=pipelines)
    except UnsupportedError as error:
        if executor == "tensorrt":
            # Behind the last lines of a log it stands on a line of its own.
            end = "\n" if "\n" in str(error) else "; "
            message = f"{error}{end}or pass `--executor reference` to run the model on the CPU"
            refused = type(error)(message)
            refused.code = error.code
            raise refused from error
        note = f"the reference executor runs the model on the CPU, for TensorRT cannot: {error}"
    _LOG.info("%s", note)
    return _load_reference(folder, manifest, notes=(note,))


def open_plan(
    directory: Path | str,
    *,
    device: int = 0,
    uses_graphs: bool = True,
    pipelines: bool = PIPELINES_BY_DEFAULT,
) -> TensorRtExecutor:
    """The TensorRT executor of an engine directory, for those who need more of it than `step`.

    Args:
        directory: what `paged-trt build` wrote.
        device: number of the CUDA device.
        uses_graphs: replay decode steps as CUDA graphs.
        pipelines: as of `load_engine`.

    Raises:
        PagedTrtError: as `load_engine` with `tensorrt`.
    """
    folder = Path(directory)
    manifest = _checked_manifest(folder)
    scales = _scales(folder, manifest)
    return open_engine(
        folder,
        manifest,
        kv_scales=scales,
        ordinal=device,
        uses_graphs=uses_graphs,
        pipelines=pipelines,
    )


def open_reference(directory: Path | str, *, keeps_layers: bool = False) -> ReferenceExecutor:
    """The reference executor of an engine directory, for those who need more than `step`.

    Args:
        directory: what `paged-trt build` wrote.
        keeps_layers: keep the attention output of each layer after a step.

    Raises:
        PagedTrtError: as `load_engine` with `reference`.
    """
    folder = Path(directory)
    manifest = _checked_manifest(folder)
    return _load_reference(folder, manifest, notes=(), keeps_layers=keeps_layers)


def _checked_manifest(folder: Path) -> EngineManifest:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    check_hops(folder, manifest)
    return manifest


def _load_reference(
    folder: Path,
    manifest: EngineManifest,
    *,
    notes: tuple[str, ...],
    keeps_layers: bool = False,
) -> ReferenceExecutor:
    if MODEL_FILE not in manifest.files:
        raise UnsupportedError(
            f"{folder / MANIFEST_FILE} lists no {MODEL_FILE}, which the reference executor "
            "runs; rebuild without `--no-reference`"
        )
    spec = manifest.spec
    scales = _scales(folder, manifest)
    return ReferenceExecutor(
        folder / MODEL_FILE, spec, kv_scales=scales, notes=notes, keeps_layers=keeps_layers
    )


def _scales(folder: Path, manifest: EngineManifest) -> dict[str, npt.NDArray[Any]]:
    return _load_scales(folder, manifest) if manifest.spec.kv_cache_dtype.is_quantised else {}


def _load_scales(folder: Path, manifest: EngineManifest) -> dict[str, npt.NDArray[Any]]:
    if KV_SCALES_FILE not in manifest.files:
        raise ManifestError(
            f"{folder / MANIFEST_FILE} lists no {KV_SCALES_FILE}, which a "
            f"{manifest.spec.kv_cache_dtype.value} KV cache needs; rebuild the engine"
        )
    data = read_checked(folder, KV_SCALES_FILE, manifest.files[KV_SCALES_FILE])
    try:
        loaded: dict[str, npt.NDArray[np.float32]] = load(data)
    except (SafetensorError, ValueError) as error:
        raise ManifestError(
            f"{folder / KV_SCALES_FILE} is no safetensors file ({error}); rebuild the engine"
        ) from error
    return loaded
