"""What `polygraphy run` needs to check an engine: a model for `--onnxrt` and its data loader."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.plugins.manifest import MODEL_FILE
from paged_trt.plugins.tensors import LOGITS, PAGE_TABLE
from paged_trt.runtime.dense import open_session
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.polygraphy_steps import HISTORY_OFFSETS, load_steps
from paged_trt.runtime.recompute_model import write_recompute_model
from paged_trt.runtime.same_model_tolerance import SameModelTolerance, same_model_tolerance

LOADER_FILE: Final = "load_data.py"
_LOADER: Final = '''\
"""Steps for `polygraphy run --data-loader-script`, written by `paged-trt polygraphy`."""

from paged_trt.runtime.polygraphy_steps import HISTORY_OFFSETS, load_steps

ENGINE_DIR = {engine_dir!r}
"""Only its manifest is read."""


def load_data():
    """Prompts around whole pages, prefilled and decoded in ragged batches on shuffled pages."""
    return load_steps(
        ENGINE_DIR, prompt_lens={prompt_lens!r}, num_new_tokens={num_new_tokens}, seed={seed}
    )
'''


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolygraphyFiles:
    """What was written.

    Attributes:
        model: for `--onnxrt`.
        loader: for `--data-loader-script`.
        num_steps: iterations that the loader gives.
        options: tolerances of Polygraphy's comparison, as words of its command line.
    """

    model: Path
    loader: Path
    num_steps: int
    options: tuple[str, ...]


def write_polygraphy_files(
    engine_dir: Path,
    target: Path,
    *,
    prompt_lens: Sequence[int] | None = None,
    num_new_tokens: int = 3,
    seed: int = 0,
) -> PolygraphyFiles:
    """Write `model.onnx` with its weights and `load_data.py` into a new folder.

    Args:
        engine_dir: what `paged-trt build` wrote, with its reference model.
        target: the folder; it must not exist.
        prompt_lens: as in `load_steps`.
        num_new_tokens: as in `load_steps`.
        seed: as in `load_steps`.

    Raises:
        ConfigError: `target` exists, or its parent does not; UnsupportedError where the engine
            directory has no reference model or onnxruntime is missing.
        ManifestError: the engine directory is not what it claims.
        SequenceError: a prompt does not fit the engine.
    """
    if target.exists() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} must be the name of a new folder in one that exists")
    loader = _LOADER.format(
        engine_dir=str(engine_dir.resolve()),
        prompt_lens=None if prompt_lens is None else tuple(prompt_lens),
        num_new_tokens=num_new_tokens,
        seed=seed,
    )
    steps = list(
        load_steps(engine_dir, prompt_lens=prompt_lens, num_new_tokens=num_new_tokens, seed=seed)
    )
    executor: Any = load_engine(engine_dir, "reference")
    spec, scales = executor.spec, executor.kv_scales
    executor.close()
    prefix = f".{target.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.absolute().parent) as folder:
        staged = Path(folder, target.name)
        staged.mkdir()
        model = write_recompute_model(engine_dir, staged, spec=spec, kv_scales=scales)
        options = _tolerance_options(
            model,
            max(steps, key=_fill),
            same_model_tolerance(spec),
            is_quantised=spec.kv_cache_dtype.is_quantised,
        )
        (staged / LOADER_FILE).write_text(loader, encoding="utf-8")
        staged.rename(target)
    return PolygraphyFiles(
        model=target / MODEL_FILE,
        loader=target / LOADER_FILE,
        num_steps=len(steps),
        options=options,
    )


def _fill(step: dict[str, Any]) -> float:
    """How full the pages of a step are: means count positions behind the last token too."""
    return float(step[HISTORY_OFFSETS][-1] / step[PAGE_TABLE].size)


def _tolerance_options(
    model: Path, step: dict[str, Any], tolerance: SameModelTolerance, *, is_quantised: bool
) -> tuple[str, ...]:
    """Absolute tolerances from what the model gives in one step: Polygraphy has no others.

    Polygraphy's relative tolerance is that of each element, and elements near 0 differ by any
    factor.
    """
    session = open_session(model)
    names = [each.name for each in session.get_outputs()]
    feeds = {each.name: step[each.name] for each in session.get_inputs()}
    outputs = dict(zip(names, session.run(names, feeds), strict=True))
    # A token that was lost hardly changes a mean, but quantised numbers differ by whole steps.
    stat, measure = ("mean", np.mean) if is_quantised else ("max", np.max)
    bounds = {
        name: tolerance.limit(name)
        * float((np.max if name == LOGITS else measure)(np.abs(array.astype(np.float32))))
        for name, array in outputs.items()
    }
    if not np.isfinite(list(bounds.values())).all():
        raise UnsupportedError(f"{model} gives numbers that are not finite in its first step")
    return (
        *("--check-error-stat", stat, f"{LOGITS}:max", "--rtol", "0", "--atol"),
        *(f"{name}:{bound:.3g}" for name, bound in bounds.items()),
    )
