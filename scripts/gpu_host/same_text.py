"""Runs `paged-trt run` on both executors and compares what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

from paged_trt.plugins.manifest import read_manifest
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.gpu_host.host_results import (
    results_path,
    tensorrt_in_use,
    write_results,
)
from paged_trt.scripts.gpu_host.kit import ROOT
from paged_trt.scripts.prompts import open_tokenizer

TEXTS: Final = (
    "What is the capital of France?",
    "Which planet is called the red planet, and why is it red?",
    "Write one short sentence about the sea.",
)
IDS: Final = ("1,2,3", "5,6,7,8,9,10,11", "3")
"""Prompts of a model without a tokenizer."""


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--label", default="")
@click.option("--on-cpu", is_flag=True, help="The reference executor twice.")
@click.option("--device", type=int, default=0)
@click.option("--commit", "tree")
def main(
    *,
    engine_dir: Path,
    output: Path,
    label: str,
    on_cpu: bool,
    device: int,
    tree: str | None,
) -> None:
    """Exit 1 where executors differ in exit code or tokens.

    Where two logits are equal, both tokens are right: `paged-trt compare` knows such ties.
    """
    tokenizer = open_tokenizer(engine_dir)
    if tokenizer is None:
        prompts = [word for ids in IDS for word in ("--input-ids", ids)]
    else:
        chat = ["--chat"] if tokenizer.chat_template else []
        prompts = [*chat, *(word for text in TEXTS for word in ("--prompt", text))]
    first = "reference" if on_cpu else "tensorrt"
    row: dict[str, Any] = {"model": read_manifest(engine_dir).source.name, "prompts": prompts}
    runs = [
        _run(engine_dir, [*prompts, "--executor", executor, "--device", str(device)])
        for executor in (first, "reference")
    ]
    row |= {
        "executors": [first, "reference"],
        "exit_codes": [run["exit_code"] for run in runs],
        "sequences": [run["sequences"] for run in runs],
        "errors": [run["error"] for run in runs],
    }
    row["same_exit_code"] = row["exit_codes"][0] == row["exit_codes"][1] == 0
    row["same_tokens"] = _tokens(runs[0]) == _tokens(runs[1])
    write_results(
        results_path(output, "run", device=device, label=label),
        "run",
        [row],
        tensorrt=tensorrt_in_use(),
        device=device,
        tree=tree,
    )
    click.echo(json.dumps(row, indent=2))
    sys.exit(0 if row["same_exit_code"] and row["same_tokens"] else 1)


def _tokens(run: dict[str, Any]) -> list[Any]:
    return [sequence["tokens"] for sequence in run["sequences"]]


def _run(engine_dir: Path, words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "paged_trt.scripts.cli", "run", str(engine_dir), "--json"]
    done = subprocess.run(  # noqa: S603 - our own words
        [*command, "--max-new-tokens", "32", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    sequences = [] if done.returncode else json.loads(done.stdout)["sequences"]
    return {
        "exit_code": done.returncode,
        "sequences": sequences,
        "error": done.stderr[-2000:] if done.returncode else "",
    }


if __name__ == "__main__":
    end(main)
