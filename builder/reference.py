"""The rewritten model alone: what the reference executor runs, without TensorRT and a manifest."""

from __future__ import annotations

from pathlib import Path

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.tensors import EngineSpec


def write_reference(model: Path, config: BuildConfig, folder: Path) -> tuple[Path, EngineSpec]:
    """Rewrite a model into a folder.

    Args:
        model: the source model.
        config: limits and types; the scales of a quantised pool are named, not read.
        folder: where `model.onnx` and its data go.

    Returns:
        The rewritten file and its interface.

    Raises:
        ConfigError: the limits do not fit the model.
        OnnxRewriteError: the model cannot be rewritten.
    """
    loaded = load_model(model)
    facts = survey(loaded)
    spec = resolve(config, facts)
    rewrite(loaded, facts=facts, spec=spec)
    return save_model(loaded, folder), spec
