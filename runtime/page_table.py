"""Host mirror of the page table: the source of truth, checked before a step sees a row."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import KvPoolError
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, KvPoolSpec, pages_for_tokens, tokens_in_pages


class PageTable:
    """Rows of page ids, `[max_batch_size, max_pages_per_seq] int32`, one per slot.

    A row holds the pages of one sequence from the left; the rest is UNUSED_PAGE_ENTRY, and so
    are the first entries where no layer sees their pages any more. A call that raises has
    changed nothing.

    Args:
        pool: geometry of the pool.
    """

    def __init__(self, pool: KvPoolSpec) -> None:
        self._pool = pool
        self._ids: npt.NDArray[np.int32] = np.full(
            (pool.max_batch_size, pool.max_pages_per_seq), UNUSED_PAGE_ENTRY, np.int32
        )
        self._lengths = [0] * pool.max_batch_size
        self._rows_of_page: collections.Counter[int] = collections.Counter()
        self._dirty: set[int] = set()

    def row(self, slot: int) -> tuple[int, ...]:
        """Entries of `slot` up to its last page.

        Raises:
            KvPoolError: `slot` is outside the table.
        """
        self._check_slot(slot)
        return tuple(self._ids[slot, : self._lengths[slot]].tolist())

    def commit(
        self, rows: Mapping[int, Sequence[int]], *, shared: Collection[int] = frozenset()
    ) -> None:
        """Replace whole rows: all of them, or none.

        Args:
            rows: slot -> pages of its sequence, in order; the first may be unused entries.
            shared: ids that rows of several slots may hold.

        Raises:
            KvPoolError: a slot is outside the table, a row is too long, or a page id is
                outside the pool, twice in a row, or in another row and not shared.
        """
        change: collections.Counter[int] = collections.Counter()
        for slot, pages in rows.items():
            self._check_slot(slot)
            self._check_pages(slot, pages)
            change.subtract(self.row(slot))
            change.update(pages)
        del change[UNUSED_PAGE_ENTRY]
        for slot, pages in rows.items():
            for page_id in pages:
                owners = self._rows_of_page.get(page_id, 0) + change[page_id]
                if owners > 1 and page_id not in shared:
                    raise KvPoolError(
                        f"page {page_id} of slot {slot} is in {owners} rows; a page belongs "
                        "to one sequence unless it is shared"
                    )
        for page_id, difference in change.items():
            self._rows_of_page[page_id] += difference
            if not self._rows_of_page[page_id]:
                del self._rows_of_page[page_id]
        for slot, pages in rows.items():
            self._write(slot, pages)

    def clear(self, slot: int) -> None:
        """Make every entry of a row unused.

        Raises:
            KvPoolError: `slot` is outside the table.
        """
        self.commit({slot: ()})

    def move(self, source: int, target: int) -> None:
        """Move a row to an empty slot; no key or value byte moves.

        Raises:
            KvPoolError: a slot is outside the table, or the target holds pages.
        """
        pages = self.row(source)
        if self.row(target):
            raise KvPoolError(
                f"slot {target} still holds {self._lengths[target]} pages; clear it before "
                f"slot {source} moves there"
            )
        self._write(source, ())
        self._write(target, pages)

    def check_row(self, slot: int, num_tokens: int, *, first_page: int = 0) -> None:
        """Verify that a row holds `num_tokens` tokens on pages of the pool.

        Args:
            slot: row to check.
            num_tokens: tokens of its sequence after the step.
            first_page: first page that the step sees.

        Raises:
            KvPoolError: the row is too short, or a needed entry is outside the pool.
        """
        self._check_slot(slot)
        needed = pages_for_tokens(num_tokens)
        if needed > self._lengths[slot]:
            raise KvPoolError(
                f"slot {slot} needs {needed} pages for {num_tokens} tokens and its row holds "
                f"{self._lengths[slot]}"
            )
        entries = self._ids[slot, first_page:needed]
        for edge in (int(entries.argmin()), int(entries.argmax())) if len(entries) else ():
            if not self._pool.owns(int(entries[edge])):
                raise KvPoolError(
                    f"row {slot}, column {first_page + edge} of the page table holds id "
                    f"{entries[edge]}, outside the pool of {self._pool.num_pages} pages"
                )

    def capacity(self, slot: int) -> int:
        """Tokens that the pages of a row hold.

        Raises:
            KvPoolError: `slot` is outside the table.
        """
        self._check_slot(slot)
        return tokens_in_pages(self._lengths[slot])

    def gather(self, slots: Sequence[int], out: npt.NDArray[np.int32]) -> None:
        """Copy the first columns of some rows.

        Args:
            slots: rows to copy, in order.
            out: `[len(slots), M] int32`, with M at most `max_pages_per_seq`.

        Raises:
            KvPoolError: M is wider than the table.
        """
        width = out.shape[1]
        if width > self._ids.shape[1]:
            raise KvPoolError(
                f"a step of table width {width} is wider than the table of "
                f"{self._ids.shape[1]} entries"
            )
        out[:] = self._ids[list(slots), :width]

    def take_dirty(self) -> frozenset[int]:
        """Slots whose row changed since the last call."""
        dirty, self._dirty = frozenset(self._dirty), set()
        return dirty

    def set_identity(self) -> None:
        """Map slot b to the pages [b * M, (b + 1) * M), with M = `max_pages_per_seq`."""
        slots = range(self._pool.max_batch_size)
        self.commit({slot: self._pool.identity_pages(slot) for slot in slots})

    def is_identity(self) -> bool:
        """Whether every row is mapped as by `set_identity`; an unused entry makes it False."""
        return all(
            self._ids[slot].tolist() == list(self._pool.identity_pages(slot))
            for slot in range(self._pool.max_batch_size)
        )

    def _write(self, slot: int, pages: Sequence[int]) -> None:
        self._ids[slot, : len(pages)] = pages
        self._ids[slot, len(pages) :] = UNUSED_PAGE_ENTRY
        self._lengths[slot] = len(pages)
        self._dirty.add(slot)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._pool.max_batch_size:
            raise KvPoolError(
                f"slot {slot} is outside the table of {self._pool.max_batch_size} rows"
            )

    def _check_pages(self, slot: int, pages: Sequence[Any]) -> None:
        if len(pages) > self._ids.shape[1]:
            raise KvPoolError(
                f"{len(pages)} pages do not fit the row of slot {slot}, which has "
                f"{self._ids.shape[1]} entries"
            )
        seen = list(itertools.dropwhile(lambda entry: entry == UNUSED_PAGE_ENTRY, pages))
        for page_id in seen:
            if type(page_id) is not int or not self._pool.owns(page_id):
                raise KvPoolError(
                    f"page id {page_id!r} of slot {slot} is outside the pool of "
                    f"{self._pool.num_pages} pages"
                )
        if len(set(seen)) != len(seen):
            twice = next(page for page in seen if seen.count(page) > 1)
            raise KvPoolError(f"page {twice} is twice in the row of slot {slot}")
