"""An executor whose steps are timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from paged_trt.runtime.executor import Executor, StepInputs

_Result = TypeVar("_Result")


class TimedExecutor:
    """Notes how long each step took.

    Args:
        executor: does all else.
        notes_waits: also note `wait_seconds`; asking for them takes microseconds outside the step.

    Attributes:
        prefill_seconds: of each step with T > N.
        decode_seconds: of each step with T = N.
        wait_seconds: the part of each decode step that waited for the device; 0 where the
            executor does not tell.
    """

    def __init__(self, executor: Executor, *, notes_waits: bool = False) -> None:
        self._executor = executor
        self._notes_waits = notes_waits
        self.prefill_seconds: list[float] = []
        self.decode_seconds: list[float] = []
        self.wait_seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        """As of the executor."""
        return self._time(self._executor.step, inputs)

    def step_tokens(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """As of the executor."""
        return self._time(self._executor.step_tokens, inputs)

    def step_sampled(
        self, inputs: StepInputs, *rest: Any, **options: Any
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """As of the executor."""
        return self._time(self._executor.step_sampled, inputs, *rest, **options)

    def _time(
        self, step: Callable[..., _Result], inputs: StepInputs, *rest: Any, **options: Any
    ) -> _Result:
        waited, begin = self._waited(), time.perf_counter()
        result = step(inputs, *rest, **options)
        seconds = time.perf_counter() - begin
        if len(inputs.input_ids) == len(inputs.past_lens):
            self.decode_seconds.append(seconds)
            self.wait_seconds.append(self._waited() - waited)
        else:
            self.prefill_seconds.append(seconds)
        return result

    def _waited(self) -> float:
        read = getattr(self._executor, "stats", None) if self._notes_waits else None
        return float(read().wait_seconds) if read is not None else 0.0
