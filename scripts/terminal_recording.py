"""Records `scripts/figures/terminal.svg`: real commands on the toy model, as a terminal shows them.

Needs TensorRT and the extra `compare`. A test holds that it shows every hop of the page count, and
its own commands.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.text import Text

from paged_trt.plugins.errors import BuildError
from paged_trt.plugins.files import write_text
from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.results import ROOT

RECORDING: Final = ROOT / "scripts" / "figures" / "terminal.svg"
WIDTH: Final = 84
COMMANDS: Final = (
    "paged-trt build model.onnx -o engine --max-batch-size 4 --max-input-len 256 "
    "--max-kv-cache-capacity 512",
    "paged-trt inspect engine | tail -n 13",
    "paged-trt compare model.onnx engine --executor reference --prompt-lens 127,129",
    "paged-trt build model.onnx -o smaller --max-batch-size 4 --max-input-len 256 "
    "--max-kv-cache-capacity 512 --kv-pool-pages 12",
)
_FONT_LINK: Final = re.compile(r"\s*@font-face \{.*?\n    \}", re.DOTALL)
_MODULE: Final = "paged_trt.scripts.cli"


def record(folder: Path) -> Console:
    """Run the commands in a folder and keep what a terminal shows.

    Raises:
        BuildError: the first command failed, which builds the engine.
    """
    write_toy(folder, Dialect.ATTENTION23_PAST)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for index, command in enumerate(COMMANDS):
        words = command.replace("paged-trt", f"{shlex.quote(sys.executable)} -m {_MODULE}", 1)
        done = subprocess.run(  # noqa: S602 - our own words
            words,
            shell=True,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "PAGED_TRT_LOG": "ERROR"},
        )
        if index == 0 and done.returncode:
            raise BuildError(f"the recording cannot be made: {done.stdout}")
        console.print(Text(f"$ {command}", style="bold cyan"), soft_wrap=False)
        console.print(Text.from_ansi(done.stdout.rstrip()), soft_wrap=False)
        console.print()
    return console


def write_recording(path: Path) -> None:
    """Record, and write the terminal as SVG without links to other sites."""
    with tempfile.TemporaryDirectory(prefix="paged-trt-") as folder:
        console = record(Path(folder))
    svg = console.export_svg(title="paged-trt, on a machine without a GPU", unique_id="paged-trt")
    write_text(path, _FONT_LINK.sub("", svg))


@click.command()
def main() -> None:
    """Record the terminal; needs a checkout (`pip install -e .`).

    \b
    Example:
      python -m paged_trt.scripts.terminal_recording
    """
    if not RECORDING.parent.is_dir():
        raise click.ClickException(f"there is no {RECORDING.parent}; run this in a checkout")
    write_recording(RECORDING)


if __name__ == "__main__":
    end(run_command(main))
