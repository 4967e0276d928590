"""What holding an engine against its own model gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paged_trt.runtime.same_model_tolerance import SameModelTolerance


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
            the mean over all tokens, whichever is larger. A token that was lost among many
            hardly changes a mean over all.
        token_limit: largest allowed one.
        step: where the error is largest for its limit.
    """

    name: str
    error: float
    limit: float
    token_error: float
    token_limit: float
    step: int

    @property
    def ratio(self) -> float:
        """The larger one of both errors as a part of its limit."""
        return max(self.error / self.limit, self.token_error / self.token_limit)

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
