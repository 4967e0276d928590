"""What to say of a path that is not what a command wants: models and engines are easily swapped."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

MANIFEST_NAME: Final = "manifest.json"
MODEL_SUFFIX: Final = ".onnx"


def not_a_model(path: Path) -> str:
    """Why `path`, which is no file, is no ONNX model, and what to pass instead."""
    if (path / MANIFEST_NAME).is_file():
        return (
            f"`{path}` is an engine directory, built already: use it with `paged-trt inspect "
            f"{path}` or `paged-trt run {path}`, or pass the `.onnx` file that it was built from"
        )
    inside = sorted(path.glob(f"*{MODEL_SUFFIX}")) if path.is_dir() else []
    if inside:
        return f"`{path}` is a folder; did you mean `{inside[0]}`?"
    close = _close(path, [each.name for each in _siblings(path) if each.suffix == MODEL_SUFFIX])
    hint = f"did you mean `{close}`?" if close else "pass the path of a `.onnx` file"
    return f"there is no ONNX file at `{path}`; {hint}"


def missing_data(path: Path) -> str:
    """What to do where `path`, the data file that a model names, is missing."""
    others = [each.name for each in _siblings(path) if each.suffix != MODEL_SUFFIX]
    close = _close(path, others)
    if close is None:
        return "copy the data file beside the model"
    return (
        f"copy the data file beside the model; if `{close.name}` is that file, give it back the "
        f"name `{path.name}`, by which the model knows it"
    )


def not_an_engine(path: Path) -> str:
    """Why `path` is no engine directory, and what to do."""
    build = "`paged-trt build MODEL.onnx -o ENGINE_DIR`"
    if path.is_file():
        if path.suffix == MODEL_SUFFIX:
            return (
                f"{path} is an ONNX model, and an engine directory is wanted: make one with "
                f"`paged-trt build {path} -o ENGINE_DIR`"
            )
        return f"{path} is a file, and an engine directory is wanted: make one with {build}"
    close = _close(
        path, [each.name for each in _siblings(path) if (each / MANIFEST_NAME).is_file()]
    )
    hint = f"did you mean `{close}`?" if close else f"make one with {build}"
    return f"{path / MANIFEST_NAME} does not exist: {path} is no engine directory; {hint}"


def _siblings(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.absolute().parent.iterdir() if each.name != path.name)
    except OSError:
        return []


def _close(path: Path, names: list[str]) -> Path | None:
    found = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / found[0] if found else None
