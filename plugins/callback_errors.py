"""Keeps exceptions of plugin callbacks, which TensorRT turns into a bare failure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(slots=True)
class Watch:
    """The first exception of the callbacks that a `watched` block ran; None where none raised."""

    first: BaseException | None = None


class CallbackErrors:
    """The first exception of any callback since the last `clear`, but for those in a `Watch`."""

    def __init__(self) -> None:
        self.first: BaseException | None = None
        self._thread = threading.local()

    @property
    def is_watched(self) -> bool:
        """Whether the caller of this thread's callbacks looks at their exceptions."""
        return self._watch is not None

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Promise to look, at the end of the block, at what its callbacks raised.

        Only callbacks of this thread count. Executors of several threads do not meet: an error
        that another one cleared away would leave a step with wrong logits.
        """
        outer, watch = self._watch, Watch()
        self._thread.watch = watch
        try:
            yield watch
        finally:
            self._thread.watch = outer

    def keep(self, error: BaseException) -> None:
        """Store `error` unless an earlier one is there: later ones are its consequences."""
        holder = self._watch or self
        if holder.first is None:
            holder.first = error

    def clear(self) -> None:
        """Forget the stored exception."""
        self.first = None

    @property
    def _watch(self) -> Watch | None:
        watch: Watch | None = getattr(self._thread, "watch", None)
        return watch


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


def keep_where_watched(error: BaseException) -> None:
    """Keep what a callback caught; raise it where nobody else would notice it.

    Seen on RTX 1.6.1: an exception in `enqueue` leaves a damaged heap, and the process aborts
    when the engine is freed. Who runs steps inside `CallbackErrors.watched` gets none.

    Raises:
        BaseException: `error`, where no caller watches.
    """
    CALLBACK_ERRORS.keep(error)
    if not CALLBACK_ERRORS.is_watched:
        raise error
