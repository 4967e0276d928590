"""A whole session under arbitrary calls and failures, over an executor that checks paging."""

from __future__ import annotations

import collections

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec, prompt_of

from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.tensors import LogitsMode
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.session import Session

SLOTS = 5


class SessionMachine(RuleBasedStateMachine):
    @initialize(
        bucketed=st.booleans(),
        mode=st.sampled_from(LogitsMode),
        budget=st.sampled_from([1, 3, 130, 512]),
        order=st.permutations(range(27)),
        pipelines=st.booleans(),
    )
    def start(
        self, bucketed: bool, mode: LogitsMode, budget: int, order: list[int], pipelines: bool
    ) -> None:
        spec = make_spec(
            logits_mode=mode, max_num_tokens=budget, max_batch_size=SLOTS, capacity=640
        )
        self.executor = HistoryExecutor(spec, bucketed=bucketed)
        self.session = Session(EngineCore(self.executor, page_order=order, pipelines=pipelines))
        self.expected: dict[int, tuple[int, ...]] = {}
        self.got: dict[int, list[int]] = {}

    @rule(
        length=st.sampled_from([1, 2, 3, 127, 128, 129, 256, 257]),
        count=st.integers(1, 4),
        chunk=st.sampled_from([None, 1, 64, 128]),
    )
    def add(self, length: int, count: int, chunk: int | None) -> None:
        prompt = prompt_of(length)
        sequence_id = self.session.add(prompt, count, prefill_chunk=chunk)
        self.expected[sequence_id] = continuation(prompt, count, VOCAB)
        self.got[sequence_id] = []

    @rule(times=st.integers(1, 200))
    def step(self, times: int) -> None:
        for _ in range(times):
            for result in self.session.step():
                tokens = self.got[result.sequence_id]
                tokens.append(result.token)
                expected = self.expected[result.sequence_id]
                assert tuple(tokens) == expected[: len(tokens)]
                assert (result.finished is not None) == (len(tokens) == len(expected))
                if result.finished:
                    del self.got[result.sequence_id]

    @rule(index=st.integers(0, SLOTS - 1))
    def release(self, index: int) -> None:
        if index < len(self.got):
            sequence_id = list(self.got)[index]
            self.session.release(sequence_id)
            del self.got[sequence_id]

    @rule(interrupt=st.booleans())
    def fail(self, interrupt: bool) -> None:
        if not self.got:
            return
        self.executor.failure = KeyboardInterrupt() if interrupt else ExecutionError("broken")
        with pytest.raises((KeyboardInterrupt, ExecutionError)):
            self.session.step()
        self.executor.failure = None
        live = set(self.session._live)
        assert live < set(self.got)
        self.got = {key: value for key, value in self.got.items() if key in live}

    @invariant()
    def pages_belong_to_live_sequences(self) -> None:
        if not hasattr(self, "session"):
            return
        batch = self.session.core.batch
        batch.registry.check()
        pages = collections.Counter(page for sequence in batch for page in sequence.pages)
        assert len(pages) == self.session.stats().pages_in_use
        for page, owners in pages.items():
            assert batch.registry.reference_count(page) == owners
        assert [sequence.slot for sequence in batch] == list(range(len(batch)))
        assert set(self.session._live) == set(self.got)
        assert self.session.stats().sequences == len(self.got)
        for slot in range(SLOTS):
            held = [tuple(each.pages) for each in batch if each.slot == slot] or [()]
            assert batch.table.row(slot) == held[0]


def test_session_keeps_its_promises() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=100,
            stateful_step_count=25,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
