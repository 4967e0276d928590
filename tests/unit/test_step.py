"""Planning and assembling of steps, and the choice of the next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from session.paged_toy import make_spec

from paged_trt.plugins.errors import ConfigError, KvPoolError, SequenceError
from paged_trt.plugins.tensors import NO_NEXT_TOKEN
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.sampler import greedy, row_error
from paged_trt.runtime.scheduler import Scheduler, Segment, StepPlan, StepPolicy
from paged_trt.runtime.sequences import LiveSequence
from paged_trt.runtime.step import StepBuilder

SPEC = make_spec(max_batch_size=6, max_num_tokens=32)


def live(slot: int, length: int, *, past: int = 0, chunk: int | None = None) -> LiveSequence:
    sequence = LiveSequence(
        sequence_id=slot,
        prompt=np.arange(length, dtype=np.int64) % 50,
        max_new_tokens=max(9, past - length + 2),
        prefill_chunk=chunk,
    )
    sequence.slot, sequence.past_len = slot, past
    while past >= sequence.num_tokens:
        sequence.learn(sequence.expect(0), 77)
    return sequence


def plan_step(
    sequences: list[LiveSequence], *, max_num_tokens: int, mixes: bool = True
) -> StepPlan | None:
    policy = StepPolicy(mixes=mixes)
    return Scheduler(max_num_tokens=max_num_tokens, policy=policy).plan(sequences)


def counts(plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    assert plan is not None
    return [
        (each.sequence.slot, each.num_tokens, each.end == each.sequence.num_tokens)
        for each in plan.segments
    ]


def test_decode_rows_come_first_and_prompts_share_the_rest_by_age() -> None:
    sequences = [live(0, 5, past=5), live(1, 20), live(2, 3, past=2), live(3, 40), live(4, 1)]
    plan = plan_step(sequences, max_num_tokens=32)
    assert counts(plan) == [(0, 1, True), (1, 20, True), (2, 1, True), (3, 10, False)]
    assert plan is not None
    assert plan.is_prefill
    assert plan.is_mixed


def test_slots_do_not_tell_the_age() -> None:
    old, young = live(1, 40), live(0, 40)
    young.sequence_id = 7
    assert counts(plan_step([young, old], max_num_tokens=50)) == [(0, 10, False), (1, 40, True)]


@pytest.mark.parametrize("mixes", [True, False])
def test_prefill_and_decode_take_turns_where_they_cannot_share(mixes: bool) -> None:
    budget = 2 if mixes else 32
    scheduler = Scheduler(max_num_tokens=budget, policy=StepPolicy(mixes=mixes))
    sequences = [live(0, 5, past=5), live(1, 6, past=9), live(2, 400)]
    kinds = []
    for _ in range(6):
        plan = scheduler.plan(sequences)
        assert plan is not None
        assert not plan.is_mixed
        kinds.append(plan.is_prefill)
        scheduler.note(plan)
        for segment in plan.segments:
            segment.sequence.past_len = segment.end
            if segment.end == segment.sequence.num_tokens:
                segment.sequence.learn(segment.sequence.expect(0), 1)
    assert kinds == [True, False] * 3


@pytest.mark.parametrize("tokens", [0, -1, True, 1.0])
def test_a_policy_is_checked(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="`step_tokens` must be an int from 1"):
        StepPolicy(step_tokens=tokens)


def test_a_chunk_bounds_one_sequence() -> None:
    plan = plan_step([live(0, 20, chunk=8), live(1, 3)], max_num_tokens=32)
    assert counts(plan) == [(0, 8, False), (1, 3, True)]


def test_a_decode_step_holds_every_slot_whatever_the_budget() -> None:
    plan = plan_step([live(0, 5, past=5), live(1, 6, past=9)], max_num_tokens=1)
    assert counts(plan) == [(0, 1, True), (1, 1, True)]
    assert plan is not None
    assert not plan.is_prefill
    assert plan_step([], max_num_tokens=1) is None


def table_of(rows: dict[int, list[int]]) -> PageTable:
    table = PageTable(SPEC.pool)
    table.commit(rows)
    return table


def as_lists(inputs: Any) -> dict[str, list[Any]]:
    return {name: getattr(inputs, name).tolist() for name in inputs.__slots__}


def test_exact_prefill() -> None:
    plan = plan_step([live(2, 3), live(0, 130, past=127)], max_num_tokens=32)
    assert plan is not None
    inputs = StepBuilder(SPEC, bucketed=False).build(plan, table_of({2: [7], 0: [9, 4]}))
    assert as_lists(inputs) == {
        "input_ids": [0, 1, 2, 27, 28, 29],
        "position_ids": [0, 1, 2, 127, 128, 129],
        "page_table": [[7, -1], [9, 4]],
        "query_start_offsets": [0, 3, 6],
        "past_lens": [0, 127],
    }


@pytest.mark.parametrize("bucketed", [False, True])
def test_decode_has_one_token_row_per_sequence_row(bucketed: bool) -> None:
    sequences = [live(slot, 3, past=260 + slot) for slot in range(3)]
    plan = plan_step(sequences, max_num_tokens=32)
    assert plan is not None
    rows = {slot: [slot * 3, slot * 3 + 1, slot * 3 + 2] for slot in range(3)}
    inputs = StepBuilder(SPEC, bucketed=bucketed).build(plan, table_of(rows))
    padding = 1 if bucketed else 0
    assert as_lists(inputs) == {
        "input_ids": [77] * 3 + [0] * padding,
        "position_ids": [260, 261, 262] + [0] * padding,
        "page_table": [*rows.values()] + [[-1, -1, -1]] * padding,
        "query_start_offsets": [0, 1, 2, 3] + [3] * padding,
        "past_lens": [260, 261, 262] + [0] * padding,
    }


def test_bucketed_prefill_has_more_token_rows_than_sequence_rows() -> None:
    plan = plan_step([live(0, 1), live(1, 1), live(2, 2)], max_num_tokens=32)
    assert plan is not None
    inputs = StepBuilder(SPEC, bucketed=True).build(plan, table_of({0: [0], 1: [1], 2: [2]}))
    assert as_lists(inputs) == {
        "input_ids": [0, 0, 0, 1, 0],
        "position_ids": [0, 0, 0, 1, 0],
        "page_table": [[0], [1], [2], [-1]],
        "query_start_offsets": [0, 1, 2, 4, 4],
        "past_lens": [0, 0, 0, 0],
    }


def test_the_table_is_copied_again_only_when_a_row_of_the_step_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = table_of({0: [3], 1: [4]})
    builder = StepBuilder(SPEC, bucketed=False)
    copies = []
    gather = PageTable.gather

    def counted(self: PageTable, slots: Any, out: Any) -> None:
        copies.append(tuple(slots))
        gather(self, slots, out)

    monkeypatch.setattr(PageTable, "gather", counted)
    sequences = [live(0, 3, past=3), live(1, 3, past=4)]
    plan = plan_step(sequences, max_num_tokens=32)
    assert plan is not None
    for _ in range(3):
        assert builder.build(plan, table).page_table.tolist() == [[3], [4]]
    assert copies == [(0, 1)]
    table.commit({1: [8]})
    assert builder.build(plan, table).page_table.tolist() == [[3], [8]]
    table.commit({5: [9]})
    builder.build(plan, table)
    assert copies == [(0, 1), (1,)]


def test_an_interrupted_copy_of_the_table_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of({0: [3], 1: [4]})
    builder = StepBuilder(SPEC, bucketed=False)
    first, second = (plan_step([live(slot, 3, past=3)], max_num_tokens=32) for slot in (0, 1))
    assert first is not None
    assert second is not None
    builder.build(first, table)
    gather = PageTable.gather

    def interrupted(self: PageTable, slots: Any, out: Any) -> None:
        gather(self, slots, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(PageTable, "gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builder.build(second, table)
    monkeypatch.undo()
    assert builder.build(first, table).page_table.tolist() == [[3]]


def test_padding_holds_nothing_of_the_step_before() -> None:
    rows = {slot: [slot] for slot in range(5)}
    builder = StepBuilder(SPEC, bucketed=True)
    wide = plan_step([live(slot, 9, past=9 + slot) for slot in range(5)], max_num_tokens=32)
    narrow = [
        plan_step([live(slot, 9, past=9) for slot in range(3)], max_num_tokens=32),
        plan_step([live(slot, 1) for slot in range(3)], max_num_tokens=32),
    ]
    assert wide is not None
    for plan in narrow:
        assert plan is not None
        builder.build(wide, table_of(rows))
        fresh = StepBuilder(SPEC, bucketed=True).build(plan, table_of(rows))
        assert as_lists(builder.build(plan, table_of(rows))) == as_lists(fresh)


def test_a_missing_page_is_seen_before_the_executor_runs() -> None:
    plan = plan_step([live(0, 130, past=120)], max_num_tokens=32)
    assert plan is not None
    with pytest.raises(KvPoolError, match="slot 0 needs 2 pages for 130 tokens"):
        StepBuilder(SPEC, bucketed=False).build(plan, table_of({0: [1]}))


def test_too_many_tokens_are_seen_before_the_executor_runs() -> None:
    plan = StepPlan((Segment(live(0, 40), 34),), is_prefill=True)
    with pytest.raises(SequenceError, match="34 tokens does not fit the engine's 33 token rows"):
        StepBuilder(SPEC, bucketed=False).build(plan, table_of({0: [1]}))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.asarray([[1, 3, 3], [-np.inf, -2, -np.inf], [0, np.inf, 0]], np.float16)
    assert greedy(logits) == [1, 1, 1]
    assert greedy(logits[:0]) == []


def test_greedy_names_the_row_without_a_largest_value_and_keeps_the_others() -> None:
    rows = [[1.0, 2.0, 3.0], [0.0, np.nan, 5.0], [-np.inf] * 3, [np.inf, 0.0, np.nan]]
    tokens = greedy(np.asarray(rows, np.float32))
    assert tokens == [2, NO_NEXT_TOKEN, 3, NO_NEXT_TOKEN]
    assert row_error(tokens[0], 0, 3) is None
    for row, what in ((1, "NaN"), (2, "nothing above minus infinity"), (3, "NaN")):
        message = f"row {row} of the logits has no largest value ({what})"
        assert message in str(row_error(tokens[row], row, 3))
