"""Which metrics of Nsight Compute a profile has.

Names are those of GH100. One that a version or chip lacks is left out: Nsight Compute would profile
nothing otherwise.
"""

from __future__ import annotations

from typing import Final

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
