"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class FairLock:
    """Runs the work of one thread at a time, in the order in which the threads asked.

    A thread that lets go of a plain lock and asks again mostly gets it again, however long
    another one has waited: a loop of short steps would keep everybody else out. Here it stands
    behind those that wait. A thread whose work runs may ask again from inside of it, and a
    signal handler may ask while its thread waits.

    Who asks takes a place, which is a lock held until its work is done, and waits for the place
    before it. All locks are let go by a `with` on a lock of the interpreter itself, which runs
    no line of Python: a KeyboardInterrupt can come at any moment and leaves none of them held.
    A method of a class could be interrupted before its first line, so this is no `with` itself.
    """

    def __init__(self) -> None:
        self._places = threading.Lock()
        self._last = threading.Lock()
        # Mostly free for who has come to its turn: but a wait that was interrupted lets the next
        # one pass while an earlier one still works, and a signal handler has no place.
        self._works = threading.Lock()
        self._inside = (0, self._last)
        self._own = threading.local()

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread asks while another one's work runs."""
        return self._last.locked() and self._last is not self._inside[1]

    def run(self, work: Callable[[], _T]) -> _T:
        """Wait for this thread's turn, do the work, and give what it returns.

        Raises:
            BaseException: what the work raises, or what interrupts the wait; then nothing is
                held, and the work was not begun.
        """
        ident = threading.get_ident()
        holder, place = self._inside
        if holder == ident and place.locked():
            return work()
        waiting, place = getattr(self._own, "place", None), threading.Lock()
        if waiting is not None and waiting.locked():
            # A signal handler: its thread waits below, and nobody behind that one passes it.
            with self._works, place:
                self._inside = (ident, place)
                return work()
        self._own.place = place
        with place:
            with self._places:
                before, self._last = self._last, place
            with before:
                pass
            with self._works:
                self._inside = (ident, place)
                return work()
