"""Scenarios run through sessions, step by step, so that a failing step is a result too."""

from __future__ import annotations

import collections

import numpy as np

from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.dense import Generation
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.scenarios import Scenario
from paged_trt.runtime.session import Session, StepResult

NO_TOKEN = -1
"""Token of a step that gave none; its logits are NaN."""


class PagedGenerator:
    """Greedy generations of whole scenarios on shuffled pages.

    `Session.generate` would lose the logits before a step that fails, and finding that step
    is what a comparison is for.

    Args:
        executor: runs the model; it stays open.
        seed: of the order in which pages are handed out, so that no two neighbours of a
            sequence are neighbours in the pool but by chance.
        reuses_prefixes: as of Session.

    Attributes:
        failures: messages of the steps that failed.
    """

    def __init__(self, executor: Executor, *, seed: int, reuses_prefixes: bool = True) -> None:
        self._executor = executor
        self._reuses_prefixes = reuses_prefixes
        order = np.random.default_rng(seed).permutation(executor.spec.pool.num_pages)
        self._page_order: list[int] = order.tolist()
        self.failures: list[str] = []

    def __call__(self, scenario: Scenario) -> list[Generation]:
        """Run one scenario; a generation per prompt, NaN from a failing step on."""
        results: list[list[StepResult]] = [[] for _ in scenario.prompts]
        try:
            self._run(scenario, results)
        except ExecutionError as error:
            self.failures.append(f"{scenario.name}: {error}")
        vocab_size = self._executor.spec.vocab_size
        return [_generation(each, scenario.num_new_tokens, vocab_size) for each in results]

    def _run(self, scenario: Scenario, results: list[list[StepResult]]) -> None:
        # A session of its own: whatever a failed one still holds goes with it.
        session = Session(
            self._executor, page_order=self._page_order, reuses_prefixes=self._reuses_prefixes
        )
        batch = self._executor.spec.pool.max_batch_size
        waiting = collections.deque(enumerate(scenario.prompts))
        live: dict[int, int] = {}
        while waiting or live:
            while waiting and len(live) < batch:
                index, prompt = waiting.popleft()
                sequence_id = session.add(
                    prompt,
                    scenario.num_new_tokens,
                    prefill_chunk=scenario.prefill_chunk,
                    keep_logits=True,
                )
                live[sequence_id] = index
            for result in session.step():
                results[live[result.sequence_id]].append(result)
                if result.finished is not None:
                    del live[result.sequence_id]


def _generation(results: list[StepResult], num_new_tokens: int, vocab_size: int) -> Generation:
    tokens = np.full(num_new_tokens, NO_TOKEN, np.int64)
    logits = np.full((num_new_tokens, vocab_size), np.nan, np.float32)
    for step, result in enumerate(results):
        tokens[step] = result.token
        logits[step] = result.logits
    return Generation(tokens, logits)
