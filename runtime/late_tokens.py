"""Steps in two halves for an executor that computes at once: what it chose is handed over later.

Nothing is faster for it. It lets a CPU run the very order of events that a device brings: the next
step is made and handed over before anybody knows the tokens of the one before.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.executor import Choices, Draw, Executor, StepInputs, row_of_token
from paged_trt.runtime.step_sampling import sampled_on_host


class LateStep:
    """A step that ran, and what it chose, until somebody asks for that."""

    __slots__ = ("choices", "error")

    def __init__(self, *, choices: Choices | None = None, error: Exception | None = None) -> None:
        self.choices, self.error = choices, error


class LateTokens:
    """A `StepLauncher` over any executor.

    An error of a step is handed over late as well, as one of a device would be. What is no
    Exception, such as KeyboardInterrupt, is raised at once.

    Args:
        executor: runs the steps.
    """

    draws = True

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._before: LateStep | None = None
        self._newest: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def launch(self, inputs: StepInputs, draw: Draw | None) -> LateStep:
        """Run a step, and keep what it chose.

        Behind a failed step that nobody has collected it fails with the same error: its tokens
        were never chosen.
        """
        step = LateStep(error=None if self._before is None else self._before.error)
        if step.error is None:
            inputs = dataclasses.replace(inputs, input_ids=self._known(inputs.input_ids))
            try:
                step.choices = self._choose(inputs, draw)
                self._newest = step.choices[0]
            except Exception as error:
                step.error = error
        self._before = step
        return step

    def collect(self, step: LateStep) -> Choices:
        """What a step chose.

        Raises:
            Exception: it failed.
            ExecutionError: it was collected before.
        """
        if self._before is step:
            self._before = None
        choices, step.choices = step.choices, None
        if step.error is not None:
            raise step.error
        if choices is None:
            raise ExecutionError("a step is collected once; this one was collected before")
        return choices

    def _choose(self, inputs: StepInputs, draw: Draw | None) -> Choices:
        if draw is None:
            tokens = self._executor.step_tokens(inputs)
            return tokens, np.zeros(len(tokens), np.float32)
        executor, rows = self._executor, range(len(draw.specs))
        if not executor.samples_on_device:
            return sampled_on_host(
                executor, inputs, rows, draw.specs, draw.steps, with_logprobs=draw.with_logprobs
            )
        return executor.step_sampled(
            inputs, rows, draw.specs, draw.steps, with_logprobs=draw.with_logprobs
        )

    def _known(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ids in which rows of the step before are replaced by what they chose, as on a device.

        A row that chose nothing gives token 0: its sequence has ended.
        """
        known = ids.copy()
        for index in np.flatnonzero(ids < 0).tolist():
            token = int(self._newest[row_of_token(int(ids[index]))])
            known[index] = token if 0 <= token < self._executor.spec.vocab_size else 0
        return known
