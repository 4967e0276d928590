"""Exports a model with optimum-onnx, whose transformers is an older one than ours."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from genai_export import save_source


def export_optimum(model: Any, path: Path, *, python: str) -> None:
    """Write `path`.

    Args:
        model: a causal language model of transformers.
        path: where the ONNX file is to be, named `model.onnx`.
        python: interpreter of an environment that has optimum-onnx.

    Raises:
        RuntimeError: the exporter failed; the message ends with its last line.
    """
    source = save_source(model, path.parent)
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "onnx"]
    command += ["--task", "text-generation-with-past", "--model", str(source), str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not path.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
