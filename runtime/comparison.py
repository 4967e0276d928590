"""The rule by which a paged engine agrees with its dense model, in plain NumPy.

Both decode greedily, so that up to the first different token both saw the same input and
their logits are comparable; after it nothing is. Two evaluations of one model in the same
precision differ by rounding, and rounding may swap the two largest logits of a near tie:
such a swap is excused, printed, and ends the comparison of that sequence.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.differences import LogitDifference, first_over, histogram

Array = npt.NDArray[Any]

LOGIT_ROUNDINGS: Final = {DType.FLOAT16: 16, DType.BFLOAT16: 32}
"""Roundings of the largest logit by which two evaluations of one model may differ.

1.3 to 1.5 times what was measured between independent ones of SmolLM2-135M, 30 layers, with 37
prompts of random tokens (tests/exporters/rounding.json): PyTorch's float16 differs from
onnxruntime's by up to 10.7 and from the float32 upcast by 10.6, its bfloat16 by 24.3. The first
tokens of a sequence are the worst, for their activations are the largest. onnxruntime computes in
float32 between roundings on a CPU: it differs by 5.9. TensorRT on an H200 differs from it by 9.1.

In a toy of 2 layers in float16 a softmax scale that is 1 % off in one of them differs by 30, one
weight moved by half its standard deviation by 22, a wrong window by hundreds.
"""
TIE_ROUNDINGS: Final = 4
"""Roundings of the largest logit under which two logits count as a tie."""
UNIT_ROUNDOFF: Final = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
"""Largest relative error of one rounding to the type of the activations."""
# KV type -> (error, reason). Quantisation moves keys and values by far more than a rounding of
# float16, in an engine that is right. The error is the largest that was measured with per-head
# scales of the largest magnitude, as a part of the largest logit: int8 0.025 on the toy and
# 0.075 on SmolLM2, float8 0.085 and 0.095.
_QUANTISED: Final = {
    DType.INT8: (0.075, "8 bits per head move keys and values by up to 1/254 of the largest"),
    DType.FLOAT8: (0.1, "3 bits of mantissa move keys and values by up to 1/16 of themselves"),
}
_QUANTISED_LOGITS: Final = 2.0
# The largest error of a row is rarely that of its top two: the choices that changed in those
# measurements had gaps of up to a tenth of the error.
_QUANTISED_TIES: Final = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far logits may be apart: `atol + rtol * max|logit|` of the reference's row.

    Attributes:
        atol: absolute part.
        rtol: part of the largest logit magnitude of the row.
        tie_rtol: gap, as part of the largest logit magnitude, under which two logits tie.
        reason: where the numbers come from.
    """

    atol: float
    rtol: float
    tie_rtol: float
    reason: str

    def limit(self, row: Array) -> float:
        """Largest allowed difference from the reference's logits `row` `[vocab_size]`."""
        return self.atol + self.rtol * _magnitude(row)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A step where the engine chose another token than the reference.

    Attributes:
        step: 0 is the first generated token.
        reference_token: the reference's choice.
        engine_token: the engine's choice.
        gap: the reference's logit of its choice minus that of the engine's.
        bound: the gap that is excused, `top2_gap_bound`.
    """

    step: int
    reference_token: int
    engine_token: int
    gap: float
    bound: float

    @property
    def excused(self) -> bool:
        """Whether the gap is below the bound."""
        return self.gap < self.bound

    def __str__(self) -> str:
        relation = "<" if self.excused else ">="
        return (
            f"step {self.step}: token {self.engine_token} instead of {self.reference_token}, "
            f"gap {self.gap:.4g} {relation} bound {self.bound:.4g}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What comparing one sequence found.

    Attributes:
        prompt_len: tokens of the prompt.
        num_steps: generated tokens of the reference.
        steps_compared: steps whose logits were compared; fewer after a different token.
        worst_step: step where the difference is largest for its limit.
        max_difference: max|d logits| of that step.
        limit: largest allowed difference in that step.
        token_difference: the first different token, if there is one.
        first_over: the first step whose logits are too far apart, if there is one.
        histogram: counts of the differences; see `differences.histogram`.
    """

    prompt_len: int
    num_steps: int
    steps_compared: int
    worst_step: int
    max_difference: float
    limit: float
    token_difference: TokenDifference | None
    first_over: LogitDifference | None = None
    histogram: tuple[int, ...] = ()

    @property
    def tokens_equal(self) -> bool:
        """Whether all tokens are equal."""
        return self.token_difference is None

    @property
    def excused(self) -> bool:
        """Whether a different token was excused as a tie."""
        return self.token_difference is not None and self.token_difference.excused

    @property
    def passed(self) -> bool:
        """Whether the sequence agrees: logits within limits, tokens equal or excused."""
        return self.max_difference <= self.limit and (self.tokens_equal or self.excused)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types; an infinite difference is null, which JSON has no word for."""
        data = dataclasses.asdict(self)
        data["max_difference"] = _finite_or_none(self.max_difference)
        if self.token_difference is not None:
            data["token_difference"] |= {
                "gap": _finite_or_none(self.token_difference.gap),
                "excused": self.excused,
            }
        if self.first_over is not None:
            data["first_over"] = self.first_over.to_json()
        return {**data, "tokens_equal": self.tokens_equal, "passed": self.passed}


def tolerance_for(
    spec: EngineSpec,
    *,
    atol: float | None = None,
    rtol: float | None = None,
) -> Tolerance:
    """The project's tolerance for an engine, or the user's.

    Args:
        spec: the engine's activation and KV types choose the row of the table.
        atol: instead of the table's; 0 where only `rtol` is given.
        rtol: instead of the table's; 0 where only `atol` is given.

    Raises:
        ConfigError: a value is negative or not finite.
        UnsupportedError: the table has no row for the engine.
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"`--{name}` must be 0 or positive, got {value}")
    chosen = _tabled(spec.activation_dtype, spec.kv_cache_dtype)
    if atol is None and rtol is None:
        return chosen
    return dataclasses.replace(
        chosen, atol=atol or 0.0, rtol=rtol or 0.0, reason="given by `--atol` and `--rtol`"
    )


def coarsest(*dtypes: DType) -> DType:
    """The type that rounds most."""
    return max(dtypes, key=lambda dtype: UNIT_ROUNDOFF.get(dtype, 0.0))


def top2_gap_bound(row: Array, tolerance: Tolerance) -> float:
    """Gap between the two largest logits under which rounding may have chosen between them.

    Each of two evaluations rounds both logits, last of all to the logits' type: 4 roundings
    of at most one unit roundoff of the largest magnitude (2^-11 for float16, 2^-8 for
    bfloat16; a quantised pool has the larger value of its row of the table).

    Args:
        row: the reference's logits `[vocab_size]`.
        tolerance: the engine's row of the table.
    """
    return tolerance.tie_rtol * _magnitude(row)


def compare_sequence(
    reference: tuple[Array, Array],
    engine: tuple[Array, Array],
    *,
    prompt_len: int,
    tolerance: Tolerance,
) -> SequenceResult:
    """Compare one sequence step by step, up to the first different token.

    Args:
        reference: tokens `[num_steps]` and logits `[num_steps, vocab_size]`.
        engine: likewise; a NaN anywhere in a compared row is a difference.
        prompt_len: tokens of the prompt, for the report.
        tolerance: what is allowed.
    """
    tokens, logits = reference
    engine_tokens, engine_logits = engine
    difference = first_token_difference(tokens, engine_tokens, logits, tolerance=tolerance)
    compared = len(tokens) if difference is None else difference.step + 1
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and NaN counts as infinitely far
        distances = np.abs(engine_logits[:compared] - logits[:compared]).max(axis=-1)
    distances = np.nan_to_num(distances, nan=np.inf, posinf=np.inf)
    limits = np.array([tolerance.limit(row) for row in logits[:compared]])
    # A reference that is no number allows nothing: an infinite limit would allow everything.
    limits = np.where(np.isfinite(limits), limits, 0.0)
    # Strictly positive divisors keep a limit of 0 usable.
    worst = int(np.argmax(distances / np.maximum(limits, np.finfo(np.float32).tiny)))
    return SequenceResult(
        prompt_len=prompt_len,
        num_steps=len(tokens),
        steps_compared=compared,
        worst_step=worst,
        max_difference=float(distances[worst]),
        limit=float(limits[worst]),
        token_difference=difference,
        first_over=first_over(logits[:compared], engine_logits[:compared], limits),
        histogram=histogram(logits[:compared], engine_logits[:compared], limits),
    )


def first_token_difference(
    tokens: Array, engine_tokens: Array, logits: Array, *, tolerance: Tolerance
) -> TokenDifference | None:
    """The first step where the engine chose another token than the reference.

    Stricter than the gap of the reference's two largest logits: the gap is down to the token
    that the engine chose, so that a near tie of two excuses no third token.
    """
    different = np.flatnonzero(tokens != engine_tokens)
    if not len(different):
        return None
    step = int(different[0])
    row = logits[step]
    chosen, other = int(tokens[step]), int(engine_tokens[step])
    return TokenDifference(
        step=step,
        reference_token=chosen,
        engine_token=other,
        # A step that gave no token has a negative one: no gap excuses it.
        gap=float(row[chosen] - row[other]) if other >= 0 else math.inf,
        bound=top2_gap_bound(row, tolerance),
    )


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _magnitude(row: Array) -> float:
    return float(np.abs(row).max())


def _tabled(activation: DType, kv_cache: DType) -> Tolerance:
    if kv_cache in _QUANTISED:
        error, why = _QUANTISED[kv_cache]
        return Tolerance(
            atol=0.0,
            rtol=_QUANTISED_LOGITS * error,
            tie_rtol=_QUANTISED_TIES * error,
            reason=f"{kv_cache.value} pools cannot meet the float16 tolerance: {why}",
        )
    # A bfloat16 pool under float16 activations rounds as coarsely as bfloat16 activations.
    coarse = coarsest(activation, kv_cache)
    if coarse not in UNIT_ROUNDOFF:
        raise UnsupportedError(
            f"compare has no tolerance for {activation.value} activations and a "
            f"{kv_cache.value} KV cache; pass `--atol` or `--rtol`"
        )
    unit = UNIT_ROUNDOFF[coarse]
    return Tolerance(
        atol=0.0,
        rtol=LOGIT_ROUNDINGS[coarse] * unit,
        tie_rtol=TIE_ROUNDINGS * unit,
        reason=f"{LOGIT_ROUNDINGS[coarse]} roundings of {coarse.value} of the largest logit",
    )
