"""One planned step: pages prepared, arrays built, model run, tokens chosen."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.batch import Batch, PageCopies
from paged_trt.runtime.executor import Draw, Executor, StepInputs, StepLauncher
from paged_trt.runtime.late_tokens import LateTokens
from paged_trt.runtime.requests import GREEDY, SamplingSpec
from paged_trt.runtime.results import NO_TOKEN
from paged_trt.runtime.sampler import greedy, row_error, sample, top_logprobs
from paged_trt.runtime.scheduler import StepPlan
from paged_trt.runtime.sequences import LiveSequence
from paged_trt.runtime.step import StepBuilder
from paged_trt.runtime.step_sampling import last_token_logits


class Sampled(NamedTuple):
    """The new token of one sequence, or why it has none.

    Attributes:
        sequence: whose token it is; it has not got it yet.
        token: the token; NO_TOKEN with an error.
        position: of the token in the sequence.
        logits: `[vocab_size]` float32; None unless the sequence keeps them.
        logprob: natural logarithm of the token's probability; None unless asked for.
        top_logprobs: of the most likely tokens; None unless asked for.
        error: what is wrong with its logits.
    """

    sequence: LiveSequence
    token: int
    position: int
    logits: npt.NDArray[np.float32] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    error: ExecutionError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step, in the order of its segments.

    Every row is looked at. One that samples nothing, the end of a chunk of a prompt, chooses
    greedily: its logits tell whether its keys and values may be of use to others.
    """

    sequences: list[LiveSequence]
    ends: list[int]
    samples: list[bool]
    sampling: list[SamplingSpec]

    @classmethod
    def of(cls, plan: StepPlan) -> _Rows:
        sequences = [segment.sequence for segment in plan.segments]
        ends = [segment.end for segment in plan.segments]
        # A row gives its sequence a new token where all tokens that it has are run.
        samples = [each.num_tokens == end for each, end in zip(sequences, ends, strict=True)]
        sampling = [
            each.sampling if takes else GREEDY
            for each, takes in zip(sequences, samples, strict=True)
        ]
        return cls(sequences, ends, samples, sampling)

    @property
    def are_plain(self) -> bool:
        """Whether the largest logits are all that anybody asks for."""
        return all(each.is_plain for each in self.sampling)

    @property
    def need_logits(self) -> bool:
        """Whether somebody reads logits, or the best of them."""
        return any(
            self.samples[row] and (each.keep_logits or bool(each.sampling.num_logprobs))
            for row, each in enumerate(self.sequences)
        )

    @property
    def need_logprobs(self) -> bool:
        """Whether somebody asks for logprobs."""
        return any(each.num_logprobs is not None for each in self.sampling)

    def steps(self) -> list[int]:
        """Index of the token that each row draws."""
        return [each.num_new_tokens for each in self.sequences]


@dataclasses.dataclass(frozen=True, slots=True)
class _Chosen:
    """Choices of the rows: an id outside the vocabulary where a row has no largest logit."""

    tokens: list[int]
    logprobs: list[float]
    logits: npt.NDArray[Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that runs, and what it moves on.

    Attributes:
        plan: what was planned.
        rows: its rows as they were when it was launched.
        positions: where the tokens of its rows go.
        handle: what the launcher calls it.
    """

    plan: StepPlan
    rows: _Rows
    positions: list[int]
    handle: object


class StepRunner:
    """Takes the sequences of a plan one step on.

    Args:
        executor: runs the model.
        batch: rows and pages of the sequences.
        bucketed_shapes: pad N and M to the bucket lists.
        pipelines: launch steps where that can be done; None where the executor has a launcher.
    """

    def __init__(
        self,
        executor: Executor,
        batch: Batch,
        *,
        bucketed_shapes: bool,
        pipelines: bool | None = None,
    ) -> None:
        self._executor, self._spec = executor, executor.spec
        own: StepLauncher | None = getattr(executor, "launcher", None)
        self._pipelines = own is not None if pipelines is None else pipelines
        self._launcher: StepLauncher = own or LateTokens(executor)
        self._batch = batch
        self._builder = StepBuilder(executor.spec, bucketed=bucketed_shapes)
        self._judged: tuple[StepPlan | None, bool] = (None, False)

    def run(self, plan: StepPlan, copies: PageCopies) -> list[Sampled]:
        """Run a step; only when all of it is done do its sequences move on.

        Args:
            plan: its sequences have the pages that they need.
            copies: pages to copy first.

        Returns:
            The new tokens, for those segments that sample; and an error for every segment whose
            logits are no numbers.

        Raises:
            Exception: whatever failed; the pools may hold any part of the step.
        """
        rows, inputs = self._prepare(plan, copies)
        chosen = self._choose(rows, inputs)
        return self._take(rows, _move_on(rows), chosen)

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether a step needs nothing but tokens from the device, so that it can be launched."""
        if not self._pipelines:
            return False
        # Most decode steps have the plan of the one before.
        if self._judged[0] is not plan:
            rows = _Rows.of(plan)
            chooses = self._chooses(rows) or self._launcher.draws
            self._judged = (plan, chooses and not rows.need_logits)
        return self._judged[1]

    def launch(self, plan: StepPlan, copies: PageCopies) -> LaunchedStep:
        """Hand a step over and move its sequences on to tokens that nobody knows yet.

        Args:
            plan: a plan that `can_launch`, whose sequences have the pages that they need.
            copies: pages to copy first.

        Raises:
            Exception: whatever failed; no sequence moved on.
        """
        rows, inputs = self._prepare(plan, copies)
        draw = None
        if not self._chooses(rows):
            draw = Draw(specs=rows.sampling, steps=rows.steps(), with_logprobs=rows.need_logprobs)
        handle = self._launcher.launch(inputs, draw)
        return LaunchedStep(plan, rows, _move_on(rows), handle)

    def collect(self, step: LaunchedStep) -> list[Sampled]:
        """Wait for a launched step.

        Returns:
            As of `run`; nothing for sequences that have ended since.

        Raises:
            Exception: whatever failed; the pools may hold any part of the step.
        """
        tokens, logprobs = self._launcher.collect(step.handle)
        return self._take(step.rows, step.positions, _Chosen(tokens.tolist(), logprobs.tolist()))

    def _prepare(self, plan: StepPlan, copies: PageCopies) -> tuple[_Rows, StepInputs]:
        if freed := self._batch.registry.take_freed():
            self._executor.poison_pages(freed)
        if copies:
            self._executor.copy_pages(copies)
        return _Rows.of(plan), self._builder.build(plan, self._batch.table)

    def _chooses(self, rows: _Rows) -> bool:
        """Whether the engine's own choices are all that is asked for."""
        return self._spec.greedy_in_engine and rows.are_plain

    def _choose(self, rows: _Rows, inputs: StepInputs) -> _Chosen:
        """Run the model; the logits stay on the device where nobody needs them."""
        executor, count = self._executor, len(rows.sequences)
        if not rows.need_logits:
            if self._chooses(rows):
                tokens = executor.step_tokens(inputs)[:count]
                return _Chosen(tokens.tolist(), [0.0] * count)
            if executor.samples_on_device:
                drawn, logprobs = executor.step_sampled(
                    inputs,
                    range(count),
                    rows.sampling,
                    rows.steps(),
                    with_logprobs=rows.need_logprobs,
                )
                return _Chosen(drawn.tolist(), logprobs.tolist())
        logits = last_token_logits(executor, inputs, executor.step(inputs))
        return _choose_on_host(rows, logits[:count])

    def _take(self, rows: _Rows, positions: list[int], chosen: _Chosen) -> list[Sampled]:
        """What was chosen for those who still run, and a look at their pages.

        Keys and values behind logits that are no numbers are described to nobody.
        """
        sampled = []
        vocab_size = self._spec.vocab_size
        for row, sequence in enumerate(rows.sequences):
            if sequence.slot < 0:
                continue
            token = chosen.tokens[row]
            if not 0 <= token < vocab_size:
                error = row_error(token, row, vocab_size)
                sampled.append(Sampled(sequence, NO_TOKEN, positions[row], error=error))
                continue
            self._batch.review(sequence, rows.ends[row])
            if rows.samples[row]:
                sampled.append(_sampled(sequence, positions[row], row, chosen))
        return sampled


def _move_on(rows: _Rows) -> list[int]:
    """Count the tokens of a step as being in the pool; where its new tokens go."""
    positions = []
    for row, sequence in enumerate(rows.sequences):
        sequence.past_len = rows.ends[row]
        positions.append(sequence.expect(row) if rows.samples[row] else -1)
    return positions


def _choose_on_host(rows: _Rows, logits: npt.NDArray[Any]) -> _Chosen:
    """Choose a token for each row, `[len(rows), vocab_size]`."""
    tokens, logprobs = greedy(logits), [0.0] * len(logits)
    # Logprobs and draws cost a pass over the vocabulary in float64: only for those that ask.
    asking = [row for row, each in enumerate(rows.sampling) if not each.is_plain]
    if asking:
        steps = rows.steps()
        drawn, found = sample(
            logits[asking], [rows.sampling[row] for row in asking], [steps[row] for row in asking]
        )
        for row, token, logprob in zip(asking, drawn.tolist(), found.tolist(), strict=True):
            tokens[row], logprobs[row] = token, logprob
    return _Chosen(tokens, logprobs, logits)


def _sampled(sequence: LiveSequence, position: int, row: int, chosen: _Chosen) -> Sampled:
    token, count = chosen.tokens[row], sequence.sampling.num_logprobs
    if count is None and not sequence.keep_logits:
        return Sampled(sequence, token, position)
    logits = None if chosen.logits is None else chosen.logits[row]
    best = () if logits is None or not count else tuple(top_logprobs(logits, count))
    return Sampled(
        sequence,
        token,
        position,
        logits=logits.astype(np.float32) if logits is not None and sequence.keep_logits else None,
        logprob=chosen.logprobs[row] if count is not None else None,
        top_logprobs=best if count is not None else None,
    )
