"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on up to the first stop string, and holds back what may begin one.

    Args:
        stops: the strings, none empty; without any, all text passes at once.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, bool]:
        """Add a piece.

        Args:
            text: the piece.
            is_last: no other piece comes, so nothing is held back.

        Returns:
            The text that is certain now, and whether a stop string ended it: the first one that
            is complete, which is left out with all that follows.
        """
        held = self._held + text
        places = ((held.find(stop), stop) for stop in self._stops)
        # The one that ends first, as if the text had come character by character.
        found = [(at + len(stop), at) for at, stop in places if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)[1]], True
        certain = len(held) if is_last else len(held) - self._beginning(held)
        self._held = held[certain:]
        return held[:certain], False

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)
