"""Decode steps that are handed over before the tokens of the one before are known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec, open_toy, prompt_of
from session.test_sampling import Spread

from paged_trt.plugins.errors import ExecutionError, SequenceError
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import Choices, Draw, Executor, StepInputs
from paged_trt.runtime.late_tokens import LateStep, LateTokens
from paged_trt.runtime.requests import GREEDY, GenerationRequest, SamplingSpec, TokenEvent
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.scheduler import StepPolicy
from paged_trt.runtime.sequences import FinishReason, LiveSequence

PROMPTS = [prompt_of(length, seed=length) for length in (130, 3, 257, 126, 1)]
SPECS = [
    SamplingSpec(temperature=1.0, seed=5),
    SamplingSpec(num_logprobs=0),
    SamplingSpec(temperature=0.7, top_k=5, seed=6, num_logprobs=0),
    GREEDY,
    SamplingSpec(temperature=2.0, top_p=0.8, seed=7, num_logprobs=3),
]


class Watched(LateTokens):
    """Notes the order of calls and the ids as they were handed over."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.calls: list[str] = []
        self.ids: list[list[int]] = []

    def launch(self, inputs: StepInputs, draw: Draw | None) -> LateStep:
        self.calls.append("launch")
        assert self.calls.count("launch") <= self.calls.count("collect") + 2
        self.ids.append(inputs.input_ids.tolist())
        return super().launch(inputs, draw)

    def collect(self, step: LateStep) -> Choices:
        self.calls.append("collect")
        return super().collect(step)


class Clients:
    """Sequences of one core, and what each of them got."""

    def __init__(self, executor: Any, *, pipelines: bool = True, **options: Any) -> None:
        if pipelines:
            executor.launcher = self.launcher = Watched(executor)
        self.core = EngineCore(executor, poisons_freed=True, pipelines=pipelines, **options)
        self.results: dict[int, list[StepResult]] = {}

    def add(self, prompt: Sequence[int], count: int, **options: Any) -> LiveSequence:
        mine: list[StepResult] = []
        sequence = self.core.submit(np.asarray(prompt), count, deliver=mine.append, **options)
        self.results[sequence.sequence_id] = mine
        return sequence

    def fork(self, source: LiveSequence, **options: Any) -> LiveSequence:
        mine: list[StepResult] = []
        fork = self.core.fork(source, deliver=mine.append, **options)
        self.results[fork.sequence_id] = mine
        return fork

    def finish(self) -> None:
        while self.core.has_work:
            self.core.step()
            self.core.batch.registry.check()
        assert self.core.stats().pages_in_use == 0

    def tokens(self, sequence: LiveSequence) -> tuple[int, ...]:
        results = self.results[sequence.sequence_id]
        return tuple(each.token for each in results if each.error is None)

    def ends(self, sequence: LiveSequence) -> list[FinishReason]:
        results = self.results[sequence.sequence_id]
        return [each.finished for each in results if each.finished is not None]


def test_a_step_is_handed_over_before_the_one_before_is_read() -> None:
    clients = Clients(HistoryExecutor(make_spec()))
    sequence = clients.add([1, 2, 3], 5)
    clients.core.step()
    assert clients.launcher.calls == ["launch", "launch", "collect"]
    clients.core.step()
    assert clients.launcher.calls[3:] == ["launch", "collect"]
    clients.finish()
    assert clients.launcher.calls.count("launch") == 5
    # Whoever runs the second step does not know the first one's token.
    assert clients.launcher.ids == [[1, 2, 3]] + [[-1]] * 4
    assert clients.tokens(sequence) == continuation([1, 2, 3], 5, VOCAB)


def results_of(
    executor: Any,
    *,
    pipelines: bool,
    specs: Sequence[SamplingSpec] = SPECS,
    stops: Iterable[int] = (),
    **options: Any,
) -> list[list[StepResult]]:
    """Prompts that arrive over time, one of them twice."""
    clients = Clients(executor, pipelines=pipelines, **options)
    for index, prompt in enumerate([*PROMPTS, PROMPTS[2]]):
        spec = specs[index % len(specs)]
        clients.add(
            prompt,
            12,
            sampling=spec,
            stop_token_ids=frozenset(stops),
            keep_logits=index == 1,
        )
        for _ in range(2):
            clients.core.step()
    clients.finish()
    if pipelines:
        assert min(map(min, clients.launcher.ids)) < 0
    return list(clients.results.values())


def assert_same(found: list[list[StepResult]], expected: list[list[StepResult]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one._replace(logits=None) == other._replace(logits=None)
            assert (one.logits is None) == (other.logits is None)
            if one.logits is not None:
                np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize(
    "policy", [StepPolicy(), StepPolicy(mixes=False), StepPolicy(step_tokens=40)]
)
@pytest.mark.parametrize("reuses", [True, False])
def test_results_do_not_depend_on_it(policy: StepPolicy, reuses: bool) -> None:
    """Drawn and greedy tokens, logprobs, logits that are kept, chunks, and end tokens."""
    found, expected = (
        results_of(
            Spread(make_spec()),
            pipelines=pipelines,
            policy=policy,
            reuses_prefixes=False,
            stops=range(0, VOCAB, 17),
        )
        for pipelines in (True, False)
    )
    assert_same(found, expected)
    assert any(each[-1].finished is FinishReason.EOS for each in found)
    assert any(each[-1].finished is FinishReason.LENGTH for each in found)
    if reuses:
        again = results_of(Spread(make_spec()), pipelines=True, policy=policy, stops=[9])
        plain = results_of(Spread(make_spec()), pipelines=False, policy=policy, stops=[9])
        for mine, theirs in zip(again, plain, strict=True):
            assert [each.token for each in mine] == [each.token for each in theirs]


@pytest.mark.parametrize("greedy_in_engine", [False, True])
def test_real_keys_and_values(greedy_in_engine: bool, tmp_path: Path) -> None:
    executor = open_toy(make_spec(greedy_in_engine=greedy_in_engine), tmp_path)
    specs = [GREEDY] if greedy_in_engine else SPECS
    found, expected = (
        results_of(executor, pipelines=pipelines, specs=specs, reuses_prefixes=False)
        for pipelines in (True, False)
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert [each.token for each in mine] == [each.token for each in theirs]
        np.testing.assert_allclose(
            [each.logprob or 0 for each in mine], [each.logprob or 0 for each in theirs], atol=1e-3
        )
    executor.close()


def test_an_end_token_is_the_last_one_and_its_surplus_step_gives_nothing() -> None:
    executor = HistoryExecutor(make_spec())
    clients = Clients(executor)
    prompt = prompt_of(126)
    text = continuation(prompt, 12, VOCAB)
    # The third token ends the first text: the row that ran for a fourth one crossed into a page.
    assert text[2] not in text[:2]
    stopped = clients.add(prompt, 12, stop_token_ids=frozenset({text[2]}))
    other = clients.add([5, 6], 6)
    while not clients.ends(stopped):
        clients.core.step()
    assert executor.pool[:, 0].max() >= 0
    assert clients.core.stats().pages_in_use == 1
    clients.finish()
    assert clients.tokens(stopped) == text[:3]
    assert clients.ends(stopped) == [FinishReason.EOS]
    assert clients.tokens(other) == continuation([5, 6], 6, VOCAB)
    assert clients.core.stats().new_tokens == 9


def test_a_limit_is_known_beforehand_and_costs_no_step() -> None:
    clients = Clients(HistoryExecutor(make_spec()))
    sequences = [clients.add([7, index], 3 + index) for index in range(3)]
    clients.finish()
    for index, sequence in enumerate(sequences):
        assert clients.tokens(sequence) == continuation([7, index], 3 + index, VOCAB)
    # Rows of the steps behind the prompts: two sequences go on, then one.
    assert [len(ids) for ids in clients.launcher.ids[1:]] == [3, 3, 2, 1]


def test_rows_move_while_a_step_runs() -> None:
    """The second of three ends: the third one's token comes from row 2 and goes on in row 1."""
    clients = Clients(HistoryExecutor(make_spec()))
    sequences = [clients.add([index], count) for index, count in enumerate((6, 2, 6))]
    clients.finish()
    for index, (sequence, count) in enumerate(zip(sequences, (6, 2, 6), strict=True)):
        assert clients.tokens(sequence) == continuation([index], count, VOCAB)
    assert [-1, -3] in clients.launcher.ids


@pytest.mark.parametrize("length", [126, 127, 128, 200])
def test_a_fork_goes_on_from_what_is_known(length: int, tmp_path: Path) -> None:
    """A step runs for its source: the fork runs that token again on a page of its own."""
    executor = open_toy(make_spec(max_batch_size=4), tmp_path)
    expected = {}
    for pipelines in (True, False):
        clients = Clients(executor, pipelines=pipelines)
        source = clients.add(prompt_of(length), 8, sampling=SPECS[0])
        with pytest.raises(SequenceError, match="cannot be forked now"):
            clients.fork(source)
        clients.core.step()
        clients.core.step()
        forks = [clients.fork(source, sampling=SPECS[2]), clients.fork(source, sampling=GREEDY)]
        for fork in forks:
            assert fork.num_unknown == 0
        # A fork is in the step behind the one that runs.
        while not clients.tokens(forks[0]):
            clients.core.step()
        clients.fork(forks[0], sampling=SPECS[0])
        clients.finish()
        expected[pipelines] = [
            [each.token for each in results] for results in clients.results.values()
        ]
    assert expected[True] == expected[False]
    assert [len(each) for each in expected[True]] == [8, 6, 6, 5]
    executor.close()


@pytest.mark.parametrize("windows", [(1, 1), (127, 129), (130, 200)])
def test_pages_below_the_windows_go_when_their_step_is_done(
    windows: tuple[int, int], tmp_path: Path
) -> None:
    """Not when it is handed over: a fork begins one token behind it."""
    executor = open_toy(make_spec(windows=windows, capacity=640), tmp_path)
    found = {}
    for pipelines in (True, False):
        clients = Clients(executor, pipelines=pipelines, reuses_prefixes=False)
        source = clients.add(prompt_of(250), 20)
        for index in range(12):
            clients.core.step()
            if index in (4, 8):
                clients.fork(source, sampling=SPECS[0])
        clients.finish()
        found[pipelines] = [
            [each.token for each in results] for results in clients.results.values()
        ]
    assert found[True] == found[False]
    executor.close()


def test_what_was_generated_is_found_by_the_next_prompt() -> None:
    """Pages are described once the tokens on them are known."""
    clients = Clients(HistoryExecutor(make_spec()))
    first = clients.add(prompt_of(100), 60)
    clients.finish()
    text = [*prompt_of(100), *clients.tokens(first)]
    second = clients.add([*text, 4], 3)
    clients.finish()
    assert clients.tokens(second) == continuation([*text, 4], 3, VOCAB)
    assert clients.results[second.sequence_id][0].num_cached_tokens == TOKENS_PER_PAGE


def test_a_cancelled_sequence_takes_nothing_from_the_step_that_runs() -> None:
    clients = Clients(HistoryExecutor(make_spec()))
    gone, stays = clients.add(prompt_of(128), 20), clients.add([3], 6)
    clients.core.step()
    assert gone.num_unknown == 1
    clients.core.cancel([gone])
    assert clients.core.stats().pages_in_use == 1
    # Its pages belong to somebody else at once.
    other = clients.add(prompt_of(300, seed=4), 5)
    clients.finish()
    assert clients.ends(gone) == []
    assert len(clients.tokens(gone)) == 1
    assert clients.tokens(stays) == continuation([3], 6, VOCAB)
    assert clients.tokens(other) == continuation(prompt_of(300, seed=4), 5, VOCAB)


def test_after_everybody_is_gone_the_next_prompt_is_served_at_once() -> None:
    clients = Clients(HistoryExecutor(make_spec()))
    gone = clients.add([1], 20)
    clients.core.step()
    clients.core.cancel([gone])
    assert not clients.core.has_work
    assert not clients.core.step()
    after = clients.add([2], 2)
    clients.core.step()
    assert clients.tokens(after) == continuation([2], 1, VOCAB)
    clients.finish()


def test_closing_while_a_step_runs_ends_everybody_once() -> None:
    executor = HistoryExecutor(make_spec())
    clients = Clients(executor)
    sequences = [clients.add([index], 9) for index in range(5)]
    clients.core.step()
    clients.core.close()
    assert executor.is_closed
    for sequence in sequences:
        assert clients.ends(sequence) == [FinishReason.ERROR]
    assert clients.core.stats().pages_in_use == 0


def test_an_error_comes_late_and_ends_the_step_behind_it_too() -> None:
    executor = HistoryExecutor(make_spec())
    clients = Clients(executor)
    sequences = [clients.add([index], 9) for index in range(2)]
    clients.core.step()
    executor.failure = ExecutionError("broken")
    # The step that is read ran before; the one that is handed over fails.
    clients.core.step()
    assert [len(clients.tokens(each)) for each in sequences] == [2, 2]
    executor.failure = None
    clients.core.step()
    for sequence in sequences:
        assert clients.ends(sequence) == [FinishReason.ERROR]
        assert clients.tokens(sequence) == continuation([sequence.sequence_id], 2, VOCAB)
    assert clients.core.stats().failed_steps == 1
    after = clients.add([9], 4)
    clients.finish()
    assert clients.tokens(after) == continuation([9], 4, VOCAB)


def test_pages_that_run_out_wait_for_the_running_step() -> None:
    """Who is preempted knows all of its tokens."""
    found = {}
    for pipelines in (True, False):
        clients = Clients(HistoryExecutor(make_spec()), pipelines=pipelines)
        registry = clients.core.batch.registry
        held = registry.allocate(registry.num_free - 3)
        sequences = [clients.add(prompt_of(120, seed=seed), 60) for seed in range(3)]
        while clients.core.has_work:
            clients.core.step()
        registry.release(held)
        found[pipelines] = [clients.tokens(each) for each in sequences]
        assert clients.core.stats().preemptions > 0
    assert found[True] == found[False]


def test_host_work_is_done_while_a_step_runs() -> None:
    clients = Clients(HistoryExecutor(make_spec()))
    clients.add([1], 3)
    clients.core.step(meanwhile=lambda: clients.launcher.calls.append("host"))
    assert clients.launcher.calls == ["launch", "launch", "host", "collect"]


@pytest.mark.parametrize(
    ("has_launcher", "asked", "overlaps"),
    [(True, {}, True), (True, {"pipelines": False}, False), (False, {}, False)],
)
def test_steps_overlap_where_the_executor_has_a_launcher(
    has_launcher: bool, asked: dict[str, bool], overlaps: bool
) -> None:
    """One that computes at once gains nothing and would hold back its first token."""
    executor: Any = HistoryExecutor(make_spec())
    launcher = Watched(executor)
    if has_launcher:
        executor.launcher = launcher
    core, got, after = EngineCore(executor, **asked), [], []
    core.submit(np.asarray([1]), 3, deliver=got.append)
    while core.has_work:
        core.step()
        after.append(len(got))
    assert bool(launcher.calls) is overlaps
    assert after == [1, 2, 3]


def test_streams_that_come_and_go_while_steps_overlap() -> None:
    """Every fourth client leaves after two tokens, as one does that has found its stop string."""
    core = EngineCore(HistoryExecutor(make_spec(), bucketed=True), pipelines=True)
    prompts = [prompt_of(3 + 11 * index, seed=index) for index in range(16)]

    async def read(session: AsyncSession, index: int) -> list[TokenEvent]:
        request = GenerationRequest(
            request_id=str(index), prompt_tokens=tuple(prompts[index]), max_new_tokens=30
        )
        events: list[TokenEvent] = []
        stream = session.stream(request)
        async for event in stream:
            events.append(event)
            if index % 4 == 3 and len(events) == 2:
                await stream.aclose()
                break
        return events

    async def main() -> list[list[TokenEvent]]:
        session = AsyncSession(core)
        try:
            return await asyncio.gather(*(read(session, index) for index in range(16)))
        finally:
            await session.aclose()

    for index, events in enumerate(asyncio.run(main())):
        tokens = tuple(event.token for event in events)
        assert tokens == continuation(prompts[index], 30, VOCAB)[: len(tokens)]
        assert len(tokens) == (2 if index % 4 == 3 else 30)
        ends = [event.finish_reason for event in events if event.finish_reason is not None]
        assert ends == ([] if index % 4 == 3 else ["length"])
    assert core.stats().pages_in_use == 0
    assert core.stats().finished >= 12
    core.batch.registry.check()
    core.close()
