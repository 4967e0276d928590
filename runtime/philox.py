"""Philox4x32-10: random numbers that are a function of a seed and a step, and of nothing else.

From Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
kernel `sample.cu` computes the same words.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS: Final = 10
_MASK: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)


def philox(counters: npt.NDArray[Any], keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The words of some counters.

    Args:
        counters: `[rows, 4]` 32-bit words.
        keys: `[rows, 2]` 32-bit words.

    Returns:
        `[rows, 4]`, 32-bit words in uint64.
    """
    x0, x1, x2, x3 = np.asarray(counters, np.uint64).T
    key0, key1 = np.asarray(keys, np.uint64).T
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x2 = (second >> _SHIFT) ^ x1 ^ key0, (first >> _SHIFT) ^ x3 ^ key1
        x1, x3 = second & _MASK, first & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return np.stack([x0, x1, x2, x3], axis=1)


def random_bits(seeds: npt.NDArray[np.uint64], steps: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """64 random bits for each (seed, step).

    Args:
        seeds: `[rows]`.
        steps: `[rows]`, below 2**32.
    """
    seeds = np.asarray(seeds, np.uint64)
    counters = np.zeros((len(seeds), 4), np.uint64)
    counters[:, 0] = steps
    words = philox(counters, np.stack([seeds & _MASK, seeds >> _SHIFT], axis=1))
    return words[:, 1] << _SHIFT | words[:, 0]
