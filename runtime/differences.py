"""Where logits differ, and how the differences are spread."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

HISTOGRAM_EDGES: Final[tuple[float, ...]] = tuple(
    10.0**power for power in np.arange(-5, 2.25, 0.25)
)
"""Of `|d logits| / limit`; at 1 the tolerance ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogitDifference:
    """One logit on both sides.

    Attributes:
        step: 0 is the first generated token.
        token_id: which logit of the row differs most.
        engine: the engine's.
        reference: the reference's.
        limit: largest allowed difference of the row.
    """

    step: int
    token_id: int
    engine: float
    reference: float
    limit: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, logit of token {self.token_id}: {self.engine:.5g} instead of "
            f"{self.reference:.5g}, limit {self.limit:.3g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON types; a logit that is no number is null."""
        data = dataclasses.asdict(self)
        for side in ("engine", "reference"):
            data[side] = data[side] if np.isfinite(data[side]) else None
        return data


def first_over(reference: Array, engine: Array, limits: Array) -> LogitDifference | None:
    """The first step whose logits are too far apart, at its worst logit.

    Args:
        reference: `[num_steps, vocab_size]`.
        engine: likewise.
        limits: `[num_steps]`.
    """
    distances = _distances(reference, engine)
    over = np.flatnonzero(distances.max(axis=-1) > limits)
    if not len(over):
        return None
    step = int(over[0])
    token_id = int(distances[step].argmax())
    return LogitDifference(
        step=step,
        token_id=token_id,
        engine=float(engine[step, token_id]),
        reference=float(reference[step, token_id]),
        limit=float(limits[step]),
    )


def histogram(reference: Array, engine: Array, limits: Array) -> tuple[int, ...]:
    """Counts of `|d logits| / limit`: below HISTOGRAM_EDGES, in each bin, and above.

    Args:
        reference: `[num_steps, vocab_size]`.
        engine: likewise; a difference that is no number counts as above.
        limits: `[num_steps]`.
    """
    ratios = _distances(reference, engine) / np.maximum(limits, np.finfo(np.float32).tiny)[:, None]
    bins = np.searchsorted(HISTOGRAM_EDGES, ratios.reshape(-1), side="right")
    counts: list[int] = np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).tolist()
    return tuple(counts)


def _distances(reference: Array, engine: Array) -> Array:
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and NaN counts as infinitely far
        distances = np.abs(engine.astype(np.float64) - reference)
    return np.nan_to_num(distances, nan=np.inf, posinf=np.inf)
