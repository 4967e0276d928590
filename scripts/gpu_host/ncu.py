"""Nsight Compute as a program: which metrics, how it is called, what it printed.

Metric names are those of GH100. One that this version or chip lacks is left out: Nsight Compute
would profile nothing otherwise.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from paged_trt.plugins.errors import ExecutionError, UnsupportedError
from paged_trt.scripts.gpu_host.ending import kill_group

TIME: Final = "gpu__time_duration.sum"
STALL_PREFIX: Final = "smsp__average_warps_issue_stalled_"
STALL_SUFFIX: Final = "_per_issue_active.ratio"
STALLS: Final = (
    *("long_scoreboard", "short_scoreboard", "wait", "barrier", "membar", "gmma", "drain"),
    *("math_pipe_throttle", "mio_throttle", "lg_throttle", "tex_throttle", "not_selected"),
    *("no_instruction", "selected", "sleeping", "branch_resolving", "dispatch_stall"),
    *("imc_miss", "misc"),
)
"""Why a warp did not issue; `gmma` waits for wgmma, `selected` did issue."""
METRICS: Final = (
    TIME,
    # Clocks: cycles in a second.
    "sm__cycles_elapsed.avg.per_second",
    "dram__cycles_elapsed.avg.per_second",
    # Memory.
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    # Pipes. Instructions of wgmma are `gmma`, those of mma.sync `hmma`; MUFU is on `xu`.
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    # What each multiprocessor had to do.
    "sm__cycles_active.avg",
    "sm__cycles_active.min",
    "sm__cycles_active.max",
    "sm__cycles_elapsed.max",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__maximum_warps_per_active_cycle_pct",
    # The launch.
    "launch__grid_size",
    "launch__block_size",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__waves_per_multiprocessor",
    *(f"{STALL_PREFIX}{name}{STALL_SUFFIX}" for name in STALLS),
)
UNLISTED: Final = ("launch__", "sm__maximum_warps_per_active_cycle_pct")
"""Metrics that `--query-metrics` does not name: those of a launch, and the possible occupancy."""
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


def metrics_of(known: frozenset[str]) -> list[str]:
    """METRICS without those that are not among `known`; all where nothing is known."""
    return [
        name
        for name in METRICS
        if not known or base_name(name) in known or name.startswith(UNLISTED)
    ]


def base_name(metric: str) -> str:
    """A metric without what is made of its values: `dram__bytes_read` of `dram__bytes_read.sum`."""
    return metric.partition(".")[0]


def profile(
    ncu: str, command: Sequence[str], *, metrics: Sequence[str], log: Path, limit_s: float
) -> str:
    """Run a command under Nsight Compute; kernels between cuProfilerStart and -Stop are profiled.

    Args:
        ncu: path of the program.
        command: what to run.
        metrics: to collect; one that Nsight Compute refuses is left out in another try.
        log: file for its output; what the command prints goes to the file with `.out` behind.
        limit_s: seconds after which everything is killed, in each try.

    Returns:
        What Nsight Compute printed.

    Raises:
        UnsupportedError: the counters may not be read.
        ExecutionError: nothing was profiled, or it did not end in time.
    """
    wanted, options = list(metrics), _options(ncu, log)
    for _ in range(MOST_TRIES):
        words = [ncu, *options, "--metrics", ",".join(wanted), *command]
        code = _run(words, log=log, limit_s=limit_s)
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
            kill_group(process)
            process.wait()
            raise ExecutionError(
                f"Nsight Compute did not end within {limit_s:g} s; profile fewer cells:"
                f"{_tails(log)}"
            ) from None
        finally:
            kill_group(process)


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
