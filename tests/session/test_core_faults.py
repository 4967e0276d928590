"""Failures at every step, callbacks that raise, a full pool, and memory over 100,000 steps."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec, prompt_of

from paged_trt.plugins.errors import ConfigError, ExecutionError, PagedTrtError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import Draw, StepInputs
from paged_trt.runtime.late_tokens import LateStep, LateTokens
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.session import Session

SPEC = make_spec(max_batch_size=3, max_num_tokens=100)
PROMPTS = [prompt_of(300)[:length] for length in (130, 3, 257, 129, 1)]
STEPS = 40
PIPELINES = pytest.mark.parametrize("pipelines", [False, True], ids=["plain", "pipelined"])


class FailsAt(HistoryExecutor):
    """Raises at one of its calls."""

    def __init__(self, number: int, failure: BaseException) -> None:
        super().__init__(SPEC)
        self.number, self.at_number = 0, number
        self.error = failure

    def _count(self) -> None:
        self.number += 1
        if self.number == self.at_number:
            raise self.error

    def step(self, inputs: StepInputs) -> Any:
        self._count()
        return super().step(inputs)

    def poison_pages(self, page_ids: Any) -> None:
        self._count()
        super().poison_pages(page_ids)


def assert_nothing_is_left(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.pages_in_use, stats.sequences) == (0, 0)
    core.batch.registry.check()


class RaisesAtOnce(LateTokens):
    """Its steps fail when they are handed over, not when their tokens are asked for."""

    def launch(self, inputs: StepInputs, draw: Draw | None) -> LateStep:
        step = super().launch(inputs, draw)
        if step.error is not None:
            self._before = None
            raise step.error
        return step


@pytest.mark.parametrize("mode", ["plain", "late errors", "errors at launch"])
@pytest.mark.parametrize("failure", [ExecutionError("broken"), MemoryError(), KeyboardInterrupt()])
def test_an_exception_at_any_step_loses_no_page_and_no_request(
    failure: BaseException, mode: str
) -> None:
    for number in range(1, STEPS):
        executor = FailsAt(number, failure)
        if mode == "errors at launch":
            executor.launcher = RaisesAtOnce(executor)  # type: ignore[attr-defined]
        core = EngineCore(executor, poisons_freed=True, pipelines=mode != "plain")
        ends: dict[int, StepResult] = {}
        tokens: dict[int, list[int]] = {}

        def deliver(result: StepResult) -> None:
            if result.finished is not None:
                assert result.sequence_id not in ends  # noqa: B023
                ends[result.sequence_id] = result  # noqa: B023
            if result.error is None:
                tokens.setdefault(result.sequence_id, []).append(result.token)  # noqa: B023

        session = Session(core)
        sequences = [core.submit(np.asarray(prompt), 8, deliver=deliver) for prompt in PROMPTS]
        while session.stats().sequences:
            try:
                core.step()
            except KeyboardInterrupt:
                assert isinstance(failure, KeyboardInterrupt)
        assert_nothing_is_left(core)
        for prompt, sequence in zip(PROMPTS, sequences, strict=True):
            got = tuple(tokens.get(sequence.sequence_id, ()))
            assert got == continuation(prompt, 8, VOCAB)[: len(got)]
            end = ends[sequence.sequence_id]
            assert isinstance(end.error, PagedTrtError) or len(got) == 8
        if executor.number < number:
            break
        # The core goes on as if nothing had been.
        [again] = session.generate([PROMPTS[0]], 8)
        assert again.tokens == continuation(PROMPTS[0], 8, VOCAB)
    else:
        pytest.fail(f"{STEPS} calls and more: raise STEPS")
    assert number > 15


@pytest.mark.parametrize("where", ["delivery", "meanwhile"])
@PIPELINES
def test_an_interrupt_between_two_deliveries_leaves_no_token_unknown(
    where: str, pipelines: bool
) -> None:
    """Ctrl-C does not only come while a step runs: some rows have their tokens then, some not."""
    for number in range(1, 2 * STEPS):
        core = EngineCore(HistoryExecutor(SPEC), poisons_freed=True, pipelines=pipelines)
        results: list[StepResult] = []
        count = 0

        def interrupt() -> None:
            nonlocal count
            count += 1
            if count == number:  # noqa: B023
                raise KeyboardInterrupt

        def deliver(result: StepResult) -> None:
            results.append(result)  # noqa: B023
            if where == "delivery":
                interrupt()

        sequences = [core.submit(np.asarray(prompt), 8, deliver=deliver) for prompt in PROMPTS]
        while core.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                core.step(meanwhile=interrupt if where == "meanwhile" and pipelines else None)
        assert_nothing_is_left(core)
        for prompt, sequence in zip(PROMPTS, sequences, strict=True):
            mine = [each for each in results if each.sequence_id == sequence.sequence_id]
            ended = [each.finished is not None for each in mine]
            assert ended == [*[False] * (len(mine) - 1), True]
            got = tuple(each.token for each in mine if each.error is None)
            assert got == continuation(prompt, 8, VOCAB)[: len(got)]
            assert mine[-1].error is not None or len(got) == 8
        if count < number:
            break
    else:
        pytest.fail(f"{2 * STEPS} calls and more: raise STEPS")


@pytest.mark.parametrize("at", range(1, 20, 3))
@PIPELINES
def test_a_callback_that_raises_frees_its_own_call_only(at: int, pipelines: bool) -> None:
    core = EngineCore(HistoryExecutor(SPEC), pipelines=pipelines)
    bystander = Session(core)
    sequence_id = bystander.add([9, 8, 7], 60)
    count = 0

    def raises(index: int, token: int) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Session(core).generate(PROMPTS, 8, on_token=raises)
    assert core.stats().sequences == 1
    tokens = []
    while core.stats().sequences:
        tokens += [result.token for result in bystander.step()]
    tokens += [result.token for result in bystander._take_results()]
    assert tuple(tokens) == continuation([9, 8, 7], 60, VOCAB)
    assert sequence_id == 0
    assert_nothing_is_left(core)


def test_sigterm_in_generate_frees_everything() -> None:
    def leave(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    session = Session(HistoryExecutor(SPEC))
    try:
        with pytest.raises(SystemExit, match="143"):
            session.generate(PROMPTS, 100, on_token=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_nothing_is_left(session.core)


@PIPELINES
def test_a_full_pool_serves_one_after_the_other(pipelines: bool) -> None:
    core = EngineCore(HistoryExecutor(SPEC), pipelines=pipelines)
    core.batch.registry.allocate(core.batch.registry.num_free - 3)
    used = core.stats().pages_in_use
    prompts = [*PROMPTS, *(prompt_of(127, seed=seed) for seed in range(3))]
    for prompt, result in zip(prompts, Session(core).generate(prompts, 100), strict=True):
        assert result.tokens == continuation(prompt, 100, VOCAB)
    assert core.stats().preemptions > 0
    assert core.stats().pages_in_use == used
    core.batch.registry.check()


def test_no_prompt_is_starved_by_others_and_no_token_waits_for_all_prompts() -> None:
    core = EngineCore(HistoryExecutor(make_spec(max_batch_size=4, max_num_tokens=64)))
    session = Session(core)
    runner = session.add([1, 2, 3], 60)
    session.step()
    long = session.add(prompt_of(300), 2)
    after_long = session.add([5], 2)
    seen: list[int] = []
    for _ in range(10):
        seen += [result.sequence_id for result in session.step()]
        # New prompts come at every step.
        session.add([4], 1)
    # Every step gave the running sequence a token, and the long prompt was done in six.
    assert seen.count(runner) == 10
    assert {long, after_long} <= set(seen)
    assert seen.index(long) <= 7


def test_a_core_has_its_options_already() -> None:
    core = EngineCore(HistoryExecutor(SPEC))
    with pytest.raises(ConfigError, match="a core has its options already"):
        Session(core, bucketed_shapes=True)
    Session(core).close()
    assert not core.executor.is_closed  # type: ignore[attr-defined]
    core.close()
    core.close()
    assert core.executor.is_closed  # type: ignore[attr-defined]


class Constant:
    """The cheapest model: always the same logits."""

    name = "constant"
    notes: tuple[str, ...] = ()
    bucketed_shapes = True
    samples_on_device = False

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._logits = np.zeros((spec.pool.max_batch_size, spec.vocab_size), np.float32)

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        return self._logits[: len(inputs.past_lens)]

    def during_next_step(self, work: Any) -> None: ...

    def copy_pages(self, pages: object) -> None: ...

    def poison_pages(self, page_ids: object) -> None: ...

    def close(self) -> None: ...


def test_memory_is_flat_over_a_hundred_thousand_steps() -> None:
    core = EngineCore(Constant(make_spec(max_batch_size=2, max_num_tokens=100)))
    prompts = [np.asarray(prompt_of(250, seed=seed)) for seed in range(5)]
    number = finished = 0

    def deliver(result: StepResult) -> None:
        nonlocal finished
        finished += result.finished is not None

    def run(steps: int) -> int:
        """Allocated blocks after some steps, with whatever work is needed for them."""
        nonlocal number
        for _ in range(steps):
            if number - finished < 3:
                prompt = prompts[number % 5][: 1 + 61 * (number % 4)]
                core.submit(prompt, 120, deliver=deliver)
                number += 1
            core.step()
        gc.collect()
        return sys.getallocatedblocks()

    early = run(10_000)
    late = run(90_000)
    stats = core.stats()
    assert stats.prefill_steps + stats.decode_steps == 100_000
    assert stats.pages_evicted > 100
    assert abs(late - early) < 500
    assert number > 1000
