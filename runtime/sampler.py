"""Choice of the next token: greedy, or drawn by temperature, top-k and top-p.

The kernel `sample.cu` makes the same choices on a device. So that both draw the same token of the
same logits, whatever order they add in, probabilities are whole numbers: the weight of a token is
exp((logit - largest) / temperature) in units of 2^-40, made of single float32 operations that every
IEEE machine rounds alike. Their sums are exact, and a draw is one comparison of whole numbers.

Tokens of equal logits are all in or all out: top-k keeps the smallest set of most likely tokens
that has k or more, and top-p, of what top-k kept, the smallest one whose weight reaches the share.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ConfigError, ExecutionError
from paged_trt.plugins.launch.sampling import (
    MAX_SAMPLED_VOCAB,
    SampleRow,
    exponent_scale,
    top_p_share,
)
from paged_trt.plugins.tensors import NO_NEXT_TOKEN
from paged_trt.runtime.philox import random_bits

Array = npt.NDArray[Any]
WEIGHT_BITS: Final = 40
"""Bits behind the point of a token's weight; the largest logit has weight 1."""
_EXP2: Final = tuple(
    np.float32(coefficient)
    for coefficient in (
        *(1.53707064e-4, 1.33998494e-3, 9.61837359e-3, 5.55032901e-2),
        *(2.40226477e-1, 6.93147182e-1, 1.0),
    )
)
"""2**x on [-0.5, 0.5], highest power first, to 2 units in the last place."""
_LOG2E: Final = np.float32(1.44269502)
_REMEDY: Final = (
    "the weights or the KV scales overflow the model's type: run `paged-trt compare` to find the "
    "first wrong step"
)


class Sampling(Protocol):
    """How a request chooses tokens: what the sampler reads of a SamplingSpec.

    Attributes:
        temperature: divides the logits; 0 takes the largest one.
        top_k: most likely tokens to choose from; 0 for all.
        top_p: smallest set of most likely tokens whose probabilities reach this sum; 1 for all.
        seed: with the step, decides every draw.
    """

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def seed(self) -> int | None: ...  # noqa: D102


def draw_seed() -> int:
    """A seed for a request that names none: 63 bits that nobody can guess."""
    return secrets.randbits(63)


def row_error(token: int, row: int, vocab_size: int) -> ExecutionError | None:
    """What is wrong with the logits that a token was chosen from; None where nothing is.

    Args:
        token: choice of `greedy`, of `sample`, of an engine or of the sampling kernel.
        row: row of the logits, for the message.
        vocab_size: number of token ids.
    """
    if 0 <= token < vocab_size:
        return None
    what = "NaN" if token == NO_NEXT_TOKEN else "nothing above minus infinity"
    return ExecutionError(f"row {row} of the logits has no largest value ({what}); {_REMEDY}")


def greedy(logits: Array) -> list[int]:
    """Id of the largest logit of each row; the lowest id among equals.

    A row without a largest logit says so by its id, as `next_tokens` of an engine does:
    NO_NEXT_TOKEN where one is NaN, `vocab_size` where all are minus infinity. `row_error` names
    it. Infinity is a largest logit.

    Args:
        logits: `[rows, vocab_size]` float16 or float32.
    """
    best = np.argmax(logits, axis=1)
    # argmax returns the first NaN of a row, so the winner alone tells whether there is one.
    winners = logits[np.arange(len(best)), best]
    best[np.isneginf(winners)] = logits.shape[1]
    best[np.isnan(winners)] = NO_NEXT_TOKEN
    tokens: list[int] = best.tolist()
    return tokens


def sample_rows(specs: Sequence[Sampling], steps: Sequence[int]) -> list[SampleRow]:
    """What the kernel and its NumPy twin read of each row.

    Args:
        specs: one for each row.
        steps: index of the token that each row draws, from 0.

    Raises:
        ConfigError: a row draws and has no seed.
    """
    rows = []
    for spec, step in zip(specs, steps, strict=True):
        if spec.temperature and spec.seed is None:
            raise ConfigError(
                "a request that draws tokens needs a seed; give it one with `draw_seed` when it "
                "is admitted"
            )
        rows.append(
            SampleRow(
                seed=spec.seed or 0,
                step=step,
                top_k=spec.top_k,
                top_p=top_p_share(spec.top_p),
                scale=exponent_scale(spec.temperature),
            )
        )
    return rows


def sample(
    logits: Array,
    specs: Sequence[Sampling],
    steps: Sequence[int],
    *,
    with_logprobs: bool = True,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Choose a token for each row. A choice depends on the row's logits, spec and step alone.

    Args:
        logits: `[rows, vocab_size]` float16 or float32.
        specs: one for each row.
        steps: index of the token that each row draws, from 0.
        with_logprobs: whether they are worth a pass over the logits.

    Returns:
        Tokens `[rows]`, and the natural logarithms of their probabilities `[rows]`: those of the
        model, at temperature 1 and among all tokens; zeros where they are not asked for. A row
        without a largest logit gets what `greedy` gives it, whatever its spec.

    Raises:
        ConfigError: a row draws and has no seed, or the vocabulary is too large.
    """
    if logits.shape[1] > MAX_SAMPLED_VOCAB:
        raise ConfigError(
            f"the sampler takes {MAX_SAMPLED_VOCAB} tokens and the vocabulary has "
            f"{logits.shape[1]}; choose greedily"
        )
    return sample_by_rows(logits, sample_rows(specs, steps), with_logprobs=with_logprobs)


def sample_by_rows(
    logits: Array, rows: Sequence[SampleRow], *, with_logprobs: bool = True
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """As `sample`, of the parameters that the kernel reads."""
    largest = greedy(logits)
    bits = random_bits(
        np.array([row.seed for row in rows], np.uint64), np.array([row.step for row in rows])
    )
    tokens = np.array(largest, np.int64)
    logprobs = np.zeros(len(rows), np.float32)
    for index, row in enumerate(rows):
        is_broken = not 0 <= largest[index] < logits.shape[1]
        if is_broken or (not row.scale and not with_logprobs):
            continue
        values = logits[index].astype(np.float32) + np.float32(0)  # no minus zero
        if row.scale:
            tokens[index] = _draw(values, row, int(bits[index]))
        if with_logprobs:
            logprobs[index] = logprob_of(values, int(tokens[index]))
    return tokens, logprobs


def top_logprobs(logits: Array, count: int) -> list[tuple[int, float]]:
    """The most likely tokens of one row with their logprobs, best first, lowest ids first.

    Args:
        logits: `[vocab_size]` float16 or float32, without NaN.
        count: how many.
    """
    values = logits.astype(np.float32)
    order = np.argsort(-values, kind="stable")[:count]
    return [(int(token), logprob_of(values, int(token))) for token in order]


def logprob_of(values: npt.NDArray[np.float32], token: int) -> float:
    """Natural logarithm of a token's probability, at temperature 1 and among all tokens."""
    largest = values.max()
    total = float(token_weights(values, _LOG2E).sum()) / 2.0**WEIGHT_BITS
    difference = 0.0 if values[token] == largest else float(values[token] - largest)
    return difference - float(np.log(total))


def kept(values: npt.NDArray[np.float32], row: SampleRow) -> npt.NDArray[np.bool_]:
    """The tokens that top-k and top-p leave, `[vocab_size]`."""
    chosen = np.ones(len(values), np.bool_)
    if 0 < row.top_k < len(values):
        chosen = values >= np.partition(values, -row.top_k)[-row.top_k]
    if row.top_p:
        weights = np.where(chosen, token_weights(values, np.float32(row.scale)), 0)
        total = int(weights.sum())
        # As the kernel splits the product: both halves fit 64 bits.
        low = (total & 0xFFFFFFFF) * row.top_p >> 32
        wanted = max(1, (total >> 32) * row.top_p + low)
        order = np.argsort(-values, kind="stable")
        reached = np.cumsum(weights[order].astype(np.uint64))
        last = values[order[int(np.searchsorted(reached, np.uint64(wanted)))]]
        chosen &= values >= last
    return chosen


def _draw(values: npt.NDArray[np.float32], row: SampleRow, bits: int) -> int:
    weights = np.where(kept(values, row), token_weights(values, np.float32(row.scale)), 0)
    reached = np.cumsum(weights.astype(np.uint64))
    point = bits * int(reached[-1]) >> 64
    return int(np.searchsorted(reached, np.uint64(point), side="right"))


def token_weights(values: npt.NDArray[np.float32], scale: np.float32) -> npt.NDArray[np.uint64]:
    """`2**((values - max) * scale)` in units of 2**-WEIGHT_BITS, `[vocab_size]`, rounded down.

    Every operation is one rounding to float32, in the order of the kernel.
    """
    largest = values.max()
    if np.isposinf(largest):
        return np.where(values == largest, np.uint64(1 << WEIGHT_BITS), np.uint64(0))
    with np.errstate(over="ignore"):
        exponents = (values - largest) * scale
    whole = np.rint(np.maximum(exponents, np.float32(-64)))
    rest = np.maximum(exponents, np.float32(-64)) - whole
    power = np.full_like(rest, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power = power * rest + coefficient
    fixed = (power * np.float32(1 << WEIGHT_BITS)).astype(np.uint64)
    shifted = fixed >> (-whole).astype(np.uint64).clip(0, 63)
    return np.where(whole < -WEIGHT_BITS - 1, np.uint64(0), shifted)


def with_seed(spec: Any) -> Any:
    """`spec`, a dataclass, with a seed of its own where it names none."""
    return spec if spec.seed is not None else dataclasses.replace(spec, seed=draw_seed())
