"""Greedy choice of the next token."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.tensors import NO_NEXT_TOKEN

_REMEDY: Final = (
    "the weights or the KV scales overflow the model's type: run `paged-trt compare` to find the "
    "first wrong step"
)


def checked_tokens(tokens: npt.NDArray[np.int64], vocab_size: int) -> list[int]:
    """Greedy choices of an engine as ids.

    Args:
        tokens: `[rows]`, entries of `next_tokens`.
        vocab_size: number of token ids.

    Raises:
        ExecutionError: a row had no largest logit.
    """
    for row in np.flatnonzero((tokens < 0) | (tokens >= vocab_size)).tolist():
        what = "NaN" if tokens[row] == NO_NEXT_TOKEN else "nothing above minus infinity"
        raise ExecutionError(f"row {row} of the logits has no largest value ({what}); {_REMEDY}")
    return [int(token) for token in tokens]


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
            f"{winners[row]}); {_REMEDY}"
        )
    return [int(token) for token in best]
