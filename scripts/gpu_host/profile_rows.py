"""Rows of a profile: launches of Nsight Compute's table joined with the cells they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from paged_trt.scripts.error_output import plain
from paged_trt.scripts.gpu_host.ncu import ProfiledKernel
from paged_trt.scripts.gpu_host.ncu_metrics import STALL_PREFIX, STALL_SUFFIX, STALLS
from paged_trt.scripts.gpu_host.profile_launches import MARKER, Launches, Section
from paged_trt.scripts.kernel_bench.cells import Family
from paged_trt.scripts.kernel_bench.report import shape_of

Row = dict[str, Any]
TOP_STALLS: Final = 3
SHARES: Final[dict[str, tuple[str, ...]]] = {
    "dram_pct": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",),
    "mufu_pct": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "fma_pct": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",),
    "alu_pct": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
    "waves": ("launch__waves_per_multiprocessor",),
}
"""What a row says of its longest kernel; the first metric that is there counts."""
_COLUMNS: Final = (
    ("DRAM %", "dram_pct"),
    ("L2 %", "l2_pct"),
    ("tensor %", "tensor_pct"),
    ("MUFU %", "mufu_pct"),
    ("FMA %", "fma_pct"),
    ("ALU %", "alu_pct"),
    ("issue %", "issue_pct"),
    ("warps %", "occupancy_pct"),
    ("regs", "registers"),
    ("waves", "waves"),
    ("SM min/max", "active_min_over_max"),
)


def rows_of(launches: Launches, kernels: Sequence[ProfiledKernel]) -> list[Row]:
    """One row per section, family by family, in the order of the launches.

    Args:
        launches: what was launched.
        kernels: what was profiled, markers among them.
    """
    by_section = sections_of(kernels)
    numbered = enumerate(launches.sections, 1)
    rows = [_row(section, by_section.get(number, [])) for number, section in numbered]
    order = [family.value for family in Family]
    return sorted(rows, key=lambda row: order.index(row["family"]))


def sections_of(kernels: Iterable[ProfiledKernel]) -> dict[int, list[ProfiledKernel]]:
    """Kernels behind each marker, by its number; what is ahead of the first one belongs to none."""
    found: dict[int, list[ProfiledKernel]] = {}
    number = 0
    for kernel in kernels:
        if kernel.name.startswith(MARKER):
            number = kernel.grid[0]
            found[number] = []
        elif number:
            found[number].append(kernel)
    return found


def _row(section: Section, kernels: Sequence[ProfiledKernel]) -> Row:
    row: Row = {"family": section.family.value, **section.row, "library": section.library}
    if section.plan:
        row["plan"] = section.plan
    error = section.error or ("" if kernels else "Nsight Compute has no kernel of it")
    if error:
        return row | {"error": error}
    longest = max(kernels, key=lambda kernel: kernel.microseconds)
    return (
        row
        | {"us": round(sum(kernel.microseconds for kernel in kernels), 2), "kernel": longest.name}
        | _figures(longest)
        | {"kernels": [_kernel(kernel) for kernel in kernels]}
    )


def _figures(kernel: ProfiledKernel) -> Row:
    metrics = kernel.metrics
    found: Row = {}
    for name, sources in SHARES.items():
        value = next((metrics[source] for source in sources if source in metrics), None)
        if value is not None:
            found[name] = round(value, 2)
    least, most = (metrics.get(f"sm__cycles_active.{end}") for end in ("min", "max"))
    if least is not None and most:
        found["active_min_over_max"] = round(least / most, 3)
    found["stalls"] = stalls_of(metrics)
    return found


def stalls_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Why warps did not issue: the shares of their time of the TOP_STALLS largest reasons."""
    parts = {
        name: metrics[metric]
        for name in STALLS
        if (metric := f"{STALL_PREFIX}{name}{STALL_SUFFIX}") in metrics
    }
    total = sum(parts.values()) or 1.0
    # A warp that was selected waits for nothing.
    waits = sorted(parts.keys() - {"selected"}, key=lambda name: (-parts[name], name))
    return {name: round(parts[name] / total, 3) for name in waits[:TOP_STALLS]}


def _kernel(kernel: ProfiledKernel) -> Row:
    return dataclasses.asdict(kernel) | {"microseconds": round(kernel.microseconds, 3)}


def rows_table(rows: Sequence[Row]) -> Table:
    """Every row, for the log."""
    table = Table(title="profile: one call of each cell", title_justify="left")
    table.add_column("cell")
    table.add_column("library")
    for name in ("us", *(name for name, _ in _COLUMNS)):
        table.add_column(name, justify="right")
    table.add_column("stalls")
    for row in rows:
        shape = f"{row['family']} {shape_of(row)}"
        if "error" in row:
            empty = [""] * (1 + len(_COLUMNS))
            table.add_row(*map(plain, (shape, row["library"], *empty, row["error"])))
            continue
        figures = [str(row.get(key, "-")) for _, key in _COLUMNS]
        stalls = ", ".join(f"{name} {share:.0%}" for name, share in row["stalls"].items())
        more = len(row["kernels"]) - 1
        time = f"{row['us']:.2f}" + (f" (+{more} kernels)" if more else "")
        table.add_row(*map(plain, (shape, row["library"], time, *figures, stalls)))
    return table
