"""What holding an engine against its own model gives, and how far the two may be apart."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.tensors import LOGITS, EngineSpec
from paged_trt.runtime.comparison import LOGIT_ROUNDINGS, UNIT_ROUNDOFF

TOKEN_LIMIT: Final = 0.8
"""Largest allowed error of one token; one that was lost or that is another one's has 1 or more.

Rounding changed single tokens in late layers of SmolLM2-135M by up to 0.59 with an int8 pool
and 0.11 with a float8 one, in the same runs as those of the bounds.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameModelTolerance:
    """How far two executors of one model may be apart.

    Attributes:
        logits_rtol: largest difference of a row, as a part of its largest logit.
        kv_rtol: mean difference of what a layer stored, as a part of the mean magnitude.
        key_growth: added to `kv_rtol` for every layer in front: rounding adds up.
        value_growth: likewise, of values and attention outputs.
        reason: where the numbers come from.
    """

    logits_rtol: float
    kv_rtol: float
    key_growth: float
    value_growth: float
    reason: str

    def limit(self, name: str) -> float:
        """Largest allowed error of a tensor of the comparison."""
        if name == LOGITS:
            return self.logits_rtol
        kind, layer = name.split(".")
        growth = self.key_growth if kind == "key" else self.value_growth
        return self.kv_rtol + growth * int(layer)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where two tensors differ most.

    Attributes:
        tensor: `key.3`, `value.3`, `attention.3` or `logits`.
        step: 0 is the first.
        row: sequence row of the step; token row for `attention.{i}`.
        element: indices within the row: (head, position, dim), (head, dim) or (token id,).
        engine: number of the engine.
        reference: number of the reference.
    """

    tensor: str
    step: int
    row: int
    element: tuple[int, ...]
    engine: float
    reference: float

    def __str__(self) -> str:
        return (
            f"`{self.tensor}` in step {self.step}, row {self.row}, element {list(self.element)}: "
            f"{self.engine:.5g} instead of {self.reference:.5g}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorResult:
    """One tensor in its worst step.

    Attributes:
        name: as in Place.
        error: mean difference as a part of the mean magnitude, for logits largest difference as
            a part of the largest logit of the row.
        limit: largest allowed error.
        token_error: mean difference of the worst token, as a part of its mean magnitude or of
            the mean over all tokens, whichever is larger; at most TOKEN_LIMIT. A token that was
            lost among many hardly changes a mean over all.
        step: where the error is largest for its limit.
    """

    name: str
    error: float
    limit: float
    token_error: float
    step: int

    @property
    def ratio(self) -> float:
        """The larger one of both errors as a part of its limit."""
        return max(self.error / self.limit, self.token_error / TOKEN_LIMIT)

    @property
    def passed(self) -> bool:
        """Whether both errors are within their limits."""
        return self.ratio <= 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameModelReport:
    """What the steps gave.

    Attributes:
        reference: path of the model that the reference executor ran.
        num_steps: steps that both ran.
        tolerance: what was allowed.
        tensors: results, in the order in which a step computes them.
        first: the first tensor over its limit, in the first step with one; None where all pass.
        missing: what could not be compared, and what it needs.
    """

    reference: str
    num_steps: int
    tolerance: SameModelTolerance
    tensors: tuple[TensorResult, ...]
    first: Place | None
    missing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every tensor of every step is within its limit."""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types; an error that is no number is null."""
        data = dataclasses.asdict(self)
        for each, result in zip(data["tensors"], self.tensors, strict=True):
            for field in ("error", "token_error"):
                each[field] = each[field] if np.isfinite(each[field]) else None
            each["passed"] = result.passed
        if self.first is not None:
            for side in ("engine", "reference"):
                if not np.isfinite(data["first"][side]):
                    data["first"][side] = None
        return {**data, "passed": self.passed}


def same_model_tolerance(spec: EngineSpec) -> SameModelTolerance:
    """The project's bounds for an engine's types.

    Raises:
        KeyError: never for a spec that is valid.
    """
    unit = max(
        UNIT_ROUNDOFF.get(each, 0.0) for each in (spec.activation_dtype, spec.kv_cache_dtype)
    )
    if spec.kv_cache_dtype in _QUANTISED:
        return _QUANTISED[spec.kv_cache_dtype]
    bound = LOGIT_ROUNDINGS * unit
    return SameModelTolerance(
        logits_rtol=bound,
        kv_rtol=bound,
        key_growth=0.0,
        value_growth=0.0,
        reason=f"{LOGIT_ROUNDINGS} roundings of the activations",
    )


_MEASURED: Final = "one and a half to two times what rounding of the activations changes"
# Measured between two evaluations of one model, float16 and its float32 upcast: a number near
# the middle of two quantised ones goes to the other one. On the toy of 2 layers and SmolLM2-135M
# of 30, with per-head scales of the largest magnitude: logits int8 0.009 and 0.026, float8 0.018
# and 0.042; stored numbers of layer 1 int8 0.002, float8 0.0035, and per layer in front 0.0014
# (keys) and 0.0026 (values) for both. A scale that writes 10 % off changes its layer by 0.1; one
# that also reads 10 % off, so that only the rounding differs, by 0.014 (int8) and 0.023 (float8).
_QUANTISED: Final = {
    DType.INT8: SameModelTolerance(
        logits_rtol=0.05, kv_rtol=0.004, key_growth=0.002, value_growth=0.004, reason=_MEASURED
    ),
    DType.FLOAT8: SameModelTolerance(
        logits_rtol=0.085, kv_rtol=0.007, key_growth=0.002, value_growth=0.004, reason=_MEASURED
    ),
}
