"""An engine against its own rewritten model on the reference executor, layer by layer.

Against the dense model, a quantised engine needs a wide tolerance: quantisation moves the
logits by far more than a rounding, and a wrong scale may hide there. Here both sides quantise
alike and get the same tokens in each step, so that the bounds are tight, and what each layer
stored is compared as well: keys and values, gathered in the order of their tokens. The two
sides use different pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY
from paged_trt.plugins.tensors import LOGITS, EngineSpec
from paged_trt.runtime.comparison import LOGIT_ROUNDINGS, UNIT_ROUNDOFF
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.logical_kv import (
    PagedExecutor,
    gather_kv,
    key_name,
    last_logits,
    poison_byte,
    value_name,
)

Array = npt.NDArray[Any]


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
    """One tensor over all steps.

    Attributes:
        name: as in Place.
        error: largest over the steps; mean difference as a part of the mean magnitude, for
            logits largest difference as a part of the largest logit of the row.
        limit: largest allowed error.
        step: where the error is largest.
    """

    name: str
    error: float
    limit: float
    step: int

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; a NaN is not."""
        return self.error <= self.limit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameModelReport:
    """What the steps gave.

    Attributes:
        reference: what the engine was compared with.
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
            each["error"] = result.error if np.isfinite(result.error) else None
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


class _Errors:
    """Error of each tensor, step by step."""

    def __init__(self, tolerance: SameModelTolerance) -> None:
        self._tolerance = tolerance
        self._worst: dict[str, tuple[float, int]] = {}
        self.first: Place | None = None

    def add(self, step: int, engine: Mapping[str, Array], reference: Mapping[str, Array]) -> None:
        """Compare the tensors of one step, in order."""
        for name in engine:
            mine, theirs = (each[name].astype(np.float32) for each in (engine, reference))
            error = _error(name, mine, theirs)
            if error > self._worst.get(name, (-1.0, 0))[0]:
                self._worst[name] = (error, step)
            if self.first is None and not error <= self._tolerance.limit(name):
                self.first = _place(name, step, mine, theirs)

    def results(self) -> tuple[TensorResult, ...]:
        return tuple(
            TensorResult(name=name, error=error, limit=self._tolerance.limit(name), step=step)
            for name, (error, step) in self._worst.items()
        )


def compare_steps(
    engine: PagedExecutor,
    reference: PagedExecutor,
    steps: Sequence[StepInputs],
    *,
    seed: int,
    missing: tuple[str, ...] = (),
) -> SameModelReport:
    """Run the same steps on both and compare all that they computed.

    Args:
        engine: its pools are overwritten.
        reference: likewise; the same pool geometry.
        steps: consecutive steps.
        seed: of the pages of the reference.
        missing: goes into the report.

    Raises:
        ExecutionError: one of them failed.
    """
    tolerance = same_model_tolerance(engine.spec)
    errors = _Errors(tolerance)
    order = np.random.default_rng(seed).permutation(engine.spec.pool.num_pages).astype(np.int32)
    for each in (engine, reference):
        each.fill_pools(poison_byte(each.spec.kv_cache_dtype))
    for step, inputs in enumerate(steps):
        table = inputs.page_table
        moved = np.where(table == UNUSED_PAGE_ENTRY, table, order[table])
        other = dataclasses.replace(inputs, page_table=moved)
        errors.add(step, step_tensors(engine, inputs), step_tensors(reference, other))
    return SameModelReport(
        reference=reference.name,
        num_steps=len(steps),
        tolerance=tolerance,
        tensors=errors.results(),
        first=errors.first,
        missing=missing,
    )


def step_tensors(executor: PagedExecutor, inputs: StepInputs) -> dict[str, Array]:
    """Run a step; keys and values of each layer, its attention output if it is there, logits.

    Attention outputs are those of live tokens, `[T, num_q_heads, value_head_dim]`; logits those
    of the last token of each sequence, `[N, vocab_size]`, 0 for padding rows.
    """
    logits = last_logits(executor.spec, executor.step(inputs), inputs)
    stored = gather_kv(executor, inputs)
    attended = getattr(executor, "layer_outputs", ())
    tensors = {}
    for layer in range(len(executor.spec.layers)):
        for name in (key_name(layer), value_name(layer)):
            tensors[name] = stored[name]
        if attended:
            tensors[f"attention.{layer}"] = attended[layer][: inputs.query_start_offsets[-1]]
    return {**tensors, LOGITS: logits}


def _error(name: str, engine: Array, reference: Array) -> float:
    difference, magnitude = np.abs(engine - reference), np.abs(reference)
    tiny = np.finfo(np.float32).tiny
    if name == LOGITS:
        parts = difference.max(-1) / np.maximum(magnitude.max(-1), tiny)
        error = float(parts.max())
    else:
        error = float(difference.mean(dtype=np.float64) / max(magnitude.mean(), tiny))
    return error if np.isfinite(error) else float("inf")


def _place(name: str, step: int, engine: Array, reference: Array) -> Place:
    with np.errstate(invalid="ignore"):
        difference = np.nan_to_num(np.abs(engine - reference), nan=np.inf)
    row, *element = np.unravel_index(int(difference.argmax()), difference.shape)
    index = (row, *element)
    return Place(
        tensor=name,
        step=step,
        row=int(row),
        element=tuple(map(int, element)),
        engine=float(engine[index]),
        reference=float(reference[index]),
    )
