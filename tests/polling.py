"""Waits for what must come by asking again and again: a hang fails, a slow machine does not."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
"""How long a test waits for what must come: only a hang takes as long."""


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until something is so."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.005)
