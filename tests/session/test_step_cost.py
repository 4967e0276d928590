"""What the host does in a steady decode step of a full batch, counted and not timed."""

from __future__ import annotations

import collections
import sys
from types import FrameType
from typing import Any

import pytest
from session.paged_toy import make_spec, prompt_of
from session.test_core_faults import Constant

from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.session import Session

BATCH = 64


@pytest.fixture
def session() -> Session:
    spec = make_spec(max_batch_size=BATCH, capacity=1024, max_num_tokens=4096)
    session = Session(EngineCore(Constant(spec)))
    for index in range(BATCH):
        session.add(prompt_of(20 + index % 7, seed=index), 200)
    while session.stats().decode_steps < 3:
        session.step()
    return session


def count_calls(run: Any) -> collections.Counter[str]:
    """Python functions that were entered, by name."""
    calls: collections.Counter[str] = collections.Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_python_calls_of_a_steady_step(session: Session) -> None:
    calls = count_calls(session.step)
    per_sequence = {name: count for name, count in calls.items() if count >= BATCH}
    # For each sequence: whether it decodes and samples, its end, its token, its result.
    assert sum(per_sequence.values()) <= 16 * BATCH, per_sequence
    assert sum(calls.values()) - sum(per_sequence.values()) <= 100, calls


def test_a_steady_step_touches_neither_pages_nor_rows(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []
    for name in ("allocate", "release", "share", "describe", "find"):
        monkeypatch.setattr(
            type(session.core.batch.registry), name, lambda *_, name=name: touched.append(name)
        )
    for name in ("commit", "gather", "check_row"):
        monkeypatch.setattr(PageTable, name, lambda *_, name=name, **__: touched.append(name))
    for _ in range(20):
        assert len(session.step()) == BATCH
    assert touched == []
