"""Exceptions of plugin callbacks reach whoever runs the callbacks, and nobody else."""

from __future__ import annotations

import threading

import pytest

from paged_trt.plugins.callback_errors import (
    CALLBACK_ERRORS,
    CallbackErrors,
    keep_where_watched,
)


def test_a_watch_takes_the_first_error_and_leaves_no_trace() -> None:
    errors = CallbackErrors()
    first, later = ValueError("first"), ValueError("later")
    with errors.watched() as watch:
        assert errors.is_watched
        errors.keep(first)
        errors.keep(later)
    assert watch.first is first
    assert errors.first is None
    assert not errors.is_watched


def test_outside_of_a_watch_errors_are_kept_until_cleared() -> None:
    errors = CallbackErrors()
    errors.keep(ValueError("build"))
    with errors.watched() as watch:
        pass
    assert str(errors.first) == "build"
    assert watch.first is None
    errors.clear()
    assert errors.first is None


def test_the_inner_of_two_watches_takes_the_error() -> None:
    errors = CallbackErrors()
    with errors.watched() as outer:
        with errors.watched() as inner:
            errors.keep(ValueError("inner"))
        errors.keep(ValueError("outer"))
    assert (str(inner.first), str(outer.first)) == ("inner", "outer")
    assert not errors.is_watched


def test_a_step_of_another_thread_takes_no_error_away() -> None:
    """Both steps run at once: the second one starts, fails or not, and ends within the first."""
    errors = CallbackErrors()
    seen: list[bool] = []

    def other() -> None:
        seen.append(errors.is_watched)
        with errors.watched() as watch:
            errors.clear()
        seen.append(watch.first is None)

    with errors.watched() as watch:
        errors.keep(ValueError("mine"))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [False, True]
    assert str(watch.first) == "mine"


def test_an_error_that_nobody_watches_for_is_raised() -> None:
    error = ValueError("unseen")
    with CALLBACK_ERRORS.watched() as watch:
        keep_where_watched(error)
    assert watch.first is error
    assert CALLBACK_ERRORS.first is None
    try:
        with pytest.raises(ValueError, match="unseen") as caught:
            keep_where_watched(error)
        assert caught.value is CALLBACK_ERRORS.first
    finally:
        CALLBACK_ERRORS.clear()
