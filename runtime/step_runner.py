"""One planned step: pages prepared, arrays built, model run, tokens chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.tensors import LogitsMode
from paged_trt.runtime.batch import Batch, PageCopies
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.sampler import checked_tokens, greedy
from paged_trt.runtime.scheduler import StepPlan
from paged_trt.runtime.sequences import LiveSequence
from paged_trt.runtime.step import StepBuilder


class Sampled(NamedTuple):
    """The new token of one sequence.

    Attributes:
        sequence: whose token it is; it has not got it yet.
        token: the token.
        logits: `[vocab_size]` float32; None unless the sequence keeps them.
    """

    sequence: LiveSequence
    token: int
    logits: npt.NDArray[np.float32] | None = None


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
        if self._spec.greedy_in_engine and not any(map(_needs_logits, sequences)):
            # The logits stay where they are.
            chosen = self._executor.step_tokens(inputs)[rows]
            tokens = checked_tokens(chosen, self._spec.vocab_size)
            sampled = [Sampled(*pair) for pair in zip(sequences, tokens, strict=True)]
        else:
            logits = self._last_rows(plan, inputs, self._executor.step(inputs))
            sampled = _sample(sequences, logits if len(rows) == len(logits) else logits[rows])
        for segment in plan.segments:
            self._batch.advance(segment.sequence, segment.end)
        return sampled

    def _last_rows(
        self, plan: StepPlan, inputs: StepInputs, logits: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """Logits `[len(plan.segments), vocab_size]` of the last token of each segment."""
        spec = self._spec
        is_last = spec.logits_mode is LogitsMode.LAST
        rows = len(inputs.past_lens) if is_last else len(inputs.input_ids)
        if logits.shape != (rows, spec.vocab_size):
            raise ExecutionError(
                f"the {self._executor.name} executor gave logits of shape "
                f"{list(logits.shape)}, expected {[rows, spec.vocab_size]}; "
                "rebuild the engine with `paged-trt build`"
            )
        if is_last:
            return logits[: len(plan.segments)]
        return logits[inputs.query_start_offsets[1 : len(plan.segments) + 1] - 1]


def _needs_logits(sequence: LiveSequence) -> bool:
    return sequence.keep_logits


def _sample(sequences: Sequence[LiveSequence], logits: npt.NDArray[Any]) -> list[Sampled]:
    """Choose a token for each row, `[len(sequences), vocab_size]`."""
    return [
        Sampled(each, token, row.astype(np.float32) if each.keep_logits else None)
        for each, token, row in zip(sequences, greedy(logits), logits, strict=True)
    ]
