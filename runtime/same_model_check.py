"""What is opened to compare an engine with its own model, and what cannot be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from paged_trt.plugins.manifest import MANIFEST_FILE, MODEL_FILE, read_manifest
from paged_trt.plugins.tensors import Role
from paged_trt.runtime.engine import open_reference
from paged_trt.runtime.logical_kv import PagedExecutor
from paged_trt.runtime.recorded_steps import record_steps
from paged_trt.runtime.same_model import compare_steps
from paged_trt.runtime.same_model_report import SameModelReport
from paged_trt.runtime.scenarios import Scenario

NO_ATTENTION: Final = (
    "attention outputs of the layers: the engine does not give them; keys and values of the next "
    "layer are computed from them, and logits after the last, and those were compared; build with "
    "`--layer-outputs` to have each layer's own, or pass `--executor reference`"
)


def reference_folder(model: Path, directory: Path) -> Path:
    """Engine directory whose model an engine is compared with: its own, or that of `model`.

    Args:
        model: counts where it is the model of another engine directory with the same tensors,
            so that an engine can be held against one that is known to be right.
        directory: of the engine.
    """
    if model.name != MODEL_FILE or not (model.parent / MANIFEST_FILE).is_file():
        return directory
    # The reference gives attention outputs, whether or not its engine does.
    engine, other = (
        [tensor for tensor in read_manifest(folder).tensors if tensor.role is not Role.LAYER_OUTPUT]
        for folder in (directory, model.parent)
    )
    return model.parent if engine == other else directory


def why_not(model: Path, directory: Path) -> str | None:
    """What keeps an engine from being compared with its own model; None where nothing does."""
    folder = reference_folder(model, directory)
    if MODEL_FILE in read_manifest(folder).files:
        return None
    return f"the same model: {folder} has no {MODEL_FILE}; build without `--no-reference`"


def check_same_model(
    executor: PagedExecutor,
    directory: Path,
    scenarios: Sequence[Scenario],
    *,
    model: Path,
    seed: int,
    layers: bool,
) -> SameModelReport:
    """Run the steps of all scenarios on an engine and on its model, and compare what they compute.

    Args:
        executor: of the engine; its pools are overwritten.
        directory: of the engine.
        scenarios: what to run; next tokens are random.
        model: as in `reference_folder`.
        seed: of the tokens and the page orders.
        layers: also compare attention outputs, where both executors have them.

    Raises:
        ExecutionError: a step failed.
        PagedTrtError: the reference does not open.
    """
    with contextlib.ExitStack() as stack:

        def reference(folder: Path) -> PagedExecutor:
            opened = open_reference(folder, keeps_layers=layers)
            stack.callback(opened.close)
            return opened

        is_reference, has_outputs = executor.name == "reference", executor.spec.layer_outputs
        folder = reference_folder(model, directory)
        return compare_steps(
            reference(directory) if layers and is_reference else executor,
            reference(folder),
            [
                step
                for scenario in scenarios
                for step in record_steps(executor.spec, scenario, seed=seed)
            ],
            seed=seed + 1,
            name=str(folder / MODEL_FILE),
            missing=(NO_ATTENTION,) if layers and not (is_reference or has_outputs) else (),
        )
