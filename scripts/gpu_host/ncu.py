"""Nsight Compute as a program: how it is called, what it printed."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from paged_trt.plugins.errors import ExecutionError, UnsupportedError
from paged_trt.scripts.gpu_host.ending import kill_group
from paged_trt.scripts.gpu_host.ncu_metrics import METRICS, TIME, base_name

MICROSECONDS: Final = {
    **dict.fromkeys(("ns", "nsecond"), 1e-3),
    **dict.fromkeys(("us", "usecond"), 1.0),
    **dict.fromkeys(("ms", "msecond"), 1e3),
    **dict.fromkeys(("s", "second"), 1e6),
}
MOST_TRIES: Final = 3
QUERY_SECONDS: Final = 20
_NAME: Final = re.compile(r"^\s*([a-z0-9]+__\w+)")
_PASSES: Final = re.compile(r"==PROF== Profiling .*?(\d+) pass")
_TAIL_CHARACTERS: Final = 1500
_PERMISSION: Final = "ERR_NVGPUCTRPERM"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledKernel:
    """One launch.

    Attributes:
        name: of the kernel, without arguments.
        grid: blocks along x, y and z.
        block: threads of a block, likewise.
        microseconds: of the kernel alone; 0 where Nsight Compute gave none.
        metrics: values by Nsight Compute's name, in base units; those that are no number left out.
    """

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    microseconds: float
    metrics: dict[str, float]


def find_ncu() -> str:
    """Path of the program.

    Raises:
        UnsupportedError: it is not there.
    """
    path = shutil.which("ncu")
    if path is None:
        raise UnsupportedError(
            "`ncu` (Nsight Compute) is not on PATH; it comes with the CUDA toolkit: add its `bin` "
            "folder to PATH, such as `/usr/local/cuda/bin`"
        )
    return path


def known_metrics(ncu: str) -> frozenset[str]:
    """Base names of the metrics of the devices here; empty where the program does not say."""
    lines = _printed_by(ncu, "--query-metrics").splitlines()
    found = frozenset(match[1] for line in lines if (match := _NAME.match(line)) is not None)
    # A list without this one is of another form than expected.
    return found if base_name(TIME) in found else frozenset()


def _printed_by(ncu: str, option: str) -> str:
    """What the program says of itself; nothing where it takes too long."""
    try:
        return subprocess.run(  # noqa: S603 - our own words
            [ncu, option], capture_output=True, text=True, check=False, timeout=QUERY_SECONDS,
            env=_environment(),
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""


def profile(
    ncu: str, command: Sequence[str], *, metrics: Sequence[str], log: Path, limit_s: float
) -> str:
    """Run a command under Nsight Compute; kernels between cuProfilerStart and -Stop are profiled.

    Args:
        ncu: path of the program.
        command: what to run.
        metrics: to collect; one that Nsight Compute refuses is left out in another try.
        log: file for its output; what the command prints goes to the file with `.out` behind.
        limit_s: seconds after which everything is killed, all tries together.

    Returns:
        What Nsight Compute printed.

    Raises:
        UnsupportedError: the counters may not be read.
        ExecutionError: nothing was profiled, or it did not end in time.
    """
    wanted, options = list(metrics), _options(ncu, log)
    end = time.monotonic() + limit_s
    for _ in range(MOST_TRIES):
        words = [ncu, *options, "--metrics", ",".join(wanted), *command]
        code = _run(words, log=log, limit_s=end - time.monotonic())
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if _PERMISSION in text:
            raise UnsupportedError(
                f"Nsight Compute may not read the GPU's counters ({_PERMISSION}); run as root, or "
                "let the driver be loaded with `NVreg_RestrictProfilingToAdminUsers=0`"
            )
        refused = _refused(text, wanted)
        if not refused or _table(text):
            break
        wanted = [name for name in wanted if name not in refused]
    if not _table(text):
        raise ExecutionError(f"Nsight Compute profiled no kernel, exit code {code}:{_tails(log)}")
    return text


def _options(ncu: str, log: Path) -> list[str]:
    # Newer versions hold the tensor cores back unless they are told not to.
    is_newer = "--pipeline-boost-state" in _printed_by(ncu, "--help")
    return [
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--print-kernel-base", "function", "--log-file", str(log)),
        *("--clock-control", "none", "--cache-control", "all", "--replay-mode", "kernel"),
        *(("--pipeline-boost-state", "dynamic") if is_newer else ()),
        *("--target-processes", "application-only", "--profile-from-start", "off"),
    ]


def _run(words: Sequence[str], *, log: Path, limit_s: float) -> int:
    """Exit code of the program; its output is in files, for a reader of what went wrong."""
    log.unlink(missing_ok=True)
    with _printed(log).open("w", encoding="utf-8") as out:
        process = subprocess.Popen(  # noqa: S603 - our own words
            words, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=_environment(),
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ExecutionError(
                f"Nsight Compute did not end within {limit_s:.0f} s; profile fewer cells:"
                f"{_tails(log)}"
            ) from None
        finally:
            kill_group(process)
            process.wait()


def _environment() -> dict[str, str]:
    """Numbers are printed as everywhere."""
    return {**os.environ, "LC_ALL": "C"}


def _printed(log: Path) -> Path:
    return log.with_name(f"{log.name}.out")


def _tails(log: Path) -> str:
    """The end of what both said."""
    found = [
        f"\n{path.name}: {text[-_TAIL_CHARACTERS:]}"
        for path in (log, _printed(log))
        if path.exists() and (text := path.read_text(encoding="utf-8", errors="replace").strip())
    ]
    return "".join(found) or " it printed nothing"


def _refused(text: str, metrics: Iterable[str]) -> set[str]:
    """Metrics that an error names: `Failed to find metric regex:^NAME...`."""
    errors = "\n".join(line for line in text.splitlines() if line.startswith("==ERROR=="))
    return {name for name in metrics if re.search(rf"\b{re.escape(base_name(name))}\b", errors)}


def passes_of(text: str) -> int:
    """Most times that a kernel was replayed; 0 where nothing says it."""
    return max(map(int, _PASSES.findall(text)), default=0)


def problems_of(text: str) -> list[str]:
    """Errors and warnings beside the table."""
    return [line for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING=="))]


def kernels_of(text: str) -> list[ProfiledKernel]:
    """Every launch of the table that `--csv --page raw` prints, in launch order.

    Args:
        text: everything that Nsight Compute printed: a line of names that begins with "ID", a line
            of units, a line per launch, `==PROF==` lines around them.

    Raises:
        ExecutionError: the table has no time, or a time in an unknown unit.
    """
    rows = csv.DictReader(_table(text))
    units = next(rows, None)
    if units is None:
        return []
    unit = units.get(TIME, "")
    if unit not in MICROSECONDS:
        raise ExecutionError(
            f"Nsight Compute gave `{TIME}` in `{unit}`; known units are {', '.join(MICROSECONDS)}"
        )
    return [_kernel(row, MICROSECONDS[unit]) for row in rows]


def _table(text: str) -> list[str]:
    """Lines of the table, its names first; none where there is no launch in it."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    begin = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    return lines[begin:] if len(lines) - begin > 2 else []


def _kernel(row: dict[str, str], microseconds: float) -> ProfiledKernel:
    metrics = dict(_numbers(row))
    return ProfiledKernel(
        name=row["Kernel Name"],
        grid=_sizes(row["Grid Size"]),
        block=_sizes(row["Block Size"]),
        microseconds=metrics.get(TIME, 0.0) * microseconds,
        metrics=metrics,
    )


def _numbers(row: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Metrics of a row; `--metrics` also prints some that nobody asked for."""
    for name in METRICS:
        try:
            value = float((row.get(name) or "").replace(",", ""))
        except ValueError:  # `n/a`, or the metric is not there
            continue
        if value == value:
            yield name, value


def _sizes(text: str) -> tuple[int, ...]:
    """`(32, 1, 1)` as numbers."""
    return tuple(map(int, re.findall(r"\d+", text)))
