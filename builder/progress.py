"""Progress of a build on stderr, and Ctrl-C that stops it between two steps."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class BuildProgress:
    """Listener of a TensorRT build, active inside a `with` block.

    In the main thread Ctrl-C sets `is_cancelled` instead of raising, and the next step stops
    the build: an exception in a callback would be lost inside TensorRT.

    Args:
        show: draw bars; None draws them where stderr is a terminal.
    """

    def __init__(self, *, show: bool | None = None) -> None:
        self.is_cancelled = False
        is_shown = sys.stderr.isatty() if show is None else show
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not is_shown,
        )
        self._tasks: dict[str, TaskID] = {}
        self._previous_handler: Any = None

    def __enter__(self) -> BuildProgress:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._cancel)
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None

    def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
        """Add a bar of `num_steps` steps."""
        self._tasks[phase] = self._bars.add_task(phase, total=num_steps)

    def step_complete(self, phase: str, step: int) -> bool:
        """Move the bar; False after Ctrl-C."""
        if phase in self._tasks:
            self._bars.update(self._tasks[phase], completed=step + 1)
        return not self.is_cancelled

    def phase_finish(self, phase: str) -> None:
        """Remove the bar."""
        task = self._tasks.pop(phase, None)
        if task is not None:
            self._bars.remove_task(task)

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        self.is_cancelled = True
