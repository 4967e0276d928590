"""`paged-trt build --check`: the model against its rewrite, right after the build."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.compare import CompareOptions, compare_engine
from paged_trt.runtime.decoders import open_decoder
from paged_trt.scripts.compare_table import show

_NEW_TOKENS: Final = 8


def require_checkable(model: Path, *, reference: bool, dry_run: bool) -> None:
    """Refuse a check that could not be made, before anything is built.

    Args:
        model: the model of the build.
        reference: whether the engine directory keeps the rewritten model.
        dry_run: whether there is no engine directory at all.

    Raises:
        ConfigError: two options exclude each other; UnsupportedError where onnxruntime is
            missing or cannot run the model.
    """
    for option, is_given in (("--dry-run", dry_run), ("--no-reference", not reference)):
        if is_given:
            raise ConfigError(
                f"`--check` runs the rewritten model of the engine directory, and `{option}` "
                "leaves none; pass one of the two"
            )
    open_decoder(model)


def check_build(model: Path, engine_dir: Path, console: Console) -> bool:
    """Decode ragged prompts around whole pages with both in onnxruntime, and show the result.

    Args:
        model: the un-rewritten model.
        engine_dir: the engine directory that was built from it.
        console: where the table goes.

    Returns:
        Whether they agree.

    Raises:
        PagedTrtError: one of them does not run.
    """
    options = CompareOptions(executor="reference", num_new_tokens=_NEW_TOKENS)
    report = compare_engine(model, engine_dir, options)
    show(report, console)
    return report.passed
