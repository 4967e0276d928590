"""Runs GPU tests with pytest and keeps what came of them: counts, failures, what was compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from paged_trt.plugins.files import write_text
from paged_trt.scripts.gpu_host import pytest_command
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.gpu_host.host_results import results_path, tensorrt_in_use, write_results
from paged_trt.scripts.gpu_host.kit import ROOT

END_SECONDS: Final = 12
"""How long pytest may take to write its report when it is interrupted."""
TEST_SECONDS: Final = 120.0
"""After so long a test's process ends: a kernel that never does would else hold up all the others,
and no signal reaches a process that waits for it. The slowest test takes a third of this."""
_MESSAGE_CHARACTERS: Final = 1500
OUTCOMES: Final = ("passed", "failed", "skipped")


@click.command()
@click.argument("words", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--name", required=True, help="Name of this run of pytest in the results.")
@click.option("--parallel", type=int, default=1, help="Processes of pytest-xdist.")
@click.option("--device", type=int, default=0)
@click.option("--commit", "tree")
@click.option("--no-gpu", is_flag=True, help="Skip what needs a GPU instead of failing.")
def main(
    *,
    words: tuple[str, ...],
    output: Path,
    name: str,
    parallel: int,
    device: int,
    tree: str | None,
    no_gpu: bool,
) -> None:
    """Run pytest with WORDS; the results file of all runs so far is written anew.

    An interrupt ends pytest, and what it did by then is kept.
    """
    kept = output.resolve() / "tests"
    kept.mkdir(parents=True, exist_ok=True)
    report = kept / f"{name}.xml"
    report.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        matrix = Path(folder) / "matrix.json"
        options = [] if no_gpu else ["--require-gpu"]
        # One worker too: where it crashes, the others' results and the test's name are kept.
        options += ["-n", str(parallel)]
        options += [f"--junitxml={report}", f"--gpu-matrix={matrix}", "--durations=12"]
        code = run_pytest([*options, *words])
        compared = json.loads(matrix.read_text(encoding="utf-8")) if matrix.exists() else []
    rows = rows_of(report, name, code) or [_nothing(name, code)]
    write_text(kept / f"{name}.json", json.dumps({"tests": rows, "matrix": compared}))
    runs = [json.loads(path.read_text()) for path in sorted(kept.glob("*.json"))]
    tests = [row for each in runs for row in each["tests"]]
    path = results_path(output, "gpu-tests", device=device)
    write_results(path, "gpu-tests", tests, tensorrt=tensorrt_in_use(), device=device, tree=tree)
    matrix_rows = [row for each in runs for row in each["matrix"]]
    if matrix_rows:
        path = results_path(output, "gpu-matrix", device=device)
        write_results(path, "gpu-matrix", matrix_rows, device=device, tree=tree)
    for row in rows:
        click.echo(", ".join(f"{key} {row[key]}" for key in ("file", *OUTCOMES, "seconds")))
        for failure in row["failures"]:
            click.echo(f"FAILED {failure['id']}")
    sys.exit(1 if code else 0)


def run_pytest(words: Sequence[str], *, test_seconds: float = TEST_SECONDS) -> int:
    """Exit code of pytest; an interrupt of this process is passed on once.

    Args:
        words: for pytest.
        test_seconds: after so long a test has failed, and pytest-xdist begins another process.
    """
    limit = {"faulthandler_timeout": test_seconds, "faulthandler_exit_on_timeout": True}
    options = [word for name, value in limit.items() for word in ("-o", f"{name}={value}")]
    command = [*pytest_command.COMMAND, "-v", *options, *words]
    with subprocess.Popen(  # noqa: S603 - our own words
        command, cwd=ROOT, env=pytest_command.environment()
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            try:
                return process.wait(END_SECONDS) or 2
            except subprocess.TimeoutExpired:
                process.kill()
                return 2


def rows_of(report: Path, name: str, code: int) -> list[dict[str, Any]]:
    """Counts of each test file, with the text of failures and the reasons of skips.

    Args:
        report: what pytest wrote as `--junitxml`; where it is missing there are no rows.
        name: of the run of pytest.
        code: exit code of pytest.
    """
    if not report.exists():
        return []
    files: dict[str, dict[str, Any]] = {}
    # Written by the pytest that this process started.
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314
        file = case.get("classname", "").replace(".", "/") + ".py"
        row = files.setdefault(file, {**_nothing(name, code), "file": file})
        failed = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        outcome = "passed" if failed is None else "failed"
        if failed is not None:
            text = f"{failed.get('message', '')}\n{failed.text or ''}"
            row["failures"].append(
                {"id": f"{file}::{case.get('name')}", "text": text[-_MESSAGE_CHARACTERS:]}
            )
        elif skipped is not None:
            outcome = "skipped"
            reason = skipped.get("message", "")
            row["skips"][reason] = row["skips"].get(reason, 0) + 1
        row[outcome] += 1
        row["seconds"] = round(row["seconds"] + float(case.get("time", 0)), 2)
    return list(files.values())


def _nothing(name: str, code: int) -> dict[str, Any]:
    return {
        "run": name,
        "file": "",
        **dict.fromkeys(OUTCOMES, 0),
        "seconds": 0.0,
        "exit_code": code,
        "failures": [],
        "skips": {},
    }


if __name__ == "__main__":
    end(main)
