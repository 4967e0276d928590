"""Prompts in, tokens out, in the thread of the caller."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ConfigError, SequenceError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.requests import GREEDY, SamplingSpec
from paged_trt.runtime.results import Generation, SessionStats, StepResult
from paged_trt.runtime.sequences import LiveSequence, check_prompt
from paged_trt.runtime.snapshot import PoolSnapshot, take_snapshot

__all__ = ["Generation", "Session", "SessionStats", "StepResult"]


class Session:
    """One client of an engine core; sessions of one core share its steps, pages and prefixes.

    Sequences that find no slot or no pages wait. One that finishes, fails or is released gives
    its pages back at once. A step that fails ends the sequences that it ran, by whatever
    exception; the others stay. Sessions of one core may run in threads of their own: a step
    that one of them runs moves the sequences of all.

    Args:
        engine: an executor, which gets a core of its own and is closed with the session; or a
            core, which stays open.
        eos_token_ids: tokens that end a sequence.
        page_order: as of EngineCore, for an executor.
        bucketed_shapes: as of EngineCore, for an executor.
        reuses_prefixes: as of EngineCore, for an executor; True when left out.

    Raises:
        KvPoolError: `page_order` is no permutation of the pool's pages.
        ConfigError: an option of the core is given with a core.
    """

    def __init__(
        self,
        engine: Executor | EngineCore,
        *,
        eos_token_ids: Iterable[int] = frozenset(),
        page_order: Sequence[int] | None = None,
        bucketed_shapes: bool | None = None,
        reuses_prefixes: bool | None = None,
    ) -> None:
        options = (page_order, bucketed_shapes, reuses_prefixes)
        self._owns_core = not isinstance(engine, EngineCore)
        if not isinstance(engine, EngineCore):
            engine = EngineCore(
                engine,
                page_order=page_order,
                bucketed_shapes=bucketed_shapes,
                reuses_prefixes=reuses_prefixes is not False,
            )
        elif any(option is not None for option in options):
            raise ConfigError("a core has its options already; give them to EngineCore")
        self._core = engine
        self._eos_token_ids = frozenset(eos_token_ids)
        self._live: dict[int, LiveSequence] = {}
        self._results: collections.deque[StepResult] = collections.deque()
        self._is_closed = False

    @property
    def core(self) -> EngineCore:
        """What this session is a client of."""
        return self._core

    @property
    def executor(self) -> Executor:
        """What runs the model."""
        return self._core.executor

    def add(
        self,
        prompt_ids: Iterable[int],
        max_new_tokens: int,
        *,
        sampling: SamplingSpec = GREEDY,
        stop_token_ids: Iterable[int] = frozenset(),
        prefill_chunk: int | None = None,
        keep_logits: bool = False,
    ) -> int:
        """Queue a sequence; `step` runs it.

        Args:
            prompt_ids: token ids of the prompt.
            max_new_tokens: tokens to generate at most.
            sampling: how its tokens are chosen.
            stop_token_ids: tokens that end it, besides those of the session.
            prefill_chunk: most tokens of one prefill step; left out, the budget of
                the engine, max_num_tokens.
            keep_logits: results carry a copy of the logits.

        Returns:
            The id of the sequence.

        Raises:
            SequenceError: the engine cannot serve the prompt, as many sequences wait as may
                wait, or the session is closed; nothing was changed.
            UnsupportedError: the engine cannot sample in this way.
        """
        self._require_open()
        sequence = self._core.submit(
            check_prompt(self._core.spec, prompt_ids, max_new_tokens),
            max_new_tokens,
            sampling=sampling,
            stop_token_ids=self._eos_token_ids.union(stop_token_ids),
            prefill_chunk=prefill_chunk,
            keep_logits=keep_logits,
            deliver=self._results.append,
        )
        self._live[sequence.sequence_id] = sequence
        return sequence.sequence_id

    def fork(self, sequence_id: int, *, sampling: SamplingSpec | None = None) -> int:
        """A second sequence that goes on from where one is, on the same pages.

        Args:
            sequence_id: of the first one.
            sampling: how the new one chooses its tokens; as the first one, with another seed,
                when left out.

        Returns:
            The id of the new sequence.

        Raises:
            SequenceError: the sequence is not live, waits or still runs its prompt, or every
                slot is taken.
        """
        fork = self._core.fork(
            self._get(sequence_id), sampling=sampling, deliver=self._results.append
        )
        self._live[fork.sequence_id] = fork
        return fork.sequence_id

    def step(self) -> list[StepResult]:
        """Run one step, or take what another session's step gave.

        Returns:
            One result for each sequence of this session that got a token: none from a step
            that ran only parts of prompts, and none where no sequence is live.

        Raises:
            PagesExhausted: a sequence needs more pages than the pool can give; it is ended.
            ExecutionError: the model failed, or its logits are no numbers; the sequences of
                the step are ended.
            SequenceError: the session is closed.
        """
        self._require_open()
        if not self._results:
            try:
                self._core.step()
            except BaseException:
                self._take_results()
                raise
        results = self._take_results()
        failed = [result.error for result in results if result.error is not None]
        if failed:
            self._results.extendleft(each for each in reversed(results) if each.error is None)
            raise failed[0]
        return results

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        max_new_tokens: int,
        *,
        on_token: Callable[[int, int], None] | None = None,
        sampling: SamplingSpec = GREEDY,
        keep_logits: bool = False,
        prefill_chunk: int | None = None,
    ) -> list[Generation]:
        """Continue all prompts; those that find no slot or no pages wait.

        Args:
            prompts: token ids of each prompt.
            max_new_tokens: tokens to generate at most, for each prompt.
            on_token: called with the index of the prompt and its new token.
            sampling: how tokens are chosen, for each prompt.
            keep_logits: generations carry their logits.
            prefill_chunk: as in `add`.

        Returns:
            One generation per prompt, in the order of the prompts.

        Raises:
            SequenceError: a prompt cannot be served.
            PagesExhausted: the pool is too small for one of them.
            ExecutionError: the model failed.
                Whatever is raised, every page of this call is free again.
        """
        self._require_open()
        checked = _check_prompts(self._core.spec, prompts, max_new_tokens)
        results: list[list[StepResult]] = [[] for _ in checked]
        arrived: collections.deque[StepResult] = collections.deque()
        index_of: dict[int, int] = {}
        sequences: list[LiveSequence] = []
        try:
            for index, prompt in enumerate(checked):
                sequence = self._core.submit(
                    prompt,
                    max_new_tokens,
                    sampling=sampling,
                    stop_token_ids=self._eos_token_ids,
                    prefill_chunk=prefill_chunk,
                    keep_logits=keep_logits,
                    deliver=arrived.append,
                )
                sequences.append(sequence)
                index_of[sequence.sequence_id] = index
            pending = len(sequences)
            while pending:
                self._core.step()
                while arrived:
                    result = arrived.popleft()
                    if result.error is not None:
                        raise result.error
                    index = index_of[result.sequence_id]
                    results[index].append(result)
                    pending -= result.finished is not None
                    if on_token is not None:
                        on_token(index, result.token)
        finally:
            self._core.cancel(sequences)
        return [_generation(each) for each in results]

    def release(self, sequence_id: int) -> None:
        """End a live sequence and free its pages.

        Raises:
            SequenceError: it is not live.
        """
        self._core.cancel([self._get(sequence_id)])
        self._live.pop(sequence_id, None)

    def stats(self) -> SessionStats:
        """Pages, sequences and steps of the core."""
        return self._core.stats()

    def snapshot(self) -> PoolSnapshot:
        """Who holds which page now, for `runtime.snapshot`."""
        batch = self._core.batch
        # What a running step writes is not there yet.
        tokens = {each.slot: each.past_len - each.num_unknown for each in batch}
        return take_snapshot(self._core.spec.pool, batch.registry, batch.table, tokens)

    def close(self) -> None:
        """Release all sequences, and close an executor of its own; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._core.cancel(self._live.values())
        if self._owns_core:
            self._core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _take_results(self) -> list[StepResult]:
        results = []
        while self._results:
            result = self._results.popleft()
            if result.finished is not None:
                self._live.pop(result.sequence_id, None)
            results.append(result)
        return results

    def _get(self, sequence_id: int) -> LiveSequence:
        sequence = self._live.get(sequence_id)
        if sequence is None:
            raise SequenceError(
                f"sequence {sequence_id} is not live: it finished, was released or was never "
                f"added; {len(self._live)} sequences are live"
            )
        return sequence

    def _require_open(self) -> None:
        if self._is_closed:
            raise SequenceError("the session is closed; make another one")


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
        num_cached_tokens=results[-1].num_cached_tokens,
    )
