"""Our kernels on a cell, as the plugin would launch them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import PagedTrtError
from paged_trt.plugins.launch.dispatch import kernel_keys, kernel_paths
from paged_trt.plugins.launch.loaded import KERNELS
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import AttentionPlan
from paged_trt.plugins.launch.registry import KernelKey
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.step_sizes import page_tables, pool_spec, sets_in_turn
from paged_trt.plugins.launch.trial import Trial, is_append, is_attention, prepare_trial
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.launch.tuned import TunedPlans, TuningTarget
from paged_trt.plugins.launch.tuning_target import tuned_plans
from paged_trt.plugins.timing import Graphs, Times, measure
from paged_trt.scripts.kernel_bench.cells import Cell, Family

_LOG: Final = logging.getLogger("paged_trt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OurTimes:
    """What timing our kernels on a cell gave.

    Attributes:
        times: of the plan that an engine would run.
        plan: that plan, and who chose it.
        plans_us: median microseconds of every candidate; empty where they were not asked for.
    """

    times: Times
    plan: str
    plans_us: dict[str, float]


class OurKernels:
    """Times our kernels.

    Args:
        memory: where trials lie.
        graphs: of the run.
        stream: handle of the stream that `graphs` records.
        arch: of the device.
        num_multiprocessors: of the device.
        tuned: plans that were measured on the device.
        explicit: the plan to time, as `--attention-plan` of an engine; None leaves the choice open.

    Attributes:
        stream: as given.
    """

    def __init__(
        self,
        memory: TrialMemory,
        graphs: Graphs,
        *,
        stream: int,
        arch: str,
        num_multiprocessors: int,
        tuned: TunedPlans,
        explicit: AttentionPlan | None = None,
    ) -> None:
        self._memory, self._graphs, self.stream = memory, graphs, stream
        self._arch, self._units = arch, num_multiprocessors
        self._planner = PolicyPlanner(explicit=explicit, tuned=tuned)

    def request(self, cell: Cell) -> AttentionPlanRequest:
        """What the planner is asked on this device."""
        return cell.request(arch=self._arch, num_multiprocessors=self._units)

    def tables(self, cell: Cell) -> npt.NDArray[np.int32]:
        """The page tables of a cell's trial, `[num_sets, N, M]` int32, without the trial."""
        pool = pool_spec(self._memory.pool_bytes, cell.attention, cell.kv)
        count = sets_in_turn(cell.sizes, cell.attention, cell.kv, pool)
        return page_tables(cell.sizes, pool, num_sets=count)

    def prepare(self, cell: Cell, plan: AttentionPlan | None = None) -> Trial:
        """A trial of the cell; it lies in the memory until that is released.

        Args:
            cell: the shape.
            plan: instead of the planner's own choice.

        Raises:
            PagedTrtError: no kernel covers it, or there is too little memory.
        """
        request = self.request(cell)
        planner = self._planner if plan is None else PolicyPlanner(explicit=plan)
        chosen = planner.plan(request).plan
        KERNELS.warm(kernel_keys(request, chosen))
        return prepare_trial(self._memory, request, cell.sizes, planner=planner)

    def time(self, cell: Cell, *, estimate: float, all_plans: bool = False) -> OurTimes:
        """Time the plan that an engine would run, and the others where they are asked for.

        Raises:
            PagedTrtError: no kernel covers the cell, or the device failed.
        """
        planned = self._planner.plan(self.request(cell))
        others: dict[str, float] = {}
        times = self._time(cell, None, estimate)
        if all_plans and cell.family is Family.DECODE:
            others[str(planned.plan)] = round(times.median, 2)
        if all_plans and cell.family is not Family.APPEND:
            plans = plans_worth_timing(self.request(cell))
            named = {str(plan): plan for plan in plans if plan != planned.plan}
            others |= self._time_others(cell, named, estimate)
        return OurTimes(times=times, plan=self.plan_text(cell), plans_us=others)

    def plan_text(self, cell: Cell) -> str:
        """The plan that an engine would run, and who chose it; the kernels where there is none."""
        planned = self._planner.plan(self.request(cell))
        if cell.family is Family.DECODE:
            return f"{planned.plan} ({planned.source.value})"
        wanted: Callable[[str], bool] = is_append if cell.family is Family.APPEND else is_attention
        paths = kernel_paths(self.request(cell), planned.plan)
        return ", ".join(path.value for path in paths if wanted(path.value))

    def _time_others(
        self, cell: Cell, plans: Mapping[str, AttentionPlan], estimate: float
    ) -> dict[str, float]:
        """Median microseconds by name; one that fails is named in the log and left out."""
        found = {}
        for name, plan in plans.items():
            try:
                found[name] = round(self._time(cell, plan, estimate).median, 2)
            except PagedTrtError as error:
                _LOG.warning("%s of %s was not timed: %s", name, cell, error)
        return found

    def _time(self, cell: Cell, plan: AttentionPlan | None, estimate: float) -> Times:
        only = is_append if cell.family is Family.APPEND else is_attention
        try:
            trial = self.prepare(cell, plan)
            calls = trial.calls(self.stream, only=only)
            return measure(self._graphs, calls, replays=5, estimate=estimate)
        finally:
            self._memory.release()


def plans_worth_timing(request: AttentionPlanRequest) -> tuple[AttentionPlan, ...]:
    """Candidates of a step, also those that no engine takes unasked; none where one is left."""
    found = candidates(request, gathers_unasked=True)
    return found if len(found) > 1 else ()


def kernels_of(
    cells: Iterable[Cell],
    target: TuningTarget,
    *,
    all_plans: bool,
    explicit: AttentionPlan | None = None,
) -> set[KernelKey]:
    """Kernels that cells launch.

    Args:
        cells: the shapes.
        target: the device.
        all_plans: those of every candidate, not only of what the planner takes.
        explicit: as in `OurKernels`.
    """
    chosen = PolicyPlanner(explicit=explicit, tuned=tuned_plans())
    keys: set[KernelKey] = set()
    for cell in cells:
        request = cell.request(arch=target.arch, num_multiprocessors=target.num_multiprocessors)
        others = plans_worth_timing(request) if all_plans else ()
        planners = [chosen, *(PolicyPlanner(explicit=plan) for plan in others)]
        plans = [planner.plan(request).plan for planner in planners]
        keys.update(key for plan in plans for key in kernel_keys(request, plan))
    return keys
