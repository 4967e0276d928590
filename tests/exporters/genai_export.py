"""Exports a model with the model builder of onnxruntime-genai, through its command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from zoo import VOCAB

_SPECIAL = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
"""Special tokens in the order of their ids."""


def export_genai(
    model: Any, path: Path, *, provider: str, precision: str, options: dict[str, str]
) -> None:
    """Write `path`, and its weights beside it.

    Args:
        model: a causal language model of transformers.
        path: where the ONNX file is to be, named `model.onnx`.
        provider: `-e` of the builder.
        precision: `-p` of the builder.
        options: its `--extra_options`.

    Raises:
        RuntimeError: the builder failed; the message ends with its last lines.
    """
    source = save_source(model, path.parent)
    command = [
        *(sys.executable, "-m", "onnxruntime_genai.models.builder"),
        *("-i", str(source), "-o", str(path.parent), "-p", precision, "-e", provider),
        *("-c", str(path.parent / "builder-cache")),
    ]
    if options:
        command += ["--extra_options", *(f"{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not path.is_file():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")


def save_source(model: Any, folder: Path) -> Path:
    """Write the model as transformers does, with a tokenizer; returns its folder."""
    source = folder / "source"
    model.save_pretrained(source)
    _tokenizer().save_pretrained(source)
    return source


def _tokenizer() -> Any:
    """A tokenizer that the builder can copy; nothing here reads text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(_SPECIAL.values())}
    words |= {f"t{index}": index for index in range(len(words), VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)),
        **{f"{name}_token": word for name, word in _SPECIAL.items()},
    )
