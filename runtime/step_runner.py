"""One planned step: pages prepared, arrays built, model run, tokens chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paged_trt.runtime.batch import Batch, PageCopies
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.sampler import checked_tokens, greedy, sample, top_logprobs
from paged_trt.runtime.scheduler import StepPlan
from paged_trt.runtime.sequences import LiveSequence
from paged_trt.runtime.step import StepBuilder
from paged_trt.runtime.step_sampling import last_token_logits


class Sampled(NamedTuple):
    """The new token of one sequence.

    Attributes:
        sequence: whose token it is; it has not got it yet.
        token: the token.
        logits: `[vocab_size]` float32; None unless the sequence keeps them.
        logprob: natural logarithm of the token's probability; None unless asked for.
        top_logprobs: of the most likely tokens; None unless asked for.
    """

    sequence: LiveSequence
    token: int
    logits: npt.NDArray[np.float32] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class StepRunner:
    """Takes the sequences of a plan one step on.

    Args:
        executor: runs the model.
        batch: rows and pages of the sequences.
        bucketed_shapes: pad N and M to the bucket lists.
    """

    def __init__(self, executor: Executor, batch: Batch, *, bucketed_shapes: bool) -> None:
        self._executor, self._spec = executor, executor.spec
        self._batch = batch
        self._builder = StepBuilder(executor.spec, bucketed=bucketed_shapes)

    def run(self, plan: StepPlan, copies: PageCopies) -> list[Sampled]:
        """Run a step; only when all of it is done do its sequences move on.

        Args:
            plan: its sequences have the pages that they need.
            copies: pages to copy first.

        Returns:
            The new tokens, for those segments that sample.

        Raises:
            Exception: whatever failed; the pools may hold any part of the step.
        """
        if freed := self._batch.registry.take_freed():
            self._executor.poison_pages(freed)
        if copies:
            self._executor.copy_pages(copies)
        inputs = self._builder.build(plan, self._batch.table)
        rows = [row for row, segment in enumerate(plan.segments) if segment.samples]
        sequences = [plan.segments[row].sequence for row in rows]
        sampled = self._sampled(inputs, rows, sequences)
        for segment in plan.segments:
            self._batch.advance(segment.sequence, segment.end)
        return sampled

    def _sampled(
        self, inputs: StepInputs, rows: list[int], sequences: list[LiveSequence]
    ) -> list[Sampled]:
        """Run the model; the logits stay on the device where nobody needs them."""
        executor, vocab_size = self._executor, self._spec.vocab_size
        if not any(map(_needs_logits, sequences)):
            if self._spec.greedy_in_engine and all(each.sampling.is_plain for each in sequences):
                tokens = checked_tokens(executor.step_tokens(inputs)[rows], vocab_size)
                return [Sampled(*pair) for pair in zip(sequences, tokens, strict=True)]
            if executor.samples_on_device:
                return self._drawn(inputs, rows, sequences)
        logits = last_token_logits(executor, inputs, executor.step(inputs))
        return _sample(sequences, logits if len(rows) == len(logits) else logits[rows])

    def _drawn(
        self, inputs: StepInputs, rows: list[int], sequences: list[LiveSequence]
    ) -> list[Sampled]:
        tokens, logprobs = self._executor.step_sampled(
            inputs,
            rows,
            [each.sampling for each in sequences],
            [each.num_new_tokens for each in sequences],
            with_logprobs=any(each.sampling.num_logprobs is not None for each in sequences),
        )
        return [
            Sampled(each, token)
            if each.sampling.num_logprobs is None
            else Sampled(each, token, logprob=logprob, top_logprobs=())
            for each, token, logprob in zip(
                sequences, tokens.tolist(), logprobs.tolist(), strict=True
            )
        ]


def _needs_logits(sequence: LiveSequence) -> bool:
    return sequence.keep_logits or bool(sequence.sampling.num_logprobs)


def _sample(sequences: Sequence[LiveSequence], logits: npt.NDArray[Any]) -> list[Sampled]:
    """Choose a token for each row, `[len(sequences), vocab_size]`."""
    tokens = greedy(logits)
    # Logprobs and draws cost a pass over the vocabulary in float64: only for those that ask.
    asking = [row for row, each in enumerate(sequences) if not each.sampling.is_plain]
    logprobs: dict[int, float] = {}
    if asking:
        specs = [sequences[row].sampling for row in asking]
        steps = [sequences[row].num_new_tokens for row in asking]
        drawn, found = sample(logits[asking], specs, steps)
        for row, token, logprob in zip(asking, drawn.tolist(), found.tolist(), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return [
        _sampled(each, tokens[row], logits[row], logprobs.get(row))
        for row, each in enumerate(sequences)
    ]


def _sampled(
    sequence: LiveSequence, token: int, logits: npt.NDArray[Any], logprob: float | None
) -> Sampled:
    count = sequence.sampling.num_logprobs
    return Sampled(
        sequence,
        token,
        logits=logits.astype(np.float32) if sequence.keep_logits else None,
        logprob=logprob if count is not None else None,
        top_logprobs=tuple(top_logprobs(logits, count)) if count is not None else None,
    )
