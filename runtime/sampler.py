"""Greedy choice of the next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError


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
