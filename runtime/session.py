"""Continuous batching over one executor: prompts in, greedy tokens out."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError, SequenceError
from paged_trt.plugins.tensors import EngineSpec, LogitsMode
from paged_trt.runtime.batch import Batch
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.results import Generation, SessionStats, StepResult
from paged_trt.runtime.sampler import greedy
from paged_trt.runtime.scheduler import StepPlan, plan_step
from paged_trt.runtime.sequences import LiveSequence, check_prompt
from paged_trt.runtime.snapshot import PoolSnapshot, take_snapshot
from paged_trt.runtime.step import StepBuilder

__all__ = ["Generation", "Session", "SessionStats", "StepResult"]


class Session:
    """Owns the live sequences of one executor and their pages.

    A sequence that finishes, fails or is released gives its pages back at once. A step that
    raises, by whatever exception, releases the sequences that it ran; the others stay.

    Args:
        executor: runs the model; `close` closes it. No other session may use it meanwhile,
            since both would hand out the same pages.
        eos_token_ids: tokens that end a sequence.
        page_order: order in which pages are first handed out, a permutation of all page
            ids; ascending when left out. The results do not depend on it.
        bucketed_shapes: pad N and M to the bucket lists; the executor's own wish when left
            out. The results do not depend on it.

    Raises:
        KvPoolError: `page_order` is no permutation of the pool's pages.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        eos_token_ids: Iterable[int] = frozenset(),
        page_order: Sequence[int] | None = None,
        bucketed_shapes: bool | None = None,
    ) -> None:
        spec = executor.spec
        self._executor = executor
        self._spec = spec
        self._eos_token_ids = frozenset(eos_token_ids)
        self._batch = Batch(spec.pool, page_order=page_order)
        self._builder = StepBuilder(
            spec,
            bucketed=executor.bucketed_shapes if bucketed_shapes is None else bucketed_shapes,
        )
        self._next_id = 0
        self._prefill_steps = 0
        self._decode_steps = 0
        self._is_closed = False

    @property
    def executor(self) -> Executor:
        """What runs the model."""
        return self._executor

    def add(
        self,
        prompt_ids: Iterable[int],
        max_new_tokens: int,
        *,
        prefill_chunk: int | None = None,
        keep_logits: bool = False,
    ) -> int:
        """Admit a sequence; `step` runs its prompt.

        Args:
            prompt_ids: token ids of the prompt.
            max_new_tokens: tokens to generate at most.
            prefill_chunk: most prompt tokens that one step runs; left out, the budget of
                the engine, max_num_tokens.
            keep_logits: results carry a copy of the logits.

        Returns:
            The id of the sequence.

        Raises:
            SequenceError: the engine cannot serve the prompt, every slot is taken, or the
                session is closed; nothing was changed.
        """
        self._check_open()
        if prefill_chunk is not None and prefill_chunk < 1:
            raise SequenceError(f"`prefill_chunk` must be 1 token or more, got {prefill_chunk}")
        sequence = LiveSequence(
            sequence_id=self._next_id,
            prompt=check_prompt(self._spec, prompt_ids, max_new_tokens),
            max_new_tokens=max_new_tokens,
            prefill_chunk=prefill_chunk,
            keep_logits=keep_logits,
        )
        self._batch.admit(sequence)
        self._next_id += 1
        return sequence.sequence_id

    def step(self) -> list[StepResult]:
        """Run one prefill or decode step.

        Returns:
            One result for each sequence that got a token: none from a step that ran only
            parts of prompts, and none where no sequence is live.

        Raises:
            PagesExhausted: the step needs more pages than are free; nothing was changed, and
                the step can be tried again once a sequence was released.
            ExecutionError: the model failed, or its logits are no numbers.
            SequenceError: the session is closed.
        """
        self._check_open()
        plan = plan_step(self._batch, max_num_tokens=self._spec.max_num_tokens)
        if plan is None:
            return []
        self._batch.grow(plan)
        try:
            inputs = self._builder.build(plan, self._batch.table)
            logits = self._executor.step(inputs)
            results = self._advance(plan, self._sampled_rows(plan, inputs, logits))
        except BaseException:
            # The pools may hold any part of this step, so its sequences cannot go on.
            for segment in plan.segments:
                self._batch.drop(segment.sequence)
            raise
        if plan.is_prefill:
            self._prefill_steps += 1
        else:
            self._decode_steps += 1
        return results

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        max_new_tokens: int,
        *,
        on_token: Callable[[int, int], None] | None = None,
        keep_logits: bool = False,
        prefill_chunk: int | None = None,
    ) -> list[Generation]:
        """Continue all prompts; those that find no free slot wait for one.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: tokens to generate at most, for each prompt.
            on_token: called with the index of the prompt and its new token.
            keep_logits: generations carry their logits.
            prefill_chunk: as in `add`.

        Returns:
            One generation per prompt, in the order of the prompts.

        Raises:
            SequenceError: a prompt cannot be served, or sequences of `add` are live.
            PagesExhausted: the pool is too small for the step.
            ExecutionError: the model failed.
                Whatever is raised, every page of this call is free again.
        """
        self._check_open()
        if len(self._batch):
            raise SequenceError(
                f"`generate` needs a session without live sequences, {len(self._batch)} are "
                "live; release them or step them to their end"
            )
        checked = _check_prompts(self._spec, prompts, max_new_tokens)
        waiting = collections.deque(enumerate(checked))
        results: list[list[StepResult]] = [[] for _ in checked]
        index_of: dict[int, int] = {}
        try:
            while waiting or len(self._batch):
                while waiting and self._batch.has_free_slot:
                    index, prompt = waiting.popleft()
                    sequence_id = self.add(
                        prompt,
                        max_new_tokens,
                        prefill_chunk=prefill_chunk,
                        keep_logits=keep_logits,
                    )
                    index_of[sequence_id] = index
                for result in self.step():
                    index = index_of[result.sequence_id]
                    results[index].append(result)
                    if on_token is not None:
                        on_token(index, result.token)
        finally:
            self._batch.drop_all()
        return [_generation(each) for each in results]

    def release(self, sequence_id: int) -> None:
        """End a live sequence and free its pages.

        Raises:
            SequenceError: it is not live.
        """
        self._batch.drop(self._batch.get(sequence_id))

    def stats(self) -> SessionStats:
        """Pages, sequences and steps."""
        return SessionStats(
            pages_in_use=self._batch.registry.num_used,
            pages_free=self._batch.registry.num_free,
            sequences=len(self._batch),
            prefill_steps=self._prefill_steps,
            decode_steps=self._decode_steps,
        )

    def snapshot(self) -> PoolSnapshot:
        """Who holds which page now, for `runtime.snapshot`."""
        tokens = {sequence.slot: sequence.past_len for sequence in self._batch}
        return take_snapshot(self._spec.pool, self._batch.registry, self._batch.table, tokens)

    def close(self) -> None:
        """Release all sequences and close the executor; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._batch.drop_all()
        self._executor.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SequenceError("the session is closed; make another one")

    def _sampled_rows(
        self, plan: StepPlan, inputs: StepInputs, logits: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """Logits `[len(plan.segments), vocab_size]` of the last token of each segment."""
        is_last = self._spec.logits_mode is LogitsMode.LAST
        rows = len(inputs.past_lens) if is_last else len(inputs.input_ids)
        if logits.shape != (rows, self._spec.vocab_size):
            raise ExecutionError(
                f"the {self._executor.name} executor gave logits of shape "
                f"{list(logits.shape)}, expected {[rows, self._spec.vocab_size]}; "
                "rebuild the engine with `paged-trt build`"
            )
        if is_last:
            return logits[: len(plan.segments)]
        return logits[inputs.query_start_offsets[1 : len(plan.segments) + 1] - 1]

    def _advance(self, plan: StepPlan, logits: npt.NDArray[Any]) -> list[StepResult]:
        """Sample all rows, and only then count the tokens of the step as done."""
        rows = [row for row, segment in enumerate(plan.segments) if segment.samples]
        tokens = dict(zip(rows, greedy(logits[rows]), strict=True))
        results = []
        for row, segment in enumerate(plan.segments):
            segment.sequence.past_len = segment.end
            if row in tokens:
                results.append(self._take_token(segment.sequence, tokens[row], logits[row]))
        return results

    def _take_token(
        self, sequence: LiveSequence, token: int, logits: npt.NDArray[Any]
    ) -> StepResult:
        sequence.new_tokens.append(token)
        finished = sequence.finish_reason(self._eos_token_ids)
        if finished is not None:
            self._batch.drop(sequence)
        return StepResult(
            sequence_id=sequence.sequence_id,
            token=token,
            logits=logits.astype(np.float32) if sequence.keep_logits else None,
            finished=finished,
        )


def _check_prompts(
    spec: EngineSpec, prompts: Sequence[Iterable[int]], max_new_tokens: int
) -> list[npt.NDArray[np.int64]]:
    checked = []
    for index, prompt_ids in enumerate(prompts):
        try:
            checked.append(check_prompt(spec, prompt_ids, max_new_tokens))
        except SequenceError as error:
            raise SequenceError(f"prompt {index} of {len(prompts)}: {error}") from error
    return checked


def _generation(results: Sequence[StepResult]) -> Generation:
    reason = results[-1].finished
    rows = [result.logits for result in results if result.logits is not None]
    if reason is None:
        raise SequenceError(f"a sequence stopped after {len(results)} tokens without a reason")
    return Generation(
        tokens=tuple(result.token for result in results),
        finish_reason=reason,
        logits=np.stack(rows) if rows else None,
    )
