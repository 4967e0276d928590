"""One benchmark run: cell by cell, ours and every other library, into rows of results."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError, PagedTrtError
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.timing import Graphs, Times, measure
from paged_trt.scripts.kernel_bench.cells import Cell, Family
from paged_trt.scripts.kernel_bench.ours import OurKernels
from paged_trt.scripts.kernel_bench.peers import (
    Peer,
    PeerCalls,
    PeerData,
    PeerError,
    relative_error,
)

Row = dict[str, Any]
_FOLDERS: Final = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")
MOST_FAILURES: Final = 3
"""A library that fails so often in one group of cells is not tried in the rest of it."""
MOST_CHECKED: Final = 2**18
"""Keys of a cell that is checked against float32."""
ALLOWED_ERROR: Final = {DType.BFLOAT16: 0.01, DType.FLOAT8: 0.06, DType.INT8: 0.01}
"""Norm of the error over norm of the result. A float8 pool may come with float8 queries."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Bench:
    """What a run works with.

    Attributes:
        graphs: records and replays.
        memory: pools and operands.
        ours: our kernels.
        peers: other libraries; empty without them.
        ceilings: measured limits of the machine.
        data_of: tensors of a cell for other libraries.
        error_of: as `relative_error`.
        our_error: error of our own result; None where nothing can compute it.
        all_plans: time every candidate of the planner too.
        show: gets one line per cell.
        failures: of each library in each group of cells.
        checked: what is wrong with the result in each kind of cells that was compared; empty where
            it is right.
        is_interrupted: whether Ctrl-C ended `run`.
    """

    graphs: Graphs
    memory: TrialMemory
    ours: OurKernels
    peers: list[Peer]
    ceilings: dict[str, float]
    data_of: Callable[[Cell], PeerData]
    error_of: Callable[..., float] = relative_error
    our_error: Callable[[Cell], float] | None = None
    all_plans: bool = False
    show: Callable[[str], None] = lambda line: None
    failures: dict[tuple[str, Family, str], int] = dataclasses.field(default_factory=dict)
    checked: dict[tuple[Any, ...], str] = dataclasses.field(default_factory=dict)
    is_interrupted: bool = False

    def run(self, cells: Sequence[Cell], *, limit_s: float | None = None) -> tuple[list[Row], str]:
        """Rows of the cells, and why cells are missing; empty where none is.

        Args:
            cells: in the order to run them.
            limit_s: seconds after which no further cell is begun.
        """
        begin = time.monotonic()
        rows: list[Row] = []
        for index, cell in enumerate(cells):
            if limit_s is not None and time.monotonic() - begin > limit_s:
                return rows, f"{len(cells) - index} of {len(cells)} cells not run: {limit_s:g} s"
            try:
                row = self.cell(cell)
            except ExecutionError as error:
                return rows, f"stopped at {cell}: {error}"
            except KeyboardInterrupt:
                self.is_interrupted = True
                return rows, f"interrupted at cell {index + 1} of {len(cells)}"
            rows.append(row)
            self.show(f"{time.monotonic() - begin:6.1f} s  {line_of(cell, row)}")
        return rows, ""

    def cell(self, cell: Cell) -> Row:
        """One row.

        Raises:
            ExecutionError: the device is lost.
        """
        row, errors = cell.row(), {}
        # What no kernel beats: the bytes at the ceiling, the products at theirs.
        floor = max(
            cell.bytes / self.ceilings["read_GBs"] / 1e3,
            cell.flops / self.ceilings.get("matmul_TFLOPs", 600.0) / 1e6,
        )
        row["floor_us"] = round(floor, 2)
        estimate = floor * 1.2 + 4.0
        try:
            if wrong := self._check_ours(cell):
                errors["ours"] = wrong
            found = self.ours.time(cell, estimate=estimate, all_plans=self.all_plans)
            row |= _ours(found.times) | {"plan": found.plan}
            if found.plans_us:
                row["plans_us"] = found.plans_us
        except PagedTrtError as error:
            errors["ours"] = line_of_error(error)
            self._require_device(error)
        peers = self._peers(cell, estimate, errors)
        row["peers_us"] = {name: round(times.median, 2) for name, times in peers.items()}
        row["peers_us_range"] = {
            name: [round(times.minimum, 2), round(times.maximum, 2)]
            for name, times in peers.items()
        }
        return row | self._ratios(cell, row) | ({"errors": errors} if errors else {})

    def _peers(self, cell: Cell, estimate: float, errors: dict[str, str]) -> dict[str, Times]:
        found: dict[str, Times] = {}
        wanted = [peer for peer in self.peers if self._takes_part(peer, cell)]
        if not wanted:
            return found
        data = self.data_of(cell)
        for peer in wanted:
            try:
                calls = peer.prepare(data)
                self.graphs.run(calls.calls[0])
                if wrong := self._check(peer.name, data, calls):
                    errors[peer.name] = wrong
                    continue
                found[peer.name] = measure(self.graphs, calls.calls, replays=5, estimate=estimate)
            except PeerError:
                # It says beforehand that this is no cell for it.
                continue
            except Exception as error:  # libraries have no base class in common
                errors[peer.name] = line_of_error(error)
                key = (peer.name, cell.family, cell.group)
                self.failures[key] = self.failures.get(key, 0) + 1
                self._require_device(error)
        return found

    def _takes_part(self, peer: Peer, cell: Cell) -> bool:
        has_failed = self.failures.get((peer.name, cell.family, cell.group), 0) >= MOST_FAILURES
        return cell.family in peer.families and cell.kv is not DType.INT8 and not has_failed

    def _check_ours(self, cell: Cell) -> str:
        """Compare our result with float32; what is wrong, or nothing."""
        our_error = self.our_error
        return "" if our_error is None else self._wrong("ours", cell, lambda: our_error(cell))

    def _check(self, name: str, data: PeerData, calls: PeerCalls) -> str:
        return self._wrong(name, data.cell, lambda: self.error_of(data, calls.output(), turn=0))

    def _wrong(self, name: str, cell: Cell, error_of: Callable[[], float]) -> str:
        """What is wrong with the results in this kind of cells; nothing where none was compared."""
        kind = _kind(name, cell)
        is_small = sum(cell.sizes.kv_lens) <= MOST_CHECKED
        if kind not in self.checked and cell.family is not Family.APPEND and is_small:
            error, allowed = error_of(), ALLOWED_ERROR[cell.kv]
            is_right = error <= allowed  # NaN is not
            self.checked[kind] = (
                ""
                if is_right
                else (f"its result is off by {error:.2g} of its norm, {allowed} is allowed")
            )
        return self.checked.get(kind, "")

    def _require_device(self, cause: Exception) -> None:
        """Find out whether the device still works after a failure.

        Raises:
            ExecutionError: it does not.
        """
        try:
            self.memory.stream.synchronize()
            self.graphs.run(lambda: None)
        except Exception as error:
            raise ExecutionError(f"the device is lost after {line_of_error(cause)}") from error

    def _ratios(self, cell: Cell, row: Row) -> Row:
        found: Row = {}
        microseconds = row.get("ours_us")
        if microseconds is None:
            return found
        if row["peers_us"]:
            best = min(row["peers_us"].values())
            found["ratio_to_best_peer"] = round(microseconds / best, 3)
        if cell.family is Family.PREFILL:
            ceiling = self.ceilings.get("matmul_TFLOPs")
            reached = cell.flops / microseconds / 1e6
        else:
            is_append = cell.family is Family.APPEND
            ceiling = self.ceilings["copy_GBs" if is_append else "read_GBs"]
            reached = cell.bytes / microseconds / 1e3
        if ceiling is not None:
            found["of_ceiling"] = round(reached / ceiling, 3)
        return found


def line_of(cell: Cell, row: Row) -> str:
    """A row on one line, while the run goes on."""
    parts = [f"{cell}: ours {row['ours_us']:.2f} us" if "ours_us" in row else f"{cell}: ours -"]
    if "of_ceiling" in row:
        parts.append(f"{row['of_ceiling']:.2f} of the ceiling")
    if row["peers_us"]:
        best = min(row["peers_us"], key=row["peers_us"].__getitem__)
        parts.append(f"best peer {best} {row['peers_us'][best]:.2f} us")
    if "ratio_to_best_peer" in row:
        parts.append(f"ratio {row['ratio_to_best_peer']:.2f}")
    return ", ".join([*parts, *(f"{name}: {text}" for name, text in row.get("errors", {}).items())])


def _ours(times: Times) -> Row:
    return {
        "ours_us": round(times.median, 2),
        "ours_us_min": round(times.minimum, 2),
        "ours_us_max": round(times.maximum, 2),
    }


def _kind(name: str, cell: Cell) -> tuple[Any, ...]:
    """Cells of one kind run the same code: one of them is checked."""
    group = cell.heads[0] // cell.heads[1]
    return (name, cell.family, cell.kv, cell.head_dim, group, cell.window, cell.is_even)


def line_of_error(error: BaseException) -> str:
    """One line, without the folders of whoever compiled a library."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _FOLDERS.sub("", text)[:240]
