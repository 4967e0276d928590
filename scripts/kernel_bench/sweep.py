"""Times every candidate of a cell, in turn, once its result is known to be right."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.errors import ExecutionError, PagedTrtError
from paged_trt.plugins.launch.loaded import KERNELS, DeviceKernels
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.trial import Trial, is_append, is_attention, prepare_trial
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.timing import GRAPH_MICROSECONDS, Graphs, Times, measure_in_turn
from paged_trt.scripts.kernel_bench.candidates import (
    Candidate,
    append_candidates,
    decode_candidates,
    variants_of,
)
from paged_trt.scripts.kernel_bench.cells import Cell, Family
from paged_trt.scripts.kernel_bench.check import (
    expected_of,
    output_of,
    page_bytes_of,
    relative_difference,
)
from paged_trt.scripts.kernel_bench.run import ALLOWED_ERROR, Row, line_of_error
from paged_trt.scripts.kernel_bench.variants import VariantKernels, cut_append

Array = npt.NDArray[Any]
SWEEP_METHOD: Final = (
    "not what engines run but what they could: all_us has median, minimum and maximum of every "
    "candidate of a cell, plan the heuristic's own, best the fastest of the second round. "
    "CUDA-graph replay of as many launches as last about 2 ms; the replays of all candidates "
    "take turns, 3 of each, then 9 of the planner's own and the best 3, with variants of their "
    "kernels (N warps: of a block; other depth: one step in flight instead of two or two instead "
    "of one; N rounds: of a warp of an append). "
    "Launches take turns on different pages of one pool, at least 190 MB of keys and values where "
    "the pool allows, pages in random order. Before it is timed the result of the first candidate "
    "is compared with float32 on the host (first and last sequence), those of the others with it; "
    "appends are compared byte by byte"
)
FIRST_REPLAYS: Final = 3
LAST_REPLAYS: Final = 9
KEPT: Final = 3
"""Candidates of the first round, besides the planner's own, whose kernels are varied."""
MOST_CHECKED_KEYS: Final = 2**16
"""Keys of a sequence that is compared with float32 on the host."""
MOST_CHECKED_PAGES: Final = 32
_POISON: Final = 0x5A


@dataclasses.dataclass(slots=True, kw_only=True)
class Sweep:
    """What a sweep works with.

    Attributes:
        graphs: records and replays.
        memory: pools and operands.
        stream: handle of the stream that `graphs` records.
        arch: of the device.
        num_multiprocessors: of the device.
        ceilings: measured limits of the machine.
        kernels: where kernels are loaded.
        graph_microseconds: a graph of a candidate lasts about this long.
        trial_options: for `prepare_trial`.
        show: gets one line per cell.
        is_interrupted: whether Ctrl-C ended `run`.
    """

    graphs: Graphs
    memory: TrialMemory
    stream: int
    arch: str
    num_multiprocessors: int
    ceilings: Mapping[str, float]
    kernels: DeviceKernels = KERNELS
    graph_microseconds: float = GRAPH_MICROSECONDS
    trial_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    show: Callable[[str], None] = lambda line: None
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
                rows.append(self.cell(cell))
            except ExecutionError as error:
                return rows, f"stopped at {cell}: {error}"
            except KeyboardInterrupt:
                self.is_interrupted = True
                return rows, f"interrupted at cell {index + 1} of {len(cells)}"
            self.show(f"{time.monotonic() - begin:6.1f} s  {line_of(cell, rows[-1])}")
        return rows, ""

    def request(self, cell: Cell) -> AttentionPlanRequest:
        """What the planner is asked on this device."""
        return cell.request(arch=self.arch, num_multiprocessors=self.num_multiprocessors)

    def cell(self, cell: Cell) -> Row:
        """One row.

        Raises:
            ExecutionError: the device is lost, or there is too little memory.
        """
        request = self.request(cell)
        is_append_cell = cell.family is Family.APPEND
        ceiling = self.ceilings["copy_GBs" if is_append_cell else "read_GBs"]
        floor = cell.bytes / ceiling / 1e3
        errors: dict[str, str] = {}
        first = append_candidates() if is_append_cell else decode_candidates(request)
        usual = first[0]
        times = self._round(cell, first, floor, errors, FIRST_REPLAYS)
        best = sorted(times, key=lambda each: times[each].median)[:KEPT]
        last = list(dict.fromkeys([usual, *best]))
        if not is_append_cell:
            last += variants_of(request, last)
        times |= self._round(cell, last, floor, errors, LAST_REPLAYS)
        row = cell.row() | {"floor_us": round(floor, 2), "plan": str(usual)}
        if usual in times:
            row |= dict(zip(("ours_us", "ours_us_min", "ours_us_max"), _three(times[usual]),
                            strict=True))  # fmt: skip
            row["of_ceiling"] = round(floor / times[usual].median, 3)
        compared = {each: times[each] for each in last if each in times}
        if compared:
            winner = min(compared, key=lambda each: compared[each].median)
            row |= {"best": str(winner), "best_us": _three(compared[winner])[0]}
        ordered = sorted(times, key=lambda each: times[each].median)
        row["all_us"] = {str(each): _three(times[each]) for each in ordered}
        return row | ({"errors": errors} if errors else {})

    def _round(
        self,
        cell: Cell,
        wanted: Sequence[Candidate],
        floor: float,
        errors: dict[str, str],
        replays: int,
    ) -> dict[Candidate, Times]:
        """Times of the candidates that give the right result."""
        with self._trials(cell, wanted, errors) as trials:
            right = list(self._right(cell, trials, errors))
            only = is_append if cell.family is Family.APPEND else is_attention
            works = [trials[each].calls(self.stream, only=only) for each in right]
            found = measure_in_turn(
                self.graphs,
                works,
                replays=replays,
                graph_microseconds=self.graph_microseconds,
                estimate=floor * 1.2 + 4.0,
            )
        return dict(zip(right, found, strict=True))

    @contextlib.contextmanager
    def _trials(
        self, cell: Cell, wanted: Sequence[Candidate], errors: dict[str, str]
    ) -> Iterator[dict[Candidate, Trial]]:
        found: dict[Candidate, Trial] = {}
        try:
            for each in wanted:
                if str(each) in errors:
                    continue
                try:
                    found[each] = self._prepare(cell, each)
                except PagedTrtError as error:
                    errors[str(each)] = line_of_error(error)
            yield found
        finally:
            self.memory.release()

    def _prepare(self, cell: Cell, candidate: Candidate) -> Trial:
        options = dict(self.trial_options)
        make_launch = options.pop("make_launch", KernelLaunch)
        return prepare_trial(
            self.memory,
            self.request(cell),
            cell.sizes,
            planner=PolicyPlanner(explicit=candidate.plan),
            registry=VariantKernels(candidate=candidate, kernels=self.kernels),
            make_launch=cut_append(candidate, make_launch),
            **options,
        )

    def _right(
        self, cell: Cell, trials: Mapping[Candidate, Trial], errors: dict[str, str]
    ) -> Iterator[Candidate]:
        """Candidates whose result is that of the first one, which is compared with float32."""
        wanted: Array | None = None
        for each, trial in trials.items():
            problem = ""
            if cell.family is Family.APPEND:
                found = self._appended(cell, trial)
                if wanted is not None and not np.array_equal(found, wanted):
                    problem = f"{np.count_nonzero(found != wanted)} bytes of the pools differ"
            else:
                self.graphs.run(trial.calls(self.stream, only=is_attention)[0])
                found = output_of(self.memory, cell, trial)
                problem = self._wrong(cell, trial, found, wanted)
            if problem:
                errors[str(each)] = problem
                continue
            wanted = found if wanted is None else wanted
            yield each

    def _wrong(self, cell: Cell, trial: Trial, found: Array, wanted: Array | None) -> str:
        allowed = ALLOWED_ERROR[cell.kv]
        if wanted is not None:
            difference = relative_difference(found, wanted)
        else:
            rows = [
                row
                for row in dict.fromkeys((0, len(found) - 1))
                if cell.sizes.kv_lens[row] <= MOST_CHECKED_KEYS
            ]
            expected = [expected_of(self.memory, cell, trial, row) for row in rows]
            difference = relative_difference(found[rows], np.stack(expected)) if rows else 0.0
        if difference <= allowed:  # NaN is not
            return ""
        return f"its result is off by {difference:.2g} of its norm, {allowed} is allowed"

    def _appended(self, cell: Cell, trial: Trial) -> Array:
        """Bytes of the first sequence's new pages, after an append onto poison."""
        attention, pages = cell.attention, trial.tables[0][0][:MOST_CHECKED_PAGES]
        tiles = [
            (pool + int(page) * size, size)
            for pool, dim in zip(
                self.memory.pools, (attention.head_dim, attention.value_head_dim), strict=True
            )
            for size in [page_bytes_of(cell, dim)]
            for page in pages
        ]
        for address, size in tiles:
            self.memory.stream.fill(address, size, byte=_POISON)
        self.memory.stream.synchronize()
        self.graphs.run(trial.calls(self.stream, only=is_append)[0])
        return np.concatenate([self.memory.download(*tile) for tile in tiles])


def line_of(cell: Cell, row: Row) -> str:
    """A row on one line, while the run goes on."""
    parts = [f"{cell}: {row['plan']}"]
    if "ours_us" in row:
        parts[0] += f" {row['ours_us']:.2f} us, {row['of_ceiling']:.3f} of the ceiling"
    if "best" in row:
        parts.append(f"best {row['best']} {row['best_us']:.2f} us")
    return ", ".join([*parts, *(f"{name}: {text}" for name, text in row.get("errors", {}).items())])


def _three(times: Times) -> list[float]:
    return [round(value, 2) for value in (times.median, times.minimum, times.maximum)]
