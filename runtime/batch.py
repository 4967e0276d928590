"""Live sequences and their pages: slots, registry and page table move together here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paged_trt.plugins.errors import SequenceError
from paged_trt.plugins.kv import KvPoolSpec, pages_for_tokens
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.registry import PageRegistry
from paged_trt.runtime.scheduler import StepPlan
from paged_trt.runtime.sequences import LiveSequence


class Batch:
    """Live sequences by slot, without gaps: n of them hold the slots 0 to n - 1.

    Invariant: the row of a slot holds the pages of its sequence, and every used page of the
    registry belongs to a live sequence.

    Args:
        pool: geometry of the pool.
        page_order: as `free_order` of the registry.

    Attributes:
        registry: owner of the pages.
        table: rows of the slots.
    """

    def __init__(self, pool: KvPoolSpec, *, page_order: Sequence[int] | None = None) -> None:
        self._capacity = pool.max_batch_size
        self._by_slot: list[LiveSequence] = []
        self.registry = PageRegistry(pool, free_order=page_order)
        self.table = PageTable(pool)

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(tuple(self._by_slot))

    @property
    def has_free_slot(self) -> bool:
        """Whether one more sequence fits."""
        return len(self._by_slot) < self._capacity

    def admit(self, sequence: LiveSequence) -> None:
        """Give a sequence the next slot; its pages come with its steps.

        Raises:
            SequenceError: every slot is taken.
        """
        if not self.has_free_slot:
            raise SequenceError(
                f"{len(self)} sequences are live and the engine has max_batch_size="
                f"{self._capacity}; release one, or rebuild with a larger `--max-batch-size`"
            )
        sequence.slot = len(self._by_slot)
        self._by_slot.append(sequence)

    def get(self, sequence_id: int) -> LiveSequence:
        """The live sequence with this id.

        Raises:
            SequenceError: it was never added, or it has finished or was released.
        """
        for sequence in self._by_slot:
            if sequence.sequence_id == sequence_id:
                return sequence
        raise SequenceError(
            f"sequence {sequence_id} is not live: it finished, was released or was never "
            f"added; {len(self)} sequences are live"
        )

    def grow(self, plan: StepPlan) -> None:
        """Give each sequence of a step the pages that its tokens need.

        Raises:
            PagesExhausted: not all of them can have theirs; nothing was changed.
        """
        missing = [
            pages_for_tokens(segment.end) - len(segment.sequence.pages) for segment in plan.segments
        ]
        pages = self.registry.allocate(sum(missing))
        unassigned = iter(pages)
        grown = {
            segment.sequence: [*segment.sequence.pages, *(next(unassigned) for _ in range(count))]
            for segment, count in zip(plan.segments, missing, strict=True)
            if count
        }
        try:
            self.table.commit({sequence.slot: row for sequence, row in grown.items()})
        except BaseException:
            self.registry.release(pages)
            raise
        for sequence, row in grown.items():
            sequence.pages = row

    def drop(self, sequence: LiveSequence) -> None:
        """Free the pages and the slot of a sequence; nothing to do where it is not live.

        The sequence of the last slot moves to the free one, so that a decode step finds its
        rows side by side. Only the row moves.
        """
        if sequence not in self._by_slot:
            return
        slot, last = sequence.slot, self._by_slot.pop()
        self.table.clear(slot)
        if last is not sequence:
            self.table.move(last.slot, slot)
            last.slot = slot
            self._by_slot[slot] = last
        self.registry.release(sequence.pages)
        sequence.pages = []

    def drop_all(self) -> None:
        """Free every page and every slot."""
        for sequence in self:
            self.drop(sequence)
