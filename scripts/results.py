"""Results files: what a run measured, where and how; the README's tables are made from them."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any, Literal

import pydantic

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import write_text

ROOT = Path(__file__).resolve().parents[1]


class Results(pydantic.BaseModel):
    """One results file.

    Attributes:
        schema_version: of this record; written as `schema`.
        kind: what was measured.
        commit: of the tree that ran, `-dirty` behind it where it had changes.
        date: day of the run, ISO 8601.
        gpu: name of the device, or `none` and the CPU.
        driver: version of the driver, or `none`.
        cuda: version of CUDA that the kernels were compiled with, or `none`.
        tensorrt: flavour and version.
        method: how numbers were taken.
        ceilings: measured limits of the machine.
        peers: other implementations of the same run, with their versions.
        rows: measurements; their keys depend on `kind`.
    """

    model_config = pydantic.ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[1] = pydantic.Field(default=1, alias="schema")
    kind: Literal[
        "decode",
        "prefill",
        "append",
        "engine",
        "serve",
        "host",
        "e2e",
        "gpu-matrix",
        "gpu-tests",
        "polygraphy",
        "profile",
        "racecheck-orders",
        "rewrite",
        "run",
        "sanitizer",
    ]
    commit: str
    date: datetime.date
    gpu: str
    driver: str
    cuda: str
    tensorrt: str
    method: str
    ceilings: dict[str, float] = {}
    peers: dict[str, str] = {}
    rows: list[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Write the results as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        data = self.model_dump(mode="json", by_alias=True)
        write_text(path, json.dumps(data, indent=1) + "\n")


def read_results(path: Path) -> Results:
    """Read and check a results file.

    Raises:
        ConfigError: it is no results file.
    """
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, pydantic.ValidationError) as error:
        raise ConfigError(f"{path} is no results file: {error}") from error


def commit() -> str:
    """Commit of this checkout, `-dirty` behind it with changes, or `unknown` outside one."""
    # An installed package may lie in an environment inside some other repository.
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return "unknown"
    return _git("describe", "--always", "--abbrev=12", "--dirty") or "unknown"


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
