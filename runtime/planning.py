"""What the next step runs: who is admitted, who gives way, and the pages for it."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Final

from paged_trt.plugins.errors import ExecutionError, PagedTrtError, PagesExhausted
from paged_trt.runtime.batch import Batch, PageCopies
from paged_trt.runtime.scheduler import Scheduler, StepPlan
from paged_trt.runtime.sequences import LiveSequence
from paged_trt.runtime.waiting import WaitingLine

_LOG: Final = logging.getLogger("paged_trt")


def named_error(error: BaseException) -> PagedTrtError:
    """The error as one that this project raises; another one is its cause."""
    if isinstance(error, PagedTrtError):
        return error
    named = ExecutionError(f"a step failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named


class StepPlanner:
    """Brings the waiting line, the scheduler and the pages together.

    Args:
        batch: running sequences and their pages.
        waiting: those that have no slot.
        scheduler: which tokens a step runs.
        counts: where preemptions and prompt tokens are counted.
        fail: ends a sequence with an error.
        fail_step: ends the sequences of a step whose pages found no row.
    """

    def __init__(
        self,
        batch: Batch,
        waiting: WaitingLine,
        scheduler: Scheduler,
        *,
        counts: collections.Counter[str],
        fail: Callable[[LiveSequence, PagedTrtError], None],
        fail_step: Callable[[StepPlan, BaseException], None],
    ) -> None:
        self._batch, self._waiting, self._scheduler = batch, waiting, scheduler
        self._counts, self._fail, self._fail_step = counts, fail, fail_step

    def next(self) -> tuple[StepPlan, PageCopies] | None:
        """A step whose sequences have all the pages that they need; None where none runs."""
        self._admit()
        while (plan := self._scheduler.plan(self._batch)) is not None:
            if plan.is_prefill and self._reuse_more():
                continue
            try:
                return plan, self._batch.grow(plan)
            except PagesExhausted as error:
                self._make_room(error)
            except BaseException as error:
                self._fail_step(plan, error)
        return None

    def ahead(self, can_launch: Callable[[StepPlan], bool]) -> tuple[StepPlan, PageCopies] | None:
        """A step of decode rows to hand over while the one before it runs.

        Its tokens are not known, so it takes nothing from anybody: where the next step is no such
        one, or needs pages of others, it has to wait.

        Args:
            can_launch: whether a step can be handed over before another one has ended.
        """
        self._admit()
        plan = self._scheduler.plan(self._batch)
        if plan is None or plan.is_prefill or not can_launch(plan):
            return None
        try:
            return plan, self._batch.grow(plan)
        except PagesExhausted:
            return None
        except BaseException as error:
            self._fail_step(plan, error)
            return None

    def _admit(self) -> None:
        """Give slots and pages to waiting sequences, the first one first: none is overtaken."""
        while self._batch.has_free_slot and (sequence := self._waiting.first) is not None:
            is_new = sequence.num_cached is None
            try:
                self._batch.admit(sequence)
            except PagesExhausted as error:
                if len(self._batch):
                    return
                self._fail(sequence, error)
                continue
            except Exception as error:
                self._fail(sequence, named_error(error))
                continue
            self._waiting.remove(sequence)
            if is_new:
                self._counts["prompt_tokens"] += sequence.prompt_len
                self._counts["cached_tokens"] += sequence.num_cached or 0

    def _reuse_more(self) -> bool:
        """Spare the prompts what another one has run since they were admitted."""
        found = False
        for sequence in self._batch:
            reused = 0 if sequence.decodes else self._batch.reuse_more(sequence)
            found = found or reused > 0
            # What is run again after a preemption is no prompt.
            if reused and not sequence.num_new_tokens:
                before = sequence.num_cached or 0
                sequence.num_cached = min(before + reused, sequence.prompt_len)
                self._counts["cached_tokens"] += sequence.num_cached - before
        return found

    def _make_room(self, error: PagesExhausted) -> None:
        """Take the pages of the youngest sequence; it is run again later, from its tokens."""
        youngest = max(self._batch, key=lambda each: each.sequence_id)
        if len(self._batch) == 1:
            self._fail(youngest, error)
            return
        _LOG.info(
            "sequence %d waits again: %s",
            youngest.sequence_id,
            error,
            extra={"event": "preempted", "sequence_id": youngest.sequence_id},
        )
        self._batch.drop(youngest)
        self._waiting.put_first(youngest)
        self._counts["preemptions"] += 1
