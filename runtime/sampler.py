"""Choice of the next tokens, from the logits of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.tensors import LogitsMode
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.scheduler import StepPlan


def greedy(logits: npt.NDArray[Any]) -> list[int]:
    """Id of the largest logit of each row; the lowest id among equals.

    Args:
        logits: `[rows, vocab_size]` float16 or float32.

    Raises:
        ExecutionError: a row holds NaN, or nothing above minus infinity.
    """
    best = np.argmax(logits, axis=1)
    # argmax returns the first NaN of a row, so the winner alone tells whether there is one.
    winners = logits[np.arange(len(best)), best]
    for row in np.flatnonzero(~(winners > -np.inf)).tolist():
        raise ExecutionError(
            f"row {row} of the logits has no largest value (token {best[row]} has "
            f"{winners[row]}); the weights or the KV scales overflow the model's type: "
            "run `paged-trt compare` to find the first wrong step"
        )
    return [int(token) for token in best]


def sampled_rows(
    executor: Executor, plan: StepPlan, inputs: StepInputs, logits: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Logits `[len(plan.segments), vocab_size]` of the last token of each segment.

    Raises:
        ExecutionError: the logits are not of the shape that the engine promises.
    """
    spec = executor.spec
    is_last = spec.logits_mode is LogitsMode.LAST
    rows = len(inputs.past_lens) if is_last else len(inputs.input_ids)
    if logits.shape != (rows, spec.vocab_size):
        raise ExecutionError(
            f"the {executor.name} executor gave logits of shape "
            f"{list(logits.shape)}, expected {[rows, spec.vocab_size]}; "
            "rebuild the engine with `paged-trt build`"
        )
    if is_last:
        return logits[: len(plan.segments)]
    return logits[inputs.query_start_offsets[1 : len(plan.segments) + 1] - 1]
