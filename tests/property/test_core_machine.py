"""10,000 random operations on one engine core: conservation and exact contents after each."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec, prompt_of

from paged_trt.plugins.errors import ExecutionError, PagedTrtError, PagesExhausted, SequenceError
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.page_contents import PageKey
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.scheduler import StepPolicy
from paged_trt.runtime.sequences import LiveSequence, check_prompt

SPEC = make_spec(max_batch_size=4, capacity=512, retained_pages=1, max_num_tokens=150)
LENGTHS = (1, 2, 100, 127, 128, 129, 200, 256, 257, 300)


class CoreMachine:
    """Random calls; a model of plain lists says what each sequence must have got."""

    def __init__(self, seed: int, *, mixes: bool, pipelines: bool = False) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.executor = HistoryExecutor(SPEC, bucketed=mixes)
        order = self.random.sample(range(SPEC.pool.num_pages), SPEC.pool.num_pages)
        self.core = EngineCore(
            self.executor,
            page_order=order,
            policy=StepPolicy(mixes=mixes),
            poisons_freed=True,
            max_waiting=12,
            pipelines=pipelines,
        )
        self.live: dict[int, LiveSequence] = {}
        self.expected: dict[int, tuple[int, ...]] = {}
        self.got: dict[int, list[int]] = {}
        self.ends: collections.Counter[str] = collections.Counter()
        self.hogged: list[int] = []
        self.stopped = 0
        self.calls: collections.Counter[str] = collections.Counter()

    def run(self, count: int) -> None:
        operations = {
            self.add: 15, self.step: 60, self.fork: 8, self.cancel: 5, self.hog: 5,
            self.unhog: 4, self.evict: 1, self.fail: 1,
        }  # fmt: skip
        for operation in self.random.choices(
            list(operations), weights=list(operations.values()), k=count
        ):
            self.calls[operation.__name__] += 1
            operation()
            self.check()

    def deliver(self, result: StepResult) -> None:
        tokens = self.got[result.sequence_id]
        if result.error is not None:
            # An assertion of the executor is an error of another text.
            if str(result.error) != "broken" and not isinstance(result.error, PagesExhausted):
                raise result.error
            self.ends[type(result.error).__name__] += 1
        else:
            tokens.append(result.token)
            expected = self.expected[result.sequence_id]
            assert tuple(tokens) == expected[: len(tokens)]
            assert (result.finished is not None) == (len(tokens) == len(expected))
        if result.finished is not None:
            self.ends["finished"] += result.error is None
            del self.live[result.sequence_id]

    def add(self) -> None:
        prompt = prompt_of(300, seed=self.random.randrange(3))[: self.random.choice(LENGTHS)]
        count = self.random.choice([1, 2, 5, 40])
        if len(self.live) >= 12:
            return
        sequence = self.core.submit(
            check_prompt(SPEC, prompt, count),
            count,
            prefill_chunk=self.random.choice([None, None, 1, 64]),
            stop_token_ids=frozenset(self.random.choices(range(VOCAB), k=3)),
            deliver=self.deliver,
        )
        self._note(sequence, continuation(prompt, count, VOCAB))

    def _note(self, sequence: LiveSequence, expected: tuple[int, ...]) -> None:
        self.live[sequence.sequence_id] = sequence
        self.got[sequence.sequence_id] = []
        stops = [at for at, token in enumerate(expected) if token in sequence.stop_token_ids]
        self.stopped += bool(stops)
        self.expected[sequence.sequence_id] = expected[: stops[0] + 1] if stops else expected

    def step(self) -> None:
        for _ in range(self.random.choice([1, 1, 1, 8])):
            self.core.step()

    def fork(self) -> None:
        source = self._any()
        if source is None:
            return
        try:
            fork = self.core.fork(source, deliver=self.deliver)
        except SequenceError:
            assert not source.decodes or source.slot < 0 or not self.core.batch.has_free_slot
            return
        # Another newest token, which is not in the pool yet: from here on the two differ.
        fork.tokens[fork.num_tokens - 1] = self.random.randrange(VOCAB)
        known = fork.tokens[: fork.num_tokens].tolist()
        left = fork.max_new_tokens - fork.num_new_tokens
        self._note(fork, continuation(known, left, VOCAB))

    def cancel(self) -> None:
        sequence = self._any()
        if sequence is not None:
            self.core.cancel([sequence])
            del self.live[sequence.sequence_id]
            self.ends["cancelled"] += 1

    def hog(self) -> None:
        free = self.core.batch.registry.num_free
        # A full pool makes the next sequence at the end of its page take one of another.
        count = self.random.choice([0, free // 2, free, free])
        self.hogged += self.core.batch.registry.allocate(count)

    def unhog(self) -> None:
        self.core.batch.registry.release(self.hogged)
        self.hogged = []

    def evict(self) -> None:
        self.core.batch.registry.forget_retained()
        assert self.core.batch.registry.num_retained == 0

    def fail(self) -> None:
        self.executor.failure = ExecutionError("broken")
        self.core.step()
        self.executor.failure = None

    def finish(self) -> None:
        self.unhog()
        while self.core.step():
            self.check()
        assert not self.live

    def _any(self) -> LiveSequence | None:
        return self.random.choice(list(self.live.values())) if self.live else None

    def check(self) -> None:
        batch = self.core.batch
        batch.registry.check()
        owners = collections.Counter(self.hogged)
        for sequence in batch:
            owners.update(sequence.pages)
            assert self.live[sequence.sequence_id] is sequence
            assert batch.table.row(sequence.slot) == tuple(sequence.pages)
            # What a running step writes may not be there, where that step has failed.
            past_len = sequence.past_len - sequence.num_unknown
            written = self.executor.pool[sequence.pages].ravel()[:past_len]
            np.testing.assert_array_equal(written, sequence.tokens[:past_len])
        assert len(owners) == batch.registry.num_used
        for page_id, times in owners.items():
            assert batch.registry.reference_count(page_id) == times
        assert self.core.stats().sequences == len(self.live)
        self._check_known_pages()

    def _check_known_pages(self) -> None:
        """Every page that can be found holds the tokens that its key says."""
        for page in self.core.batch.registry._contents._pages.values():
            held = self.executor.pool[page.page_id]
            assert held.astype(np.int32).tobytes() == page.key.tokens


@pytest.mark.parametrize("pipelines", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("mixes", [True, False])
def test_ten_thousand_random_operations(mixes: bool, pipelines: bool) -> None:
    machine = CoreMachine(seed=11, mixes=mixes, pipelines=pipelines)
    machine.run(5000)
    machine.finish()
    stats = machine.core.stats()
    # Each kind of event must have been there, or the test shows nothing of it.
    assert min(machine.calls.values()) > 20
    assert stats.preemptions > 10
    assert stats.cached_tokens > 20 * TOKENS_PER_PAGE
    assert stats.pages_evicted > 20
    assert min(machine.ends[name] for name in ("finished", "cancelled", "ExecutionError")) > 20
    assert machine.ends["PagesExhausted"] > 0
    assert machine.stopped > 20
    assert stats.pages_in_use == 0
    assert (stats.finished, stats.cancelled) == (
        machine.ends["finished"],
        machine.ends["cancelled"],
    )


def test_equal_hashes_serve_no_wrong_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageKey, "__hash__", lambda _: 0)
    machine = CoreMachine(seed=12, mixes=True)
    machine.run(500)
    machine.finish()
    assert machine.core.stats().cached_tokens > 0


class SharesByLength(HistoryExecutor):
    """Wrong on purpose: it does not copy the page of a fork."""

    def copy_pages(self, pages: object) -> None:
        del pages


@pytest.mark.parametrize("pipelines", [False, True], ids=["plain", "pipelined"])
def test_the_machine_sees_a_page_that_was_not_copied(
    monkeypatch: pytest.MonkeyPatch, pipelines: bool
) -> None:
    monkeypatch.setattr(HistoryExecutor, "copy_pages", SharesByLength.copy_pages)
    with pytest.raises((AssertionError, PagedTrtError)):
        CoreMachine(seed=11, mixes=True, pipelines=pipelines).run(5000)


def test_the_machine_sees_a_key_without_its_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageKey, "__eq__", lambda one, two: one.tokens[:8] == two.tokens[:8])
    monkeypatch.setattr(PageKey, "__hash__", lambda key: hash(key.tokens[:8]))
    with pytest.raises((AssertionError, PagedTrtError)):
        CoreMachine(seed=11, mixes=True).run(5000)
