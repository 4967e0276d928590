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
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY
from paged_trt.plugins.tensors import LOGITS, attention_name
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.logical_kv import (
    PagedExecutor,
    gather_kv,
    key_name,
    last_logits,
    poison_byte,
    value_name,
)
from paged_trt.runtime.same_model_report import Place, SameModelReport, TensorResult
from paged_trt.runtime.same_model_tolerance import SameModelTolerance, same_model_tolerance

Array = npt.NDArray[Any]


class _Errors:
    """Error of each tensor, step by step."""

    def __init__(self, tolerance: SameModelTolerance) -> None:
        self._tolerance = tolerance
        self._worst: dict[str, TensorResult] = {}
        self.first: Place | None = None

    def add(self, step: int, engine: Mapping[str, Array], reference: Mapping[str, Array]) -> None:
        """Compare the tensors of one step, in order."""
        for name in engine:
            mine, theirs = (each[name].astype(np.float32) for each in (engine, reference))
            error, token_error = _errors(name, mine, theirs)
            result = TensorResult(
                name=name,
                error=error,
                limit=self._tolerance.limit(name),
                token_error=token_error,
                token_limit=self._tolerance.token_limit(name),
                step=step,
            )
            worst = self._worst.get(name)
            if worst is None or result.ratio > worst.ratio:
                self._worst[name] = result
            if self.first is None and not result.passed:
                self.first = _place(name, step, mine, theirs)

    def results(self) -> tuple[TensorResult, ...]:
        return tuple(self._worst.values())


def compare_steps(
    engine: PagedExecutor,
    reference: PagedExecutor,
    steps: Sequence[StepInputs],
    *,
    seed: int,
    name: str,
    missing: tuple[str, ...] = (),
) -> SameModelReport:
    """Run the same steps on both and compare all that they computed.

    Args:
        engine: its pools are overwritten.
        reference: likewise; the same pool geometry.
        steps: consecutive steps.
        seed: of the pages of the reference.
        name: of the reference, for the report.
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
        reference=name,
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
    attended = executor.read_layer_outputs() if executor.gives_layer_outputs else []
    tensors = {}
    for layer in range(len(executor.spec.layers)):
        for name in (key_name(layer), value_name(layer)):
            tensors[name] = stored[name]
        if attended:
            tensors[attention_name(layer)] = attended[layer][: inputs.query_start_offsets[-1]]
    return {**tensors, LOGITS: logits}


def _errors(name: str, engine: Array, reference: Array) -> tuple[float, float]:
    """Error over all, and that of the worst token; infinite where one is no number."""
    tiny = float(np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):  # what is no number counts as infinitely far
        difference, magnitude = np.abs(engine - reference), np.abs(reference)
        if name == LOGITS:
            parts = difference.max(-1) / np.maximum(magnitude.max(-1), tiny)
            return _number(parts.max()), 0.0
        # A token is a row and a position, or a row of attention outputs.
        axes = (1, 3) if difference.ndim == 4 else (1, 2)
        differences, magnitudes = difference.mean(axes), magnitude.mean(axes)
        typical = magnitudes[magnitudes > 0].mean() if (magnitudes > 0).any() else 0.0
        # A token that is nearly 0 may differ by any part of itself.
        tokens = differences / np.maximum(magnitudes, max(typical, tiny))
        overall = differences.mean() / max(magnitudes.mean(), tiny)
        return _number(overall), _number(tokens.max())


def _number(value: Any) -> float:
    return float(value) if np.isfinite(value) else float("inf")


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
