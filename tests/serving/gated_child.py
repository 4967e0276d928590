"""`paged-trt` whose steps wait for the end of the session: `python gated_child.py WHEN WORD...`.

A request cannot end by itself before a signal has come. WHEN is `drains`: the steps go on once the
session takes no more requests; or `ends`: once it ends the open ones too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from polling import wait_until

from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.scripts.cli import end, main

FREE_STEPS = 30
"""Enough for a first piece of text: some tokens are parts of a character."""


def gate_steps(*, drains: bool) -> None:
    sessions: list[AsyncSession] = []
    steps: list[None] = []
    make, step = AsyncSession.__init__, ReferenceExecutor.step

    def making(self: AsyncSession, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        sessions.append(self)

    def stepping(self: ReferenceExecutor, inputs: StepInputs) -> Any:
        steps.append(None)
        if len(steps) > FREE_STEPS:
            wait_until(lambda: sessions[0]._is_closing and (drains or not sessions[0]._drains))
        return step(self, inputs)

    AsyncSession.__init__ = making  # type: ignore[method-assign]
    ReferenceExecutor.step = stepping  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    when, *words = sys.argv[1:]
    gate_steps(drains={"drains": True, "ends": False}[when])
    end(main(words))
