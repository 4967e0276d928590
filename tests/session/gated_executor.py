"""An executor that runs the steps that a test lets it: nothing depends on who is faster."""

from __future__ import annotations

import threading
from typing import Any

from polling import PATIENCE_SECONDS
from session.history_executor import HistoryExecutor

from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.executor import StepInputs


class Gated(HistoryExecutor):
    """Runs its first steps freely; every later one waits until a test opens the gate.

    Args:
        spec: interface of the engine.
        free_steps: steps that do not wait.

    Attributes:
        gate: set it to let the steps run.
        waits: set once a step has come to the gate.
    """

    def __init__(self, spec: EngineSpec, *, free_steps: int = 0) -> None:
        super().__init__(spec)
        self._free_steps = free_steps
        self.gate = threading.Event()
        self.waits = threading.Event()

    def step(self, inputs: StepInputs) -> Any:
        if len(self.shapes) >= self._free_steps:
            self.waits.set()
            assert self.gate.wait(PATIENCE_SECONDS)
        return super().step(inputs)

    def wait_for_step(self) -> None:
        """Wait until a step has come to the gate."""
        assert self.waits.wait(PATIENCE_SECONDS)
