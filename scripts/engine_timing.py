"""Times of an engine's steps, and of the part of them that our kernels take.

On a GPU three CUDA graphs of one decode step are replayed back to back: the whole step, the step
with none of our launches in it, and our launches alone, which are the very ones that the engine
made, on its own addresses. The first two differ by what our kernels cost inside the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import Stream, kept_device
from paged_trt.plugins.errors import ConfigError, ExecutionError
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.session import Session
from paged_trt.scripts.timed import TimedExecutor

WARM_UP_STEPS: Final = 3
REPLAYS: Final = 50
ROUNDS: Final = 7
MICROSECONDS: Final = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measured point: N sequences with a prompt of L tokens each."""

    batch: int
    kv_len: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds of repeated measurements of one thing."""

    values: tuple[float, ...]

    def row(self, name: str) -> dict[str, float]:
        """Median, minimum and maximum as keys of a results row."""
        return {
            name: round(statistics.median(self.values), 2),
            f"{name}_min": round(min(self.values), 2),
            f"{name}_max": round(max(self.values), 2),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps of one executor.

    Attributes:
        prefill: of the whole prompt of all sequences, chunk after chunk, in the executor.
        decode: of one decode step in the executor, from its host arrays to its logits.
        session: of one decode step outside of the executor: scheduling, arrays, sampling.
        notes: what a report must say of the executor.
    """

    prefill: Times
    decode: Times
    session: Times
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Replays of one decode step on a GPU.

    Attributes:
        step: the whole step.
        others: the step without our kernels.
        ours_alone: our kernels without the step.
        plans: attention plan of each of our layers, in order.
    """

    step: Times
    others: Times
    ours_alone: Times
    plans: tuple[str, ...]


def time_steps(
    engine_dir: Path, executor: str, cell: Cell, num_steps: int, *, device: int
) -> StepTimes:
    """Prefill and decode through a session, as `paged-trt run` does.

    Args:
        engine_dir: an engine directory.
        executor: `reference` or `tensorrt`.
        cell: what is run.
        num_steps: decode steps that count.
        device: CUDA device of the plan.
    """
    # Each step to its end: what a step costs is asked.
    opened = load_engine(engine_dir, executor, device=device, pipelines=False)
    timed = TimedExecutor(opened)
    prefills, session_times = [], []
    # The second round has the prompts of the first.
    with Session(timed, reuses_prefixes=False) as session:
        for _ in range(2):
            # The first round compiles and captures; its prefill does not count.
            timed.prefill_seconds.clear()
            ids = fill(session, cell, num_steps + WARM_UP_STEPS)
            prefills.append(MICROSECONDS * sum(timed.prefill_seconds))
            session_times = _decode(session, timed, num_steps)
            for sequence_id in ids:
                session.release(sequence_id)
        notes = timed.notes
    return StepTimes(
        prefill=Times(values=(prefills[-1],)),
        decode=Times(
            values=tuple(MICROSECONDS * seconds for seconds in timed.decode_seconds[-num_steps:])
        ),
        session=Times(values=tuple(session_times)),
        notes=notes,
    )


def fill(session: Session, cell: Cell, num_steps: int) -> list[int]:
    """Admit the sequences of a cell and prefill them; none ends in the steps to come."""
    random = np.random.default_rng(0)
    spec = session.executor.spec
    # The first ones may decode in the steps that prefill the last ones: as many as there is room.
    room = spec.pool.max_kv_cache_capacity - cell.kv_len
    if room < num_steps + 2:
        raise ConfigError(
            f"{cell.kv_len} tokens and {num_steps + 2} new ones do not fit "
            f"max_kv_cache_capacity={spec.pool.max_kv_cache_capacity}; take a shorter cell"
        )
    ids = [
        session.add(random.integers(0, spec.vocab_size, cell.kv_len).tolist(), room)
        for _ in range(cell.batch)
    ]
    sampled: set[int] = set()
    while len(sampled) < cell.batch:
        sampled |= {result.sequence_id for result in session.step()}
    return ids


def fill_steps(spec: EngineSpec, cell: Cell) -> int:
    """Most steps that the prompts of a cell take; the first sequences decode in them already."""
    if cell.batch == 1:
        return 0
    return -(-cell.batch * cell.kv_len // max(1, spec.max_num_tokens - cell.batch + 1))


def _decode(session: Session, timed: TimedExecutor, num_steps: int) -> list[float]:
    """Microseconds of each step outside of the executor."""
    outside = []
    for number in range(WARM_UP_STEPS + num_steps):
        begin = time.perf_counter()
        session.step()
        seconds = time.perf_counter() - begin
        if number >= WARM_UP_STEPS:
            outside.append(MICROSECONDS * (seconds - timed.decode_seconds[-1]))
    return outside


def time_kernels(engine_dir: Path, cell: Cell, *, device: int) -> KernelTimes:
    """The three graphs of one decode step.

    Raises:
        PagedTrtError: the plan does not run here, or its steps are not replayed.
    """
    step, ours_alone, plans = _replay(engine_dir, cell, device, is_silent=False)
    others, _, _ = _replay(engine_dir, cell, device, is_silent=True)
    if ours_alone is None:
        raise ExecutionError("no kernel of ours ran in a decode step; rebuild the engine")
    return KernelTimes(step=step, others=others, ours_alone=ours_alone, plans=plans)


def _replay(
    engine_dir: Path, cell: Cell, device: int, *, is_silent: bool
) -> tuple[Times, Times | None, tuple[str, ...]]:
    executor = open_plan(engine_dir, device=device, pipelines=False)
    with Session(_Tap(executor)) as session:
        inputs = _decode_inputs(session, cell)
        with _watched_launches(is_silent=is_silent) as launched:
            # The first step of a bucket runs and is captured right after: last come the captured.
            executor.step(inputs)
        with _watched_graphs() as graphs:
            executor.step(inputs)
        if not graphs:
            stats = executor.stats()
            raise ExecutionError(
                f"decode steps are not replayed: {stats.graph_captures} graphs were captured; "
                "see the log for the reason"
            )
        stream, graph = graphs[-1]
        with kept_device(device).current():
            whole = _time_replays(stream, lambda: stream.launch(graph))
            if is_silent:
                return whole, None, ()
            ours = launched[-len(executor.spec.layers) :]
            alone = stream.capture(lambda: _launch_all(ours, stream.handle))
            try:
                ours_alone = _time_replays(stream, lambda: stream.launch(alone))
            finally:
                alone.close()
        return whole, ours_alone, tuple(str(each.plan) for each in ours)


# No Exception: the session would end the step with an error of its own.
class _Taken(BaseException):
    """Carries the inputs of a decode step out of the session that made them."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs


class _Tap:
    """An executor that runs prefill steps and hands the first decode step out.

    A step without our kernels has no logits to sample from: a session would refuse it.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._executor, name)
        # Every way to run a step is one.
        return self._tapped(found) if name.startswith("step_") else found

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        """Run a prefill step.

        Raises:
            _Taken: it is a decode step.
        """
        logits: npt.NDArray[Any] = self._tapped(self._executor.step)(inputs)
        return logits

    def _tapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(inputs: StepInputs, *rest: Any, **options: Any) -> Any:
            if len(inputs.input_ids) != len(inputs.past_lens):
                return step(inputs, *rest, **options)
            # Views of buffers that the next step would overwrite.
            fields = {
                each.name: getattr(inputs, each.name).copy() for each in dataclasses.fields(inputs)
            }
            raise _Taken(StepInputs(**fields))

        return run


def _decode_inputs(session: Session, cell: Cell) -> StepInputs:
    try:
        fill(session, cell, WARM_UP_STEPS)
        session.step()
    except _Taken as taken:
        return taken.inputs
    raise ExecutionError("the session ran no decode step; pass a smaller `--cell`")


def _launch_all(steps: Sequence[PreparedStep], stream: int) -> None:
    for step in steps:
        step.launch(stream)


def _time_replays(stream: Stream, launch: Callable[[], None]) -> Times:
    values = []
    for _ in range(ROUNDS + 1):
        stream.synchronize()
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            launch()
        stream.synchronize()
        values.append(MICROSECONDS * (time.perf_counter() - begin) / REPLAYS)
    # The first round brings clocks and caches up.
    return Times(values=tuple(values[1:]))


@contextlib.contextmanager
def _watched_graphs() -> Iterator[list[tuple[Stream, Any]]]:
    """Every graph that is replayed, with its stream."""
    found: list[tuple[Stream, Any]] = []
    original = Stream.launch

    def launch(self: Stream, graph: Any) -> None:
        found.append((self, graph))
        original(self, graph)

    Stream.launch = launch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Stream.launch = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _watched_launches(*, is_silent: bool) -> Iterator[list[PreparedStep]]:
    """Every attention layer that is launched; with `is_silent` its kernels are left out."""
    found: list[PreparedStep] = []
    original = PreparedStep.launch

    def launch(self: PreparedStep, stream: int) -> None:
        found.append(self)
        if not is_silent:
            original(self, stream)

    PreparedStep.launch = launch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PreparedStep.launch = original  # type: ignore[method-assign]
