"""What a session refuses, loses and keeps; the executor stores token ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec, prompt_of

from paged_trt.plugins.errors import (
    ExecutionError,
    KvPoolError,
    PagesExhausted,
    SequenceError,
)
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.scheduler import StepPolicy
from paged_trt.runtime.sequences import FinishReason
from paged_trt.runtime.session import Session


@pytest.fixture
def executor() -> HistoryExecutor:
    return HistoryExecutor(make_spec())


@pytest.fixture
def session(executor: HistoryExecutor) -> Session:
    return Session(executor)


def assert_untouched(session: Session) -> None:
    stats = session.stats()
    assert (stats.pages_in_use, stats.sequences) == (0, 0)
    session.core.batch.registry.check()


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 1, "a prompt of 0 tokens"),
        (prompt_of(321), 1, "321 tokens and the engine takes max_input_len=320"),
        (
            prompt_of(300),
            85,
            "300 prompt tokens and max_new_tokens=85 make 385, over max_kv_cache_capacity=384",
        ),
        ([1, 2, 96], 1, "token 96 at position 2 is outside the vocabulary of 96"),
        ([1, -1], 1, "token -1 at position 1 is outside the vocabulary of 96"),
        ([1.0, 2.0], 1, "integer token ids, got shape .* of float64"),
        ([[1, 2]], 1, "integer token ids, got shape .*1, 2"),
        # One list where a list of lists belongs.
        (1, 1, r"one list of integer token ids, got shape \[\] of int64"),
        ([1], 0, "`max_new_tokens` must be an int from 1, got 0"),
        ([1], True, "`max_new_tokens` must be an int from 1, got True"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_changes(
    session: Session, prompt: Any, count: int, message: str
) -> None:
    with pytest.raises(SequenceError, match=message):
        session.add(prompt, count)
    with pytest.raises(SequenceError, match=f"prompt [01] of 2: .*{message}"):
        session.generate([[1], prompt], count)
    assert_untouched(session)


def test_prompts_may_be_any_iterable_and_are_copied(session: Session) -> None:
    prompt = np.asarray(prompt_of(4))
    expected = continuation(prompt.tolist(), 2, VOCAB)
    sequence_id = session.add(prompt, 2)
    prompt[:] = 0
    assert [session.step()[0].token for _ in range(2)] == list(expected)
    assert session.generate([iter(prompt_of(4))], 2)[0].tokens == expected
    with pytest.raises(SequenceError, match=f"sequence {sequence_id} is not live"):
        session.release(sequence_id)


def test_more_sequences_than_slots_wait_their_turn(session: Session) -> None:
    prompts = [prompt_of(length) for length in (5, 200, 1, 128, 30, 257, 2)]
    ids = [session.add(prompt, 4) for prompt in prompts]
    session.step()
    assert (session.stats().sequences, session.stats().waiting) == (7, 4)
    seen: list[tuple[int, int]] = []
    # Its own prompts wait behind those that are queued already, which keep their results.
    results = session.generate(prompts, 4, on_token=lambda *pair: seen.append(pair))
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.tokens == continuation(prompt, 4, VOCAB)
        assert result.tokens == tuple(token for each, token in seen if each == index)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.logits is None
    own = session.step()
    for sequence_id, prompt in zip(ids[3:], prompts[3:], strict=True):
        tokens = [each.token for each in own if each.sequence_id == sequence_id]
        assert tuple(tokens) == continuation(prompt, 4, VOCAB)
    assert_untouched(session)


def test_the_whole_capacity_can_be_used(session: Session) -> None:
    prompts = [prompt_of(320, seed=seed) for seed in range(3)]
    for prompt, result in zip(prompts, session.generate(prompts, 64), strict=True):
        assert result.tokens == continuation(prompt, 64, VOCAB)


def test_an_end_token_ends_a_sequence(executor: HistoryExecutor) -> None:
    tokens = continuation(prompt_of(9), 8, VOCAB)
    end = next(token for token in tokens if tokens.index(token) >= 2)
    session = Session(executor, eos_token_ids=[end])
    result = session.generate([prompt_of(9)], 8)[0]
    assert result.tokens == tokens[: tokens.index(end) + 1]
    assert result.finish_reason is FinishReason.EOS


def test_the_youngest_gives_its_pages_and_is_run_again(session: Session) -> None:
    hogged = session.core.batch.registry.allocate(8)
    old = session.add(prompt_of(128), 3)
    young = session.add(prompt_of(150), 3)
    got: dict[int, list[int]] = {old: [], young: []}

    def step() -> None:
        for result in session.step():
            got[result.sequence_id].append(result.token)

    step()
    # The older one needs a second page, and none is free.
    step()
    assert [sequence.sequence_id for sequence in session.core.batch] == [old]
    assert (session.stats().preemptions, session.stats().waiting) == (1, 1)
    while session.stats().sequences:
        step()
    assert tuple(got[old]) == continuation(prompt_of(128), 3, VOCAB)
    assert tuple(got[young]) == continuation(prompt_of(150), 3, VOCAB)
    assert session.stats().pages_in_use == len(hogged)


def test_alone_in_the_pool_a_sequence_ends_with_the_numbers(session: Session) -> None:
    session.core.batch.registry.allocate(10)
    session.add(prompt_of(128), 3)
    waiting = session.add([5, 6], 2)
    assert len(session.step()) == 1
    with pytest.raises(PagesExhausted, match="1 pages are wanted and 0 are free"):
        session.step()
    assert [(each.sequence_id, each.token) for _ in range(2) for each in session.step()] == [
        (waiting, token) for token in continuation([5, 6], 2, VOCAB)
    ]
    assert session.stats().pages_in_use == 10
    assert session.stats().failed == 1


def test_generate_frees_everything_when_pages_run_out(session: Session) -> None:
    session.core.batch.registry.allocate(9)
    with pytest.raises(PagesExhausted, match="3 pages are wanted and 2 are free"):
        session.generate([prompt_of(300)], 3)
    assert (session.stats().pages_in_use, session.stats().sequences) == (9, 0)


def test_pages_that_find_no_row_are_free_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KvPoolError("no row")

    session.add(prompt_of(200), 3)
    monkeypatch.setattr(session.core.batch.table, "commit", refuse)
    with pytest.raises(KvPoolError, match="no row"):
        session.step()
    monkeypatch.undo()
    assert_untouched(session)
    session.add(prompt_of(200), 3)
    assert session.step()[0].token == continuation(prompt_of(200), 1, VOCAB)[0]


@pytest.mark.parametrize("failure", [ExecutionError("broken"), KeyboardInterrupt()])
def test_a_failing_step_loses_its_own_sequences_only(
    executor: HistoryExecutor, failure: BaseException
) -> None:
    session = Session(EngineCore(executor, policy=StepPolicy(mixes=False)))
    survivor = session.add(prompt_of(200), 4)
    tokens = session.step()
    session.add(prompt_of(50), 3)
    # After a prefill step it is the turn of the decode rows.
    tokens += session.step()
    executor.failure = failure
    with pytest.raises(type(failure)):
        session.step()
    executor.failure = None
    assert session.stats().sequences == 1
    tokens += [result for _ in range(2) for result in session.step()]
    assert {result.sequence_id for result in tokens} == {survivor}
    assert tuple(result.token for result in tokens) == continuation(prompt_of(200), 4, VOCAB)
    assert_untouched(session)


def test_an_unknown_error_of_an_executor_has_a_name(
    session: Session, executor: HistoryExecutor
) -> None:
    executor.failure = ZeroDivisionError("odd")
    session.add([1], 1)
    with pytest.raises(ExecutionError, match="a step failed: ZeroDivisionError: odd") as caught:
        session.step()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_untouched(session)


def test_a_callback_that_raises_frees_everything(session: Session) -> None:
    def interrupt(index: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate([prompt_of(200), prompt_of(9)], 3, on_token=interrupt)
    assert_untouched(session)
    assert session.generate([[1, 2]], 2)[0].tokens == continuation([1, 2], 2, VOCAB)


class BadLogits(HistoryExecutor):
    logits: Any = None

    def step(self, inputs: StepInputs) -> Any:
        return self.logits if self.logits is not None else super().step(inputs) * np.nan


def test_logits_that_are_no_numbers_are_an_error() -> None:
    executor = BadLogits(make_spec())
    session = Session(executor)
    with pytest.raises(ExecutionError, match="row 0 of the logits has no largest value"):
        session.generate([[1]], 1)
    executor.logits = np.zeros((2, VOCAB), np.float32)
    with pytest.raises(ExecutionError, match=r"shape \[2, 96\], expected \[1, 96\]"):
        session.generate([[1]], 1)
    assert_untouched(session)


class GreedyEngine(HistoryExecutor):
    """Its engine chooses tokens; the first of them may be spoilt."""

    spoilt: int | None = None

    def __init__(self) -> None:
        super().__init__(make_spec(greedy_in_engine=True))
        self.calls: list[str] = []

    def step(self, inputs: StepInputs) -> Any:
        self.calls.append("logits")
        return super().step(inputs)

    def step_tokens(self, inputs: StepInputs) -> Any:
        self.calls.append("tokens")
        tokens = super().step(inputs).argmax(axis=1)
        if self.spoilt is not None:
            tokens[0] = self.spoilt
        return tokens


def test_an_engine_that_chooses_is_asked_for_tokens_alone() -> None:
    executor = GreedyEngine()
    session = Session(executor)
    expected = [continuation(prompt_of(n), 3, VOCAB) for n in (2, 130)]
    found = session.generate([prompt_of(2), prompt_of(130)], 3, prefill_chunk=100)
    assert [each.tokens for each in found] == expected
    assert set(executor.calls) == {"tokens"}


def test_logits_that_are_kept_are_read_for_the_steps_that_need_them() -> None:
    executor = GreedyEngine()
    session = Session(executor)
    session.add(prompt_of(2), 2, keep_logits=True)
    session.add(prompt_of(5), 4)
    results = [result for _ in range(4) for result in session.step()]
    assert executor.calls == ["logits", "logits", "tokens", "tokens"]
    assert [result.logits is not None for result in results] == [1, 0, 1, 0, 0, 0]
    tokens = tuple(each.token for each in results if each.sequence_id == 1)
    assert tokens == continuation(prompt_of(5), 4, VOCAB)


@pytest.mark.parametrize(("spoilt", "what"), [(-1, "NaN"), (VOCAB, "nothing above minus")])
def test_an_engine_that_found_no_token_is_an_error(spoilt: int, what: str) -> None:
    executor = GreedyEngine()
    executor.spoilt = spoilt
    session = Session(executor)
    with pytest.raises(ExecutionError, match=f"row 0 of the logits has no largest value .{what}"):
        session.generate([[1]], 1)
    assert_untouched(session)


def test_a_chunk_is_at_least_one_token(session: Session) -> None:
    with pytest.raises(SequenceError, match="`prefill_chunk` must be 1 token or more, got 0"):
        session.add([1], 1, prefill_chunk=0)
    assert_untouched(session)


def test_steps_are_pure_and_counted(executor: HistoryExecutor) -> None:
    session = Session(executor, bucketed_shapes=True)
    session.generate([prompt_of(1), prompt_of(1, seed=1), prompt_of(130)], 3)
    assert (session.stats().prefill_steps, session.stats().decode_steps) == (1, 2)
    # Three rows are padded to the bucket 3, which is max_batch_size; two pages to two.
    assert executor.shapes == [(132, 3, 2), (3, 3, 2), (3, 3, 2)]


def test_a_prefill_never_looks_like_a_decode_step(executor: HistoryExecutor) -> None:
    Session(executor).generate([[1], [2]], 1)
    assert executor.shapes == [(3, 2, 1)]


def test_nothing_to_do(session: Session) -> None:
    assert session.step() == []
    assert session.generate([], 3) == []


def test_a_closed_session_refuses(executor: HistoryExecutor) -> None:
    with Session(executor) as session:
        session.add([1, 2], 2)
        session.step()
    session.close()
    assert executor.is_closed
    assert_untouched(session)
    for call in (session.step, lambda: session.add([1], 1), lambda: session.generate([], 1)):
        with pytest.raises(SequenceError, match="the session is closed"):
            call()


@pytest.mark.parametrize("order", [range(10), [0] * 11])
def test_the_page_order_is_a_permutation(executor: HistoryExecutor, order: Iterable[int]) -> None:
    with pytest.raises(KvPoolError, match="each of the 11 pages"):
        Session(executor, page_order=list(order))
