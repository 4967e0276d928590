"""Executors that run the steps that a test lets them: nothing depends on who is faster."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from polling import PATIENCE_SECONDS
from session.history_executor import HistoryExecutor

from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.executor import Executor, StepInputs


class StepGate:
    """Where steps wait once a test has closed it; it is open before."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_reached = threading.Event()
        self._free_steps = 0

    def close(self, *, free_steps: int = 0) -> None:
        """Let only so many steps go through; no step may run meanwhile."""
        self._free_steps = free_steps
        self._is_reached.clear()
        self._is_open.clear()

    def open(self) -> None:
        """Let all steps go through."""
        self._is_open.set()

    def go_through(self) -> None:
        """Called by each step, in the engine's thread, before it runs."""
        if self._free_steps > 0:
            self._free_steps -= 1
            return
        self._is_reached.set()
        assert self._is_open.wait(PATIENCE_SECONDS)

    def wait_for_step(self) -> None:
        """Wait until a step has come to the closed gate."""
        assert self._is_reached.wait(PATIENCE_SECONDS)


class Gated(HistoryExecutor):
    """Runs its first steps; every later one waits until a test opens the gate.

    Args:
        spec: interface of the engine.
        free_steps: steps that do not wait.
    """

    def __init__(self, spec: EngineSpec, *, free_steps: int = 0) -> None:
        super().__init__(spec)
        self.gate = StepGate()
        self.gate.close(free_steps=free_steps)

    def step(self, inputs: StepInputs) -> Any:
        self.gate.go_through()
        return super().step(inputs)


def gate_steps(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> StepGate:
    """Put a gate, which is open, before the steps of any executor that makes logits."""
    gate, step = StepGate(), executor.step

    def gated(inputs: StepInputs) -> Any:
        gate.go_through()
        return step(inputs)

    monkeypatch.setattr(executor, "step", gated)
    return gate
