"""Compiling ahead: nothing that goes wrong there ends the command that waits for it."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from polling import PATIENCE_SECONDS

from paged_trt.plugins.launch import precompile


class Killed:
    """A job whose process ends, as one does that the kernel of the system killed."""

    head_dim = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def test_a_compiler_that_is_killed_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with caplog.at_level(logging.INFO, "paged_trt"):
        done = precompile.start_compiling([Killed(), Killed()])  # type: ignore[list-item]
        assert done.result(PATIENCE_SECONDS) is None
    assert "one by one" in caplog.text
