"""One row of a step has logits that are no numbers: it ends alone, and nobody reuses its pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, dense_greedy, make_spec, open_toy, prompt_of

from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.plugins.tensors import NO_NEXT_TOKEN
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.requests import SamplingSpec
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.sampler import Sampling, sample

PIPELINES = pytest.mark.parametrize("pipelines", [False, True], ids=["plain", "pipelined"])
MODES = ("logits", "engine", "kernel")
BROKEN = VOCAB - 1
"""A token that no other prompt of these tests holds."""
SPOILT = [1, 2, 3]
"""A prompt whose second token is its last one."""
HEALTHY = [[token % BROKEN for token in prompt_of(length)] for length in (200, 3)]


class BreaksAtToken(HistoryExecutor):
    def __init__(self, mode: str, value: float = np.nan) -> None:
        super().__init__(make_spec(greedy_in_engine=mode == "engine", max_num_tokens=150))
        self.samples_on_device = mode == "kernel"
        self.value = value

    def step(self, inputs: StepInputs) -> Any:
        logits = super().step(inputs)
        # No token of a healthy sequence is the broken one.
        logits[:, 0] += logits[:, BROKEN]
        logits[:, BROKEN] = 0
        for row, (past, new) in enumerate(
            zip(inputs.past_lens, np.diff(inputs.query_start_offsets), strict=True)
        ):
            pages = inputs.page_table[row]
            history = self.pool[pages[pages >= 0]].ravel()[: past + new].tolist()
            if BROKEN in history or (history[:3] == SPOILT and len(history) > 4):
                logits[row] = self.value
        return logits

    def step_tokens(self, inputs: StepInputs) -> Any:
        """As the engine's own choice: a broken row says so by its id."""
        logits = self.step(inputs)
        tokens = logits.argmax(axis=1)
        tokens[np.isnan(logits).any(axis=1)] = NO_NEXT_TOKEN
        tokens[np.isneginf(logits).all(axis=1)] = VOCAB
        return tokens

    def step_sampled(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        specs: Sequence[Sampling],
        steps: Sequence[int],
        *,
        with_logprobs: bool = False,
    ) -> Any:
        """As the kernel."""
        logits = self.step(inputs)[list(rows)]
        return sample(logits, specs, steps, with_logprobs=with_logprobs)


class Run:
    """Sequences of one core, by what was delivered for each."""

    def __init__(self, executor: Any, pipelines: bool = False) -> None:
        self.core = EngineCore(executor, poisons_freed=True, pipelines=pipelines)
        self.results: list[list[StepResult]] = []

    def submit(self, prompt: Sequence[int], count: int, **options: Any) -> Any:
        mine: list[StepResult] = []
        self.results.append(mine)
        return self.core.submit(np.asarray(prompt), count, deliver=mine.append, **options)

    def finish(self) -> None:
        while self.core.has_work:
            self.core.step()
        self.core.batch.registry.check()
        assert self.core.stats().pages_in_use == 0
        for results in self.results:
            assert [result.finished is not None for result in results].count(True) == 1

    def tokens(self, index: int) -> tuple[int, ...]:
        return tuple(result.token for result in self.results[index] if result.error is None)

    def error(self, index: int) -> str:
        assert isinstance(self.results[index][-1].error, ExecutionError)
        return str(self.results[index][-1].error)


def healthy_tokens(mode: str, count: int) -> list[tuple[int, ...]]:
    run = Run(BreaksAtToken(mode))
    for prompt in HEALTHY:
        run.submit(prompt, count)
    run.finish()
    return [run.tokens(index) for index in range(len(HEALTHY))]


@PIPELINES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN"), (-np.inf, "nothing above minus")])
@pytest.mark.parametrize("sampling", [SamplingSpec(), SamplingSpec(num_logprobs=0)])
def test_a_broken_row_ends_alone(
    mode: str, value: float, what: str, sampling: SamplingSpec, pipelines: bool
) -> None:
    expected = healthy_tokens(mode, 6)
    run = Run(BreaksAtToken(mode, value), pipelines)
    run.submit(HEALTHY[0], 6)
    run.submit(SPOILT, 20, sampling=sampling)
    run.submit(HEALTHY[1], 6)
    run.finish()
    assert f"has no largest value ({what}" in run.error(1)
    assert len(run.results[1]) == 3
    assert [run.tokens(0), run.tokens(2)] == expected
    stats = run.core.stats()
    assert (stats.failed, stats.finished, stats.failed_steps) == (1, 2, 0)


@PIPELINES
@pytest.mark.parametrize("mode", MODES)
def test_the_first_broken_chunk_of_a_prompt_is_seen_and_never_reused(
    mode: str, pipelines: bool
) -> None:
    """A chunk samples nothing, but its pages would be found by the next prompt that begins so."""
    prompt = [*HEALTHY[0][:140], BROKEN, *HEALTHY[0][141:], *HEALTHY[0][:100]]
    run = Run(BreaksAtToken(mode), pipelines)
    for index in range(2):
        run.submit(prompt, 3)
        run.finish()
        assert len(run.results[index]) == 1
        assert "(NaN)" in run.error(index)
        assert run.results[index][0].num_cached_tokens == 0
        # 150 tokens of the prompt's 300: the rest was not run.
        assert run.core.stats().prefill_steps == index + 1
    assert run.core.stats().pages_retained == 0


@PIPELINES
@pytest.mark.parametrize("mode", MODES)
def test_who_shares_pages_with_a_broken_sequence_goes_on(mode: str, pipelines: bool) -> None:
    prompt = HEALTHY[0]
    alone = Run(BreaksAtToken(mode))
    alone.submit(prompt, 80)
    alone.finish()
    run = Run(BreaksAtToken(mode), pipelines)
    run.submit(prompt, 80)
    while len(run.results[0]) < 2:
        run.core.step()
    run.submit([*prompt, BROKEN], 5)
    run.finish()
    assert run.results[1][0].num_cached_tokens == TOKENS_PER_PAGE
    assert len(run.results[1]) == 1
    assert run.tokens(0) == alone.tokens(0)
    # Its pages might hold what is no number; the next one runs them again.
    run.submit(prompt, 3)
    run.finish()
    assert run.results[2][0].num_cached_tokens == 0
    assert run.tokens(2) == alone.tokens(0)[:3]


@PIPELINES
def test_keys_and_values_that_are_no_numbers(tmp_path: Path, pipelines: bool) -> None:
    """On the reference executor: pages of one sequence are spoilt while it runs."""
    executor = open_toy(make_spec(), tmp_path)
    prompts = [prompt_of(140, seed=5), prompt_of(200, seed=6), prompt_of(3, seed=7)]
    run = Run(executor, pipelines)
    sequences = [run.submit(prompt, 4) for prompt in prompts]
    while not all(run.results):
        run.core.step()
    executor.poison_pages(sequences[1].pages)
    run.finish()
    assert "(NaN)" in run.error(1)
    for index in (0, 2):
        assert run.tokens(index) == dense_greedy(tuple(prompts[index]), 4)[0]
    # The same prompt again, on whatever pages: nothing of what it left is found.
    run.submit(prompts[1], 4)
    run.submit(prompts[0], 4)
    run.finish()
    assert run.tokens(3) == dense_greedy(tuple(prompts[1]), 4)[0]
    assert [run.results[index][0].num_cached_tokens for index in (3, 4)] == [0, TOKENS_PER_PAGE]
    executor.close()


def test_a_full_step_of_sharers_takes_one_page_less_than_they_are() -> None:
    """The last one who writes to a shared page may write to the page itself."""
    run = Run(HistoryExecutor(make_spec()))
    source = run.submit([1, 2, 3], 4)
    run.core.step()
    forks: list[list[StepResult]] = [[], []]
    for results in forks:
        run.core.fork(source, deliver=results.append)
    registry = run.core.batch.registry
    held = registry.allocate(registry.num_free - 2)
    run.core.step()
    assert run.core.stats().preemptions == 0
    assert registry.num_free == 0
    assert [len(results) for results in forks] == [1, 1]
    registry.release(held)
    run.finish()
    expected = continuation([1, 2, 3], 4, VOCAB)
    assert run.tokens(0) == expected
    for results in forks:
        assert tuple(result.token for result in results) == expected[1:]
        assert results[-1].finished is not None


def test_a_page_that_somebody_outside_of_the_step_holds_is_copied_for_every_sharer() -> None:
    """Then one page less would write into what the other one still reads."""
    run = Run(HistoryExecutor(make_spec()))
    source = run.submit([1, 2, 3], 4)
    run.core.step()
    forked: list[StepResult] = []
    run.core.fork(source, deliver=forked.append)
    registry = run.core.batch.registry
    # As if a third sequence, which does not run in the next step, shared the page.
    registry.share(source.pages)
    shared = list(source.pages)
    held = registry.allocate(registry.num_free - 1)
    run.core.step()
    assert run.core.stats().preemptions == 1
    assert shared[0] not in source.pages
    registry.release([*held, *shared])
    run.finish()
    assert tuple(result.token for result in forked) == continuation([1, 2, 3], 4, VOCAB)[1:]
