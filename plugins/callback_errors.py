"""Keeps exceptions of plugin callbacks, which TensorRT turns into a bare failure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CallbackErrors:
    """The first exception of any callback since the last `clear`."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

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
