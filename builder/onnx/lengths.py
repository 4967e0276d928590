"""Finds out what a value computed from the cache length means.

A paged step has no cache length: many sequences of different lengths share it. Where a model
reads the length outside attention, the value is evaluated for several steps, and recognised
as a constant, the number of new tokens, or the positions of the new tokens. Everything else
stays in the way of the rewrite.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.facts import IndexKind, IndexValue
from paged_trt.builder.onnx.graph import Array
from paged_trt.builder.onnx.probe import Probe, Step, steps_of

_STEPS: Final = (
    *steps_of([(3, 5), (0, 1), (0, 2), (0, 7), (1, 1), (1, 4), (128, 1), (129, 130)]),
    *steps_of([(4095, 2), (8191, 1), (32767, 2), (131071, 1)]),
)
"""The first has unlike numbers, so that shapes tell past, new and total apart."""
_MAX_CONSTANT: Final = 64
"""Elements of the largest array that is taken for a constant."""


def recognise(probe: Probe, value: ir.Value) -> IndexValue | None:
    """The meaning of `value`, or None where it is none of the three.

    Args:
        probe: evaluates values of the model.
        value: a value for which `probe.depends_on_lengths_only` holds.
    """
    arrays = []
    for step in _STEPS:
        try:
            arrays.append(probe.evaluate(value, step))
        except EvaluationError:
            # A table of the model ends: the steps before this one have to do.
            break
    if len(arrays) < len(_STEPS) // 2:
        return None
    first = arrays[0]
    if first.size <= _MAX_CONSTANT and all(_same(first, array) for array in arrays):
        return IndexValue(value=value, kind=IndexKind.CONSTANT, array=first)
    if all(array.size == 1 and array.item() == step.new for array, step in _zip(arrays)):
        return IndexValue(value=value, kind=IndexKind.NUM_TOKENS, array=first)
    axes = [axis for axis, size in enumerate(first.shape) if size == _STEPS[0].new]
    if len(axes) == 1 and all(_is_positions(array, step, axes[0]) for array, step in _zip(arrays)):
        return IndexValue(value=value, kind=IndexKind.POSITIONS, array=first, token_axis=axes[0])
    return None


def _zip(arrays: list[Array]) -> list[tuple[Array, Step]]:
    return list(zip(arrays, _STEPS[: len(arrays)], strict=True))


def _same(first: Array, other: Array) -> bool:
    return first.shape == other.shape and bool(np.array_equal(first, other))


def _is_positions(array: Array, step: Step, axis: int) -> bool:
    shape = [1] * array.ndim
    shape[axis] = step.new
    return list(array.shape) == shape and bool(
        np.array_equal(array.reshape(-1), np.arange(step.past, step.total))
    )
