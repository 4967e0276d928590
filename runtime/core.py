"""Continuous batching over one executor, shared by the sessions of one engine."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import (
    PagedTrtError,
    SequenceError,
    UnsupportedError,
)
from paged_trt.plugins.launch.sampling import MAX_SAMPLED_VOCAB
from paged_trt.runtime.batch import Batch, PageCopies
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.fair_lock import FairLock
from paged_trt.runtime.planning import StepPlanner, named_error
from paged_trt.runtime.requests import GREEDY, SamplingSpec
from paged_trt.runtime.results import NO_TOKEN, SessionStats, StepResult
from paged_trt.runtime.sampler import with_seed
from paged_trt.runtime.scheduler import Scheduler, StepPlan, StepPolicy
from paged_trt.runtime.sequences import FinishReason, LiveSequence
from paged_trt.runtime.step_runner import LaunchedStep, Sampled, StepRunner
from paged_trt.runtime.waiting import WaitingLine

_LOG = logging.getLogger("paged_trt")
_COUNTS: Final = (
    "prefill_steps",
    "mixed_steps",
    "decode_steps",
    "failed_steps",
    "prompt_tokens",
    "cached_tokens",
    "new_tokens",
    "preemptions",
    "finished",
    "failed",
    "cancelled",
)


class EngineCore:
    """Owns the sequences of one executor and their pages; every method may come from any thread.

    A sequence waits, runs, and ends with tokens or an error; whatever ends it, its pages are
    free at once. Waiting sequences are admitted in the order of their submission, when there is
    a slot and pages for all tokens that they have so far. A running sequence that needs a page
    when none is free takes those of the youngest one, which waits again, at the front, and is
    run again from its tokens: nothing is lost. Only a sequence that finds too few pages with
    the whole pool to itself ends with PagesExhausted.

    Args:
        executor: runs the model; `close` closes it. Nothing else may use it meanwhile.
        page_order: order in which pages are first handed out, a permutation of all page
            ids; ascending when left out. The results do not depend on it.
        bucketed_shapes: pad N and M to the bucket lists; the executor's own wish when left
            out. The results do not depend on it.
        policy: how decode and prefill share the steps.
        reuses_prefixes: let a prompt begin with pages that hold its first tokens already.
        max_waiting: sequences that may wait at most; None for no limit.
        poisons_freed: fill pages with NaN when their content is lost, to find a read of a page
            that nobody owns; it costs time.
        pipelines: hand a decode step over before the tokens of the step before it are known. The
            results do not depend on it. A sequence that ends by an end token is in one step more,
            whose token for it is thrown away. Left out: where the executor has a `launcher` of
            its own, since it gains no time elsewhere.

    Raises:
        KvPoolError: `page_order` is no permutation of the pool's pages.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        page_order: Sequence[int] | None = None,
        bucketed_shapes: bool | None = None,
        policy: StepPolicy | None = None,
        reuses_prefixes: bool = True,
        max_waiting: int | None = None,
        poisons_freed: bool = False,
        pipelines: bool | None = None,
    ) -> None:
        spec = executor.spec
        self.executor = executor
        self.spec = spec
        self.batch = Batch(
            spec,
            page_order=page_order,
            reuses_prefixes=reuses_prefixes,
            records_freed=poisons_freed,
        )
        self._runner = StepRunner(
            executor,
            self.batch,
            bucketed_shapes=executor.bucketed_shapes
            if bucketed_shapes is None
            else bucketed_shapes,
            pipelines=pipelines,
        )
        self._running: LaunchedStep | None = None
        self._scheduler = Scheduler(max_num_tokens=spec.max_num_tokens, policy=policy)
        self._lock = FairLock()
        self._waiting = WaitingLine(max_waiting)
        self._ids = itertools.count()
        self._counts: collections.Counter[str] = collections.Counter()
        self._planner = StepPlanner(
            self.batch,
            self._waiting,
            self._scheduler,
            counts=self._counts,
            fail=self._fail,
            fail_step=self._fail_step,
        )
        self._is_closed = False

    def submit(
        self,
        prompt: npt.NDArray[np.int64],
        max_new_tokens: int,
        *,
        sampling: SamplingSpec = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
        prefill_chunk: int | None = None,
        keep_logits: bool = False,
        adapter: str | None = None,
        deliver: Callable[[StepResult], None],
    ) -> LiveSequence:
        """Queue a sequence; it never waits for a step that runs.

        Where the core is closed meanwhile, it raises, or the sequence ends with an error.

        Args:
            prompt: a prompt that `check_prompt` passed.
            max_new_tokens: tokens to generate at most.
            sampling: how its tokens are chosen.
            stop_token_ids: tokens that end it.
            prefill_chunk: most tokens of one prefill step.
            keep_logits: results carry a copy of the logits.
            adapter: None; no engine runs adapters yet.
            deliver: takes its results in the thread that runs the step, and must not raise.

        Raises:
            SequenceError: the core is closed, or `prefill_chunk` is not positive.
            QueueFullError: as many sequences wait as may wait.
            UnsupportedError: an adapter is asked for, or the vocabulary is too large to draw.
        """
        self.require_open()
        if prefill_chunk is not None and prefill_chunk < 1:
            raise SequenceError(f"`prefill_chunk` must be 1 token or more, got {prefill_chunk}")
        if adapter is not None:
            raise UnsupportedError(f"this engine runs no adapters; leave out `{adapter}`")
        if not sampling.is_plain and self.spec.vocab_size > MAX_SAMPLED_VOCAB:
            raise UnsupportedError(
                f"the sampler takes {MAX_SAMPLED_VOCAB} tokens and the vocabulary has "
                f"{self.spec.vocab_size}; choose greedily, without logprobs"
            )
        sequence = LiveSequence(
            sequence_id=next(self._ids),
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling if sampling.is_greedy else with_seed(sampling),
            stop_token_ids=stop_token_ids,
            prefill_chunk=prefill_chunk,
            keep_logits=keep_logits,
            adapter=adapter,
            deliver=deliver,
        )
        self._waiting.put(sequence)
        # Closed in between: what took the orders since has ended it, or nobody will.
        if self._is_closed and self._waiting.take_back(sequence):
            self.require_open()
        return sequence

    def fork(
        self,
        source: LiveSequence,
        *,
        sampling: SamplingSpec | None = None,
        deliver: Callable[[StepResult], None],
    ) -> LiveSequence:
        """A second sequence that goes on from where a running one is, on the same pages.

        Args:
            source: the running one.
            sampling: how the new one chooses its tokens; as `source`, with another seed, when
                left out.
            deliver: as of `submit`.

        Raises:
            SequenceError: every slot is taken, or `source` waits, prefills or has ended.
        """

        def make() -> LiveSequence:
            self.require_open()
            fork = source.copy(next(self._ids), deliver)
            fork.sampling = sampling or dataclasses.replace(source.sampling, seed=None)
            if not fork.sampling.is_greedy:
                fork.sampling = with_seed(fork.sampling)
            self.batch.fork(source, fork)
            return fork

        return self._lock.run(make)

    def cancel(self, sequences: Iterable[LiveSequence]) -> None:
        """Drop sequences and free their pages; nothing to do for those that have ended.

        Nothing is delivered. A step that runs ends first.
        """
        self._waiting.drop(sequences)
        self._lock.run(self._take_orders)

    def step(self, *, meanwhile: Callable[[], None] | None = None) -> bool:
        """Run one step and deliver its results; False where no sequence is left to run.

        A step that fails ends the sequences that it ran, each with an error; nothing is raised
        for it. A sequence whose own logits are no numbers ends alone.

        Args:
            meanwhile: work of the host that is done while the device runs the step, where there
                is a device and a step; it must not raise.

        Raises:
            SequenceError: the core is closed.
            BaseException: what is no Exception, such as KeyboardInterrupt, after the sequences
                of the step were ended.
        """
        return self._lock.run(lambda: self._step(meanwhile))

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits."""
        return len(self.batch) > 0 or len(self._waiting) > 0

    def stats(self) -> SessionStats:
        """Pages, sequences and counts; it does not wait for a step that runs."""
        registry, counts = self.batch.registry, self._counts
        waiting = len(self._waiting)
        return SessionStats(
            pages_in_use=registry.num_used,
            pages_free=registry.num_free,
            pages_retained=registry.num_retained,
            pages_evicted=registry.num_evicted,
            sequences=waiting + len(self.batch),
            waiting=waiting,
            **{name: counts[name] for name in _COUNTS},
        )

    def close(self) -> None:
        """End all sequences with an error and close the executor; a second call does nothing.

        A step that runs ends first, and so does what asked before from other threads.
        """
        self._lock.run(self._close)

    def require_open(self) -> None:
        """Raise where the core is closed.

        Raises:
            SequenceError: it is.
        """
        if self._is_closed:
            raise SequenceError("the session is closed; make another one")

    def _step(self, meanwhile: Callable[[], None] | None) -> bool:
        self.require_open()
        self._take_orders()
        self._collect_surplus()
        if self._running is None:
            found = self._planner.next()
            if found is None:
                return bool(self._waiting)
            if not self._runner.can_launch(found[0]):
                self._run(*found, meanwhile)
                return True
            self._launch(*found)
        if self._running is not None:
            self._run_ahead(self._running, meanwhile)
        return True

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # Nobody is left who reads what it gives.
        self._running = None
        self._take_orders()
        self.executor.close()

    def _take_orders(self) -> None:
        """Queue what was submitted, and drop what was cancelled; all, where the core is closed."""
        for sequence in self._waiting.take_orders():
            waited = self._waiting.remove(sequence)
            self._counts["cancelled"] += waited or sequence.slot >= 0
            self.batch.drop(sequence)
        if self._is_closed:
            error = SequenceError("the engine was closed before the sequence ended")
            for sequence in (*self.batch, *self._waiting):
                self._fail(sequence, error)

    def _run(
        self, plan: StepPlan, copies: PageCopies, meanwhile: Callable[[], None] | None
    ) -> None:
        """Run a step to its end."""
        if meanwhile is not None:
            self.executor.during_next_step(meanwhile)
        try:
            sampled = self._runner.run(plan, copies)
            self._scheduler.note(plan)
            self._take(plan, sampled)
        except BaseException as error:
            self._fail_step(plan, error)

    def _launch(self, plan: StepPlan, copies: PageCopies) -> None:
        """Hand a step over while none runs."""
        try:
            self._running = self._runner.launch(plan, copies)
        except BaseException as error:
            self._fail_step(plan, error)
            return
        self._scheduler.note(plan)

    def _run_ahead(self, running: LaunchedStep, meanwhile: Callable[[], None] | None) -> None:
        """Hand the next step over where it need not wait, and take what the running one gives."""
        found = self._planner.ahead(self._runner.can_launch)
        self._running, failure = None, None
        try:
            if found is not None:
                self._running = self._runner.launch(*found)
                self._scheduler.note(found[0])
        except BaseException as error:
            failure = error
        try:
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                self._collect(running)
        finally:
            # Those that the running step ended have had their tokens.
            if found is not None and failure is not None:
                self._fail_step(found[0], failure)

    def _collect_surplus(self) -> None:
        """Take away a running step whose sequences have all ended."""
        step = self._running
        if step is not None and all(each.slot < 0 for each in step.rows.sequences):
            self._running = None
            self._collect(step)

    def _collect(self, step: LaunchedStep) -> None:
        """Wait for a launched step; nothing for those whose sequences have ended since."""
        try:
            self._take(step.plan, self._runner.collect(step))
        except BaseException as error:
            self._fail_step(step.plan, error)

    def _take(self, plan: StepPlan, sampled: list[Sampled]) -> None:
        """Deliver what a step gave."""
        self._counts["prefill_steps" if plan.is_prefill else "decode_steps"] += 1
        self._counts["mixed_steps"] += plan.is_mixed
        for each in sampled:
            if each.sequence.slot < 0:
                # What took the token of another one has ended this one.
                continue
            if each.error is None:
                self._take_token(each)
            else:
                # Its keys and values may be no numbers either.
                self.batch.discard(each.sequence)
                self._fail(each.sequence, each.error)

    def _take_token(self, sampled: Sampled) -> None:
        sequence = sampled.sequence
        self._counts["new_tokens"] += 1
        finished = sequence.learn(sampled.position, sampled.token)
        if finished is not None:
            self.batch.drop(sequence)
            self._counts["finished"] += 1
        sequence.deliver(
            StepResult(
                sequence_id=sequence.sequence_id,
                token=sampled.token,
                logits=sampled.logits,
                logprob=sampled.logprob,
                top_logprobs=sampled.top_logprobs,
                finished=finished,
                num_cached_tokens=sequence.num_cached or 0,
            )
        )

    def _fail_step(self, plan: StepPlan, error: BaseException) -> None:
        """End the sequences of a step that have not ended: the pools may hold any part of it.

        Raises:
            BaseException: `error`, where it is no Exception.
        """
        self._counts["failed_steps"] += 1
        named = named_error(error)
        _LOG.error(
            "a step of %d sequences failed: %s",
            len(plan.segments),
            named,
            extra={"event": "step_failed", "sequences": len(plan.segments)},
        )
        for segment in plan.segments:
            # Another step may have ended it since this one was handed over.
            if segment.sequence.slot >= 0:
                self._fail(segment.sequence, named)
        if not isinstance(error, Exception):
            raise error

    def _fail(self, sequence: LiveSequence, error: PagedTrtError) -> None:
        self._waiting.remove(sequence)
        self.batch.drop(sequence)
        self._counts["failed"] += 1
        sequence.deliver(
            StepResult(
                sequence_id=sequence.sequence_id,
                token=NO_TOKEN,
                finished=FinishReason.ERROR,
                error=error,
                num_cached_tokens=sequence.num_cached or 0,
            )
        )
