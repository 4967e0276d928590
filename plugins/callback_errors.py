"""Keeps exceptions of plugin callbacks, which TensorRT turns into a bare failure."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CallbackErrors:
    """The first exception of any callback since the last `clear`."""

    def __init__(self) -> None:
        self.first: BaseException | None = None
        self._num_watchers = 0

    @property
    def is_watched(self) -> bool:
        """Whether whoever runs the callbacks looks at `first` afterwards."""
        return self._num_watchers > 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Promise, for the block, to look at `first` at its end; it starts empty."""
        self.clear()
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1

    def keep(self, error: BaseException) -> None:
        """Store `error` unless an earlier one is there: later ones are its consequences."""
        if self.first is None:
            self.first = error

    def clear(self) -> None:
        """Forget the stored exception."""
        self.first = None


CALLBACK_ERRORS: Final = CallbackErrors()
"""One per process: TensorRT makes and copies plugins on its own, so no caller can hand one in."""


def kept(callback: Callable[_P, _R]) -> Callable[_P, _R]:
    """A callback whose exception is kept on its way to TensorRT."""

    @functools.wraps(callback)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return callback(*args, **kwargs)
        except BaseException as error:
            CALLBACK_ERRORS.keep(error)
            raise

    return guarded


def kept_or(fallback: _R) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator of a callback that must not raise: its exception is kept, `fallback` returned.

    Measured on RTX 1.6.1 and 1.7.1: an exception in `clone`, `attach_to_context`,
    `get_capability_interface` or `supports_format_combination` ends the process.
    """

    def decorate(callback: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(callback)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return callback(*args, **kwargs)
            except Exception as error:
                CALLBACK_ERRORS.keep(error)
                return fallback

        return guarded

    return decorate


def kept_where_watched(callback: Callable[_P, None]) -> Callable[_P, None]:
    """A callback whose exception reaches TensorRT only where nobody else would notice it.

    Seen on RTX 1.6.1: an exception in `enqueue` leaves a damaged heap, and the process aborts
    when the engine is freed. Who runs steps inside `CallbackErrors.watched` gets none.
    """

    @functools.wraps(callback)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except BaseException as error:
            CALLBACK_ERRORS.keep(error)
            if not CALLBACK_ERRORS.is_watched:
                raise

    return guarded
