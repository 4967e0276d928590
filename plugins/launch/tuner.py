"""Which plan is the fastest: pure but for the times, which are handed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

from paged_trt.plugins.errors import ConfigError, PagedTrtError
from paged_trt.plugins.kv import power_of_two_buckets, table_width_buckets, tokens_in_pages
from paged_trt.plugins.launch.gather import GATHERS_UNASKED
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import AttentionPlan
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import RequestKey, TunedPlan
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensors import EngineSpec

NOISE: Final = 0.02
"""A plan replaces the heuristic's only where it is faster by more than this part of its time:
two runs of one kernel differ by as much."""

TimePlan = Callable[[AttentionPlanRequest, AttentionPlan], float]
"""Median microseconds of a step under a plan; a PagedTrtError leaves the plan out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What timing one request gave.

    Attributes:
        request: what was timed.
        chosen: the plan to use.
        heuristic: what the heuristic takes.
        microseconds: time of each plan, in the order of `candidates`.
        failures: error of each plan that could not be timed.
    """

    request: AttentionPlanRequest
    chosen: AttentionPlan
    heuristic: AttentionPlan
    microseconds: dict[AttentionPlan, float]
    failures: dict[AttentionPlan, PagedTrtError]

    @property
    def speedup(self) -> float:
        """Time of the heuristic's plan over that of the chosen one."""
        return self.microseconds[self.heuristic] / self.microseconds[self.chosen]

    def record(self) -> TunedPlan:
        """The line of the cache file."""
        return TunedPlan(
            request=RequestKey.of(self.request),
            plan_text=str(self.chosen),
            microseconds=self.microseconds[self.chosen],
            heuristic_text=str(self.heuristic),
            heuristic_microseconds=self.microseconds[self.heuristic],
        )


def tune_request(
    request: AttentionPlanRequest,
    time_plan: TimePlan,
    *,
    gathers_unasked: bool = GATHERS_UNASKED,
) -> Tuning:
    """Time every candidate of a request and choose.

    Args:
        request: the step.
        time_plan: gives the times.
        gathers_unasked: as in `PolicyPlanner`.

    Raises:
        PagedTrtError: the heuristic's own plan could not be timed.
    """
    heuristic, *others = candidates(request, gathers_unasked=gathers_unasked)
    times = {heuristic: time_plan(request, heuristic)}
    failures: dict[AttentionPlan, PagedTrtError] = {}
    for plan in others:
        try:
            times[plan] = time_plan(request, plan)
        except PagedTrtError as error:
            failures[plan] = error
    best = min(times, key=times.__getitem__)
    is_faster = times[best] < times[heuristic] * (1 - NOISE)
    return Tuning(
        request=request,
        chosen=best if is_faster else heuristic,
        heuristic=heuristic,
        microseconds=times,
        failures=failures,
    )


def engine_requests(
    spec: EngineSpec,
    *,
    arch: str | None,
    num_multiprocessors: int | None,
    gathers_unasked: bool = GATHERS_UNASKED,
) -> Iterator[AttentionPlanRequest]:
    """Every step of an engine that has a choice of plans: its different layers x T, N, M buckets.

    Decode steps come first; prefill steps have a choice where they may gather.

    Args:
        spec: the engine.
        arch: of the device; None where it is not here.
        num_multiprocessors: likewise.
        gathers_unasked: as in `PolicyPlanner`.
    """
    planner = PolicyPlanner(explicit=None, gathers_unasked=gathers_unasked)
    for is_decode in (True, False):
        for attention in dict.fromkeys(spec.layers):
            for step in _decode_steps(spec) if is_decode else _prefill_steps(spec):
                request = AttentionPlanRequest(
                    arch=arch,
                    attention=attention,
                    activation_dtype=spec.activation_dtype,
                    kv_cache_dtype=spec.kv_cache_dtype,
                    step=step,
                    num_multiprocessors=num_multiprocessors,
                )
                if is_decode or planner.may_gather(request):
                    yield request


def _decode_steps(spec: EngineSpec) -> Iterator[StepShape]:
    for num_seqs in power_of_two_buckets(spec.pool.max_batch_size):
        for width in table_width_buckets(spec.pool):
            yield StepShape(num_tokens=num_seqs, num_seqs=num_seqs, table_width=width)


def _prefill_steps(spec: EngineSpec) -> Iterator[StepShape]:
    """Most tokens first; no more than the tables hold, and more than sequences."""
    for tokens in reversed(power_of_two_buckets(spec.max_num_tokens)):
        for step in _decode_steps(spec):
            most = step.num_seqs * tokens_in_pages(step.table_width)
            if step.num_seqs < tokens <= most:
                yield dataclasses.replace(step, num_tokens=tokens)


def query_lengths(num_seqs: int, num_tokens: int) -> list[int]:
    """New tokens of each sequence of a timed step, as even as they can be."""
    few, more = divmod(num_tokens, num_seqs)
    return [few + (index < more) for index in range(num_seqs)]


def step_lengths(num_seqs: int, max_tokens: int) -> list[int]:
    """Keys of each sequence of a timed step of N sequences and at most M * 128 keys.

    A step comes to a bucket when its longest sequence has over half of the bucket's keys; the
    lengths are spread evenly from there to the bucket's end, so that no plan wins by suiting
    one length only.

    Raises:
        ConfigError: a count is not positive.
    """
    if num_seqs < 1 or max_tokens < 1:
        raise ConfigError(f"a step needs sequences and keys, got {num_seqs} and {max_tokens}")
    low = max_tokens // 2
    return [low + (max_tokens - low) * (index + 1) // num_seqs for index in range(num_seqs)]
