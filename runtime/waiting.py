"""Sequences that wait for a slot, and orders that arrive while a step runs."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from paged_trt.plugins.errors import QueueFullError
from paged_trt.runtime.sequences import LiveSequence


class WaitingLine:
    """First come, first served; a sequence that gave its pages away stands at the front.

    `put`, `take_back` and `drop` may be called from any thread while a step runs. All else belongs
    to the thread that runs the step, which takes the orders in first.

    Args:
        max_waiting: sequences that may wait at most; None for no limit.
    """

    def __init__(self, max_waiting: int | None) -> None:
        self._max_waiting = max_waiting
        self._arrived: collections.deque[LiveSequence] = collections.deque()
        self._dropped: collections.deque[LiveSequence] = collections.deque()
        self._waiting: collections.OrderedDict[int, LiveSequence] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._arrived) + len(self._waiting)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(tuple(self._waiting.values()))

    def put(self, sequence: LiveSequence) -> None:
        """Stand at the end.

        Raises:
            QueueFullError: as many sequences wait as may wait.
        """
        if self._max_waiting is not None and len(self) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self)} sequences wait and max_waiting={self._max_waiting}; try again later"
            )
        self._arrived.append(sequence)

    def take_back(self, sequence: LiveSequence) -> bool:
        """Undo `put`; False where the sequence was taken already."""
        try:
            self._arrived.remove(sequence)
        except ValueError:
            return False
        return True

    def drop(self, sequences: Iterable[LiveSequence]) -> None:
        """Order that sequences are dropped, those that run included."""
        self._dropped.extend(sequences)

    def take_orders(self) -> list[LiveSequence]:
        """Let those that arrived wait, and give those that are to be dropped."""
        # In this order: what is dropped has arrived before.
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        while self._arrived:
            sequence = self._arrived.popleft()
            self._waiting[sequence.sequence_id] = sequence
        return dropped

    @property
    def first(self) -> LiveSequence | None:
        """Who is next."""
        return next(iter(self._waiting.values()), None)

    def remove(self, sequence: LiveSequence) -> bool:
        """Let a sequence wait no more; False where it did not."""
        return self._waiting.pop(sequence.sequence_id, None) is not None

    def put_first(self, sequence: LiveSequence) -> None:
        """Stand at the front."""
        self._waiting[sequence.sequence_id] = sequence
        self._waiting.move_to_end(sequence.sequence_id, last=False)
