"""Threads that share a core: who waits is next, whoever steps in a loop; no request is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from polling import PATIENCE_SECONDS, wait_until
from session.gated_executor import Gated
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec

from paged_trt.plugins.errors import SequenceError
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.sequences import LiveSequence
from paged_trt.runtime.session import Session

SPEC = make_spec(max_batch_size=4)
PROMPT = np.asarray([1])


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def start_and_see_it_wait(core: EngineCore, work: Callable[[], object]) -> threading.Thread:
    last = core._lock._last
    thread = start(work)
    wait_until(lambda: core._lock._last is not last)
    assert core._lock.is_waited_for
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def note_steps(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, core: EngineCore) -> Any:
    """Numbers of steps that were run when a method was called."""
    found: list[int] = []
    original = getattr(owner, name)

    def noting(*arguments: Any) -> Any:
        found.append(len(core.executor.shapes))  # type: ignore[attr-defined]
        return original(*arguments)

    monkeypatch.setattr(owner, name, noting)
    return found


@pytest.mark.parametrize("what", ["close", "cancel", "fork"])
def test_what_waits_is_done_after_the_step_that_runs(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Gated(SPEC, free_steps=1)
    core = EngineCore(executor)
    sequence = core.submit(PROMPT, 300, deliver=lambda _: None)

    def loop() -> None:
        try:
            while core.step():
                pass
        except SequenceError:
            assert what == "close"

    owner, method, act = {
        "close": (executor, "close", core.close),
        "cancel": (core.batch, "drop", lambda: core.cancel([sequence])),
        "fork": (core.batch, "fork", lambda: core.fork(sequence, deliver=lambda _: None)),
    }[what]
    done_at = note_steps(monkeypatch, owner, method, core)
    looping = start(loop)
    executor.gate.wait_for_step()
    acting = start_and_see_it_wait(core, act)
    executor.gate.open()
    join(acting, looping)
    assert done_at[0] == 2
    assert len(executor.shapes) == (300 if what == "fork" else 2)
    core.batch.registry.check()


def test_two_sessions_in_threads_do_not_keep_a_third_thread_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = Gated(SPEC)
    core = EngineCore(executor)
    closed_at = note_steps(monkeypatch, executor, "close", core)
    failures: list[SequenceError] = []

    def generate() -> None:
        try:
            Session(core).generate([[1], [2]], 300)
        except SequenceError as error:
            failures.append(error)

    stepping = start(generate)
    executor.gate.wait_for_step()
    waiting = start_and_see_it_wait(core, generate)
    closing = start_and_see_it_wait(core, core.close)
    executor.gate.open()
    join(stepping, waiting, closing)
    # The step that ran, and the one of the thread that had asked before.
    assert closed_at == [2]
    assert len(failures) == 2
    assert core.stats().sequences == core.stats().pages_in_use == 0


def test_two_sessions_in_threads_take_turns() -> None:
    executor = Gated(SPEC)
    core = EngineCore(executor)
    results: dict[int, tuple[int, ...]] = {}
    stepped_by: list[int] = []
    step = executor.step

    def noting(inputs: Any) -> Any:
        logits = step(inputs)
        stepped_by.append(threading.get_ident())
        return logits

    executor.step = noting  # type: ignore[method-assign]

    def generate(token: int) -> None:
        [result] = Session(core).generate([[token]], 50)
        results[token] = result.tokens

    first = start(lambda: generate(1))
    executor.gate.wait_for_step()
    second = start_and_see_it_wait(core, lambda: generate(2))
    executor.gate.open()
    join(first, second)
    assert results == {token: continuation([token], 50, VOCAB) for token in (1, 2)}
    # The second one came when one step was run, and its tokens needed 50 more; a thread that
    # waits while the other one steps is always next.
    assert len(stepped_by) == 51
    assert set(stepped_by) == {first.ident, second.ident}
    assert stepped_by[:2] == [first.ident, second.ident]


CLOSE, PUT, CANCEL = "close", "put", "cancel"


@pytest.mark.parametrize(
    "order", [(CLOSE, PUT), (PUT, CLOSE), (CLOSE, PUT, CANCEL), (PUT, CLOSE, CANCEL)]
)
def test_a_submission_that_races_the_close_is_refused_or_ends(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core is closed between the check that it is open and the end of `submit`."""
    core = EngineCore(HistoryExecutor(SPEC))
    put = core._waiting.put

    def race(sequence: LiveSequence) -> None:
        acts = {CLOSE: core.close, PUT: lambda: put(sequence), CANCEL: lambda: core.cancel([])}
        for name in order:
            acts[name]()

    monkeypatch.setattr(core._waiting, "put", race)
    errors: list[Exception | None] = []
    try:
        core.submit(PROMPT, 5, deliver=lambda result: errors.append(result.error))
    except SequenceError as error:
        errors.append(error)
    assert len(errors) == 1
    assert "closed" in str(errors[0])
    assert core.stats().sequences == 0
    assert not core.has_work


@pytest.mark.parametrize("what", ["cancel", "close"])
def test_a_callback_may_end_other_sequences_of_its_step(what: str) -> None:
    core = EngineCore(HistoryExecutor(SPEC))
    sequences: list[LiveSequence] = []
    results: dict[int, list[StepResult]] = {}

    def deliver(result: StepResult) -> None:
        results.setdefault(result.sequence_id, []).append(result)
        if sum(map(len, results.values())) == 5:
            core.cancel(sequences) if what == "cancel" else core.close()

    sequences += [core.submit(np.asarray([token]), 9, deliver=deliver) for token in (1, 2, 3)]
    for _ in range(2):
        core.step()
    # The second of the second step ended all three: the third one's token comes too late.
    assert [len([each for each in found if each.error is None]) for found in results.values()] == [
        2,
        2,
        1,
    ]
    assert [found[-1].error is not None for found in results.values()] == [what == "close"] * 3
    assert core.stats().sequences == core.stats().pages_in_use == 0
    core.batch.registry.check()
