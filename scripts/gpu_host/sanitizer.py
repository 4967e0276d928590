"""Runs GPU tests under compute-sanitizer: what engines launch by default, in small steps.

Not among them is `take_tokens`, which hands tokens on between overlapping steps.

The time goes into starting processes and into patching each kernel when it is loaded, so the tests
are split into groups, and all groups run under all tools side by side.
"""

from __future__ import annotations

import concurrent.futures
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from paged_trt.scripts.gpu_host import pytest_command
from paged_trt.scripts.gpu_host.ending import end, kill_group
from paged_trt.scripts.gpu_host.host_results import results_path, tensorrt_in_use, write_results
from paged_trt.scripts.gpu_host.kit import ROOT
from paged_trt.scripts.gpu_host.race_reports import races

TOOLS: Final = ("memcheck", "racecheck")
_DECODE: Final = "tests/gpu/test_decode.py::"
_PREFILL: Final = "tests/gpu/test_prefill.py::"
_HOPPER: Final = "tests/gpu/test_prefill_sm90.py::"
_GATHER: Final = "tests/gpu/test_prefill_gather.py::"
_SAMPLING: Final = "tests/gpu/test_sampling.py::"
SELECTION: Final[dict[str, tuple[str, ...]]] = {
    "decode-plans": (
        f"{_DECODE}test_every_plan_agrees_with_float64",
        f"{_DECODE}test_a_grid_of_too_few_partitions_loses_no_key",
        f"{_DECODE}test_positions_beyond_the_table_are_masked",
        f"{_DECODE}test_a_launch_that_was_aborted_does_not_spoil_the_next",
    ),
    "decode-pages": (
        *(f"{_DECODE}test_bad_page_ids_are_masked_and_never_read[True-{kv}]" for kv in (
            "float16", "bfloat16", "float8", "int8"
        )),
        f"{_DECODE}test_append_finds_sequences_among_many",
        *(f"{_DECODE}test_append_of_a_prefill_writes_the_same_bytes[{case}]" for case in (
            "bfloat16-float8-0", "float16-int8-1", "bfloat16-bfloat16-2"
        )),
    ),
    "decode-features": tuple(
        f"{_DECODE}test_decode_agrees_with_float64[activation={case}]" for case in (
            "bfloat16-kv=bfloat16-head_dim=64",
            "float16-kv=float8-head_dim=256",
            "bfloat16-kv=int8-head_dim=80-value_head_dim=80",
            "bfloat16-kv=bfloat16-head_dim=192-value_head_dim=128",
            "bfloat16-kv=float8-head_dim=16-value_head_dim=240",
            "bfloat16-kv=bfloat16-head_dim=64-group=33-has_sinks=True",
            "bfloat16-kv=int8-head_dim=64-group=3-has_sinks=True",
            "bfloat16-kv=bfloat16-head_dim=128-window=700-has_sinks=True",
            "bfloat16-kv=float8-head_dim=128-softcap=5.0",
            "float16-kv=float16-head_dim=64-rope=2",
            "float16-kv=int8-head_dim=96-num_kv_heads=3-group=3-window=300-softcap=20.0-rope=1"
            "-has_sinks=True",
            "bfloat16-kv=bfloat16-head_dim=128-lengths=210-padding_rows=46",
        )
    ),
    "prefill": (
        *(f"{_PREFILL}test_prefill_agrees_with_float64[{case}]" for case in (
            "mixed-activation=float16-kv=float16-head_dim=128",
            "mixed-activation=float16-kv=int8-head_dim=256",
            "mixed-activation=bfloat16-kv=float8-head_dim=16-value_head_dim=240",
            "mixed-activation=bfloat16-kv=int8-head_dim=64-group=7-has_sinks=True",
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128",
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128-window=100",
            "fresh-activation=float16-kv=int8-head_dim=96-num_kv_heads=3-group=3-window=300"
            "-softcap=20.0-rope=1-has_sinks=True",
            "chunked-activation=bfloat16-kv=float8-head_dim=128-group=1-rope=2-rotary_dim=32",
            "210-rows-activation=bfloat16-kv=bfloat16-head_dim=128-padding_rows=46",
        )),
        *(f"{_PREFILL}test_bad_page_ids_are_masked_and_never_read[True-{kv}]" for kv in (
            "float16", "float8"
        )),
        f"{_PREFILL}test_positions_beyond_the_table_are_masked",
        f"{_PREFILL}test_strided_queries",
    ),
    "prefill-hopper": (
        *(f"{_HOPPER}test_agrees_with_float64[{case}]" for case in (
            "fresh-activation=bfloat16-kv=bfloat16-head_dim=64",
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128",
            "mixed-activation=bfloat16-kv=bfloat16-head_dim=256",
            "mixed-activation=float16-kv=float16-head_dim=64",
            "chunked-activation=float16-kv=float16-head_dim=128",
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128-window=100",
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128-softcap=5.0",
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128-num_kv_heads=3-window=300"
            "-softcap=20.0-rope=1-has_sinks=True",
            "210-rows-activation=bfloat16-kv=bfloat16-head_dim=128-padding_rows=46",
        )),
        *(f"{_HOPPER}test_split_keys_agree_with_float64[{case}]" for case in (
            "chunked-activation=bfloat16-kv=bfloat16-head_dim=128-2",
            "mixed-activation=bfloat16-kv=bfloat16-head_dim=128-window=300-8",
        )),
        *(f"{_HOPPER}test_bad_page_ids_are_masked_and_never_read[{case}]" for case in (
            "128-True-1", "128-True-4", "256-False-1"
        )),
        f"{_HOPPER}test_pages_before_the_window_are_not_read[2]",
        f"{_HOPPER}test_positions_beyond_the_table_are_masked",
        f"{_HOPPER}test_strided_queries",
    ),
    "prefill-gathered": (
        f"{_GATHER}test_split_keys_agree_with_float64[chunked-activation=bfloat16-kv=float8"
        "-head_dim=128-1]",
        f"{_GATHER}test_split_keys_agree_with_float64[mixed-activation=bfloat16-kv=int8"
        "-head_dim=128-window=300-2]",
        f"{_GATHER}test_bad_page_ids_are_masked_and_never_read[128-False-1-float8]",
    ),
    "sampling": (
        *(f"{_SAMPLING}test_draws_of_the_twin[{case}]" for case in (
            "float32-1", "float16-1025", "bfloat16-32000"
        )),
        f"{_SAMPLING}test_ids_of_32_bits_and_rows_apart",
        f"{_SAMPLING}test_rows_without_a_largest_logit[float16]",
    ),
    "engine": ("tests/gpu/test_enqueue.py::test_pools_are_updated_where_they_are",),
}  # fmt: skip
"""Tests of each group. The engine's own kernels are TensorRT's; it shows the plugin's launches."""
_SUMMARY: Final = re.compile(
    r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", re.IGNORECASE
)
_REPORT_CHARACTERS: Final = 2000


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--tool", "tools", multiple=True, default=TOOLS, show_default=True)
@click.option("--test", "tests", multiple=True, help="Instead of the built-in groups.")
@click.option("--program", default="compute-sanitizer", show_default=True, help="Or its path.")
@click.option("--limit-s", type=float, default=150.0, show_default=True, help="For each process.")
@click.option("--jobs", type=int, default=14, show_default=True, help="Processes side by side.")
@click.option("--device", type=int, default=0)
@click.option("--commit", "tree")
def main(
    *,
    output: Path,
    tools: tuple[str, ...],
    tests: tuple[str, ...],
    program: str,
    limit_s: float,
    jobs: int,
    device: int,
    tree: str | None,
) -> None:
    """Run GPU tests under compute-sanitizer; exit 1 where it saw an error.

    The results file is written anew as each process ends.

    \b
    Example:
      python -m paged_trt.scripts.gpu_host.sanitizer -o results --tool memcheck
    """
    output.mkdir(parents=True, exist_ok=True)
    groups = {"given": tests} if tests else SELECTION
    path = results_path(output, "sanitizer", device=device)
    version, tensorrt = version_of(program), tensorrt_in_use()
    rows: list[dict[str, Any]] = []
    started: list[subprocess.Popen[str]] = []
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        work = [
            pool.submit(
                sanitized, (program, "--tool", tool), name, groups[name],
                limit_s=limit_s, started=started,
            )
            for name in groups
            for tool in tools
        ]  # fmt: skip
        for done in concurrent.futures.as_completed(work):
            rows.append({**done.result(), "version": version})
            write_results(
                path, "sanitizer", _sorted(rows), tensorrt=tensorrt, device=device, tree=tree
            )
            click.echo(line_of(rows[-1]))
    finally:
        for process in started:
            kill_group(process)
        pool.shutdown(cancel_futures=True)
    click.echo(f"{path}: {sum(map(is_clean, rows))} of {len(work)} runs are clean")
    sys.exit(0 if all(map(is_clean, rows)) else 1)


def is_clean(row: dict[str, Any]) -> bool:
    """Every test passed, every process ended with a summary, and none saw an error."""
    return bool(row["errors"] == row["unfinished"] == row["exit_code"] == 0 < row["processes"])


def line_of(row: dict[str, Any]) -> str:
    """A row for the log."""
    return (
        f"{row['tool']} {row['group']}: {'clean' if is_clean(row) else 'NOT CLEAN'}, "
        f"{row['errors']} errors, {len(row['covered'])} tests, {row['seconds']} s, {row['tests']}"
    )


def version_of(program: str) -> str:
    """Version of compute-sanitizer, as it says it: what racecheck follows depends on it."""
    words = (program, "--version")
    printed = subprocess.run(words, check=False, capture_output=True, text=True).stdout  # noqa: S603
    return (printed.strip().splitlines() or ["unknown"])[-1]


def sanitized(
    command: tuple[str, ...],
    group: str,
    tests: Sequence[str],
    *,
    limit_s: float,
    started: list[subprocess.Popen[str]],
) -> dict[str, Any]:
    """Run tests under a tool.

    Args:
        command: compute-sanitizer and its tool.
        group: name of the tests.
        tests: what pytest runs.
        limit_s: seconds after which the processes are killed.
        started: the process is added, for whoever must end it.

    Returns:
        A row of the results file.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        words = [
            *(*command, "--target-processes", "all"),
            *("--report-api-errors", "no", "--print-limit", "0"),
            *("--log-file", f"{folder}/%p.log"),
            *(*pytest_command.COMMAND, "--require-gpu", "-q", f"--junitxml={report}", *tests),
        ]
        process = subprocess.Popen(  # noqa: S603 - our own words
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**pytest_command.environment(), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            kill_group(process)
            printed, _ = process.communicate()
            printed += f"\nended after the limit of {limit_s:g} s"
        logs = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.log")]
        covered = _passed(report)
    counts = [int(match[1]) for log in logs for match in _SUMMARY.finditer(log)]
    is_bad = [log for log in logs if (match := _SUMMARY.search(log)) is None or match[1] != "0"]
    return {
        "tool": command[-1],
        "group": group,
        "tests": (printed.strip().splitlines() or ["none ran"])[-1],
        "covered": covered,
        "exit_code": process.returncode,
        "processes": len(counts),
        "unfinished": len(logs) - len(counts),
        "errors": sum(counts),
        "seconds": round(time.monotonic() - begin, 1),
        "first_report": is_bad[0][:_REPORT_CHARACTERS] if is_bad else "",
        "races": races(logs),
        "output": printed[-_REPORT_CHARACTERS:] if process.returncode else "",
    }


def _passed(report: Path) -> list[str]:
    """Tests of a JUnit report that passed; of none where there is no report."""
    if not report.exists():
        return []
    # Written by the pytest that this process started.
    cases = ElementTree.parse(report).getroot().iter("testcase")  # noqa: S314
    return [
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in cases
        if not any(each.tag in ("failure", "error", "skipped") for each in case)
    ]


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["group"], row["tool"]))


if __name__ == "__main__":
    end(main)
