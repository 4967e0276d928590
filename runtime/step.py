"""Assembles the host arrays of one step and checks them before an executor sees them."""

from __future__ import annotations

import bisect

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
from paged_trt.runtime.scheduler import StepPlan


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
        self._table_key: tuple[int, int, tuple[int, ...]] | None = None

    def build(self, plan: StepPlan, table: PageTable) -> StepInputs:
        """Arrays of one step; they are views that the next call overwrites.

        Args:
            plan: at least one segment.
            table: rows of the segments' slots cover the tokens of this step.

        Raises:
            KvPoolError: a row of the table is too short or names a page outside the pool.
            SequenceError: the step has more tokens than the engine takes.
        """
        num_seqs, num_rows, width = self._shape(plan)
        token = 0
        self._offsets[0] = 0
        self._past_lens[:num_rows] = 0
        for row, segment in enumerate(plan.segments):
            sequence, count = segment.sequence, segment.num_tokens
            first_page = first_visible_page(sequence.past_len, self._window)
            table.check_row(sequence.slot, segment.end, first_page=first_page)
            self._input_ids[token : token + count] = sequence.next_ids(count)
            self._position_ids[token : token + count] = range(sequence.past_len, segment.end)
            token += count
            self._offsets[row + 1] = token
            self._past_lens[row] = sequence.past_len
        self._offsets[num_seqs + 1 : num_rows + 1] = token
        # T == N is the decode encoding: a prefill step always has more tokens than rows.
        num_tokens = max(token, num_rows + 1) if plan.is_prefill else num_rows
        self._input_ids[token:num_tokens] = 0
        self._position_ids[token:num_tokens] = 0
        self._gather(plan, table, num_rows=num_rows, width=width)
        return StepInputs(
            input_ids=self._input_ids[:num_tokens],
            position_ids=self._position_ids[:num_tokens],
            page_table=self._table[: num_rows * width].reshape(num_rows, width),
            query_start_offsets=self._offsets[: num_rows + 1],
            past_lens=self._past_lens[:num_rows],
        )

    def _shape(self, plan: StepPlan) -> tuple[int, int, int]:
        """Sequences, sequence rows N and table width M of a step."""
        num_seqs = len(plan.segments)
        num_tokens = sum(segment.num_tokens for segment in plan.segments)
        if num_tokens > self._spec.max_token_rows:
            raise SequenceError(
                f"a step of {num_tokens} tokens does not fit the engine's "
                f"{self._spec.max_token_rows} token rows; prefill in smaller chunks"
            )
        pages = max(pages_for_tokens(segment.end) for segment in plan.segments)
        num_rows = self._row_buckets[bisect.bisect_left(self._row_buckets, num_seqs)]
        width = self._width_buckets[bisect.bisect_left(self._width_buckets, pages)]
        return num_seqs, num_rows, width

    def _gather(self, plan: StepPlan, table: PageTable, *, num_rows: int, width: int) -> None:
        slots = tuple(segment.sequence.slot for segment in plan.segments)
        key = (num_rows, width, slots)
        # Most decode steps change no row: then the array holds this step's table already.
        if table.take_dirty().isdisjoint(slots) and key == self._table_key:
            return
        self._table_key = None
        view = self._table[: num_rows * width].reshape(num_rows, width)
        table.gather(slots, view[: len(slots)])
        view[len(slots) :] = UNUSED_PAGE_ENTRY
        self._table_key = key
