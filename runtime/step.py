"""Assembles the host arrays of one step and checks them before an executor sees them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from paged_trt.plugins.errors import SequenceError
from paged_trt.plugins.kv import (
    UNUSED_PAGE_ENTRY,
    first_visible_page,
    pages_for_tokens,
    power_of_two_buckets,
    table_width_buckets,
)
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.scheduler import Segment, StepPlan


class StepBuilder:
    """Fills preallocated arrays: a step allocates no array that grows with its size.

    Letters: T token rows, N sequence rows, M page-table width of the step.

    Args:
        spec: interface of the engine.
        bucketed: take N and M from the fixed bucket lists and pad; otherwise they are exact.
    """

    def __init__(self, spec: EngineSpec, *, bucketed: bool) -> None:
        self._spec = spec
        self._window = spec.widest_window
        rows, batch = spec.max_token_rows, spec.pool.max_batch_size
        self._row_buckets = power_of_two_buckets(batch) if bucketed else range(1, batch + 1)
        width_buckets = table_width_buckets(spec.pool)
        self._max_width = width_buckets[-1]
        self._width_buckets = width_buckets if bucketed else range(1, self._max_width + 1)
        self._input_ids = np.zeros(rows, np.int64)
        self._position_ids = np.zeros(rows, np.int64)
        self._offsets = np.zeros(batch + 1, np.int32)
        self._past_lens = np.zeros(batch, np.int32)
        self._table = np.zeros(batch * self._max_width, np.int32)
        self._counting = np.arange(batch + 1, dtype=np.int32)
        self._table_key: tuple[int, int, tuple[int, ...]] | None = None
        self._rooms: list[int] = []

    def build(self, plan: StepPlan, table: PageTable) -> StepInputs:
        """Arrays of one step; they are views that the next call overwrites.

        Args:
            plan: at least one segment.
            table: rows of the segments' slots cover the tokens of this step.

        Raises:
            KvPoolError: a row of the table is too short or names a page outside the pool.
            SequenceError: the step has more tokens than the engine takes.
        """
        past = [segment.sequence.past_len for segment in plan.segments]
        ends = [start + each.num_tokens for start, each in zip(past, plan.segments, strict=True)]
        num_seqs, num_rows, width = self._shape(sum(ends) - sum(past), ends)
        fill = self._fill_ragged if plan.is_prefill else self._fill_decode
        token = fill(plan.segments)
        self._past_lens[num_seqs:num_rows] = 0
        self._offsets[num_seqs + 1 : num_rows + 1] = token
        # T == N is the decode encoding: a prefill step always has more tokens than rows.
        num_tokens = max(token, num_rows + 1) if plan.is_prefill else num_rows
        self._input_ids[token:num_tokens] = 0
        self._position_ids[token:num_tokens] = 0
        self._gather(plan, table, ends, num_rows=num_rows, width=width)
        return StepInputs(
            input_ids=self._input_ids[:num_tokens],
            position_ids=self._position_ids[:num_tokens],
            page_table=self._table[: num_rows * width].reshape(num_rows, width),
            query_start_offsets=self._offsets[: num_rows + 1],
            past_lens=self._past_lens[:num_rows],
        )

    def _fill_ragged(self, segments: Sequence[Segment]) -> int:
        token = 0
        self._offsets[0] = 0
        for row, segment in enumerate(segments):
            sequence, end = segment.sequence, token + segment.num_tokens
            self._input_ids[token:end] = sequence.next_ids(segment.num_tokens)
            self._position_ids[token:end] = range(sequence.past_len, segment.end)
            self._past_lens[row] = sequence.past_len
            token = self._offsets[row + 1] = end
        return token

    def _fill_decode(self, segments: Sequence[Segment]) -> int:
        """As `_fill_ragged`, for rows of one token: one assignment for all rows."""
        count = len(segments)
        past = [segment.sequence.past_len for segment in segments]
        self._input_ids[:count] = [
            segment.sequence.tokens[position]
            for segment, position in zip(segments, past, strict=True)
        ]
        self._position_ids[:count] = past
        self._past_lens[:count] = past
        self._offsets[: count + 1] = self._counting[: count + 1]
        return count

    def _shape(self, num_tokens: int, ends: list[int]) -> tuple[int, int, int]:
        """Sequences, sequence rows N and table width M of a step."""
        num_seqs = len(ends)
        if num_tokens > self._spec.max_token_rows:
            raise SequenceError(
                f"a step of {num_tokens} tokens does not fit the engine's "
                f"{self._spec.max_token_rows} token rows; prefill in smaller chunks"
            )
        pages = pages_for_tokens(max(ends))
        num_rows = self._row_buckets[bisect.bisect_left(self._row_buckets, num_seqs)]
        width = self._width_buckets[bisect.bisect_left(self._width_buckets, pages)]
        return num_seqs, num_rows, width

    def _gather(
        self, plan: StepPlan, table: PageTable, ends: list[int], *, num_rows: int, width: int
    ) -> None:
        """Copy the rows of the step, once they are known to hold its tokens."""
        slots = tuple(segment.sequence.slot for segment in plan.segments)
        dirty, key = table.take_dirty(), (num_rows, width, slots)
        is_same = key == self._table_key
        view = self._table[: num_rows * width].reshape(num_rows, width)
        # Most decode steps change no row: then the array holds this step's table already.
        changed = [row for row, slot in enumerate(slots) if slot in dirty or not is_same]
        self._table_key = None
        _check_rows([plan.segments[row] for row in changed], table, self._window)
        if is_same:
            for row in changed:
                table.gather(slots[row : row + 1], view[row : row + 1])
                self._rooms[row] = table.capacity(slots[row])
        else:
            table.gather(slots, view[: len(slots)])
            view[len(slots) :] = UNUSED_PAGE_ENTRY
            self._rooms = [table.capacity(slot) for slot in slots]
        short = [row for row, room in enumerate(self._rooms) if ends[row] > room]
        _check_rows([plan.segments[row] for row in short], table, self._window)
        self._table_key = key


def _check_rows(segments: Sequence[Segment], table: PageTable, window: int) -> None:
    for segment in segments:
        first_page = first_visible_page(segment.sequence.past_len, window)
        table.check_row(segment.sequence.slot, segment.end, first_page=first_page)
