"""Steps in two halves for an executor that computes at once: what it chose is handed over later.

Nothing is faster for it. It lets a CPU run the very order of events that a device brings: the next
step is made and handed over before anybody knows the tokens of the one before.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import numpy.typing as npt

from paged_trt.runtime.executor import Choices, Draw, Executor, StepInputs, row_of_token
from paged_trt.runtime.step_sampling import sampled_on_host


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
        self._running: collections.deque[Choices | Exception] = collections.deque()
        self._newest: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def launch(self, inputs: StepInputs, draw: Draw | None) -> None:
        """Run a step, and keep what it chose.

        Behind a step that failed it fails with the same error: its tokens were never chosen.
        """
        if self._running and isinstance(self._running[-1], Exception):
            self._running.append(self._running[-1])
            return
        inputs = dataclasses.replace(inputs, input_ids=self._known(inputs.input_ids))
        try:
            choices = self._choose(inputs, draw)
        except Exception as error:
            self._running.append(error)
            return
        self._newest = choices[0]
        self._running.append(choices)

    def collect(self) -> Choices:
        """What the oldest step that was launched chose.

        Raises:
            Exception: it failed.
        """
        choices = self._running.popleft()
        if isinstance(choices, Exception):
            raise choices
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
