"""Rules of operators that give the same elements another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paged_trt.builder.onnx.graph import attribute
from paged_trt.builder.onnx.row_view import View
from paged_trt.builder.onnx.rows import (
    STEP_TOKENS,
    MixesError,
    Rows,
    State,
    broadcast,
    known_size,
    marked_dims,
    rebuilt,
    require_apart,
    require_same_rows,
    resized,
)


def split(view: View) -> list[State]:
    """Parts along an axis that is not the tokens."""
    rows = view.rows(0)
    (axis,) = require_apart(rows, [attribute(view.node, "axis", 0)])
    sizes = view.numbers(1) or attribute(view.node, "split", None)
    count = len(view.node.outputs)
    if sizes is None:
        whole = rows.dims[axis]
        even = None if whole is None else -(-whole // count)
        last = None if whole is None or even is None else whole - even * (count - 1)
        sizes = [*[even] * (count - 1), last]
    return [resized(rows, axis, size) for size in sizes]


def concat(view: View) -> list[State]:
    """Values joined along an axis that is not the tokens."""
    states = [view.data(index) for index in range(len(view.node.inputs))]
    parts = [state for state in states if isinstance(state, Rows)]
    if len(parts) != len(states):
        raise MixesError("puts values with and without tokens together")
    rows = parts[0]
    (axis,) = require_apart(rows, [attribute(view.node, "axis", 0)])
    for part in parts:
        require_same_rows(rows, part)
    sizes = [part.dims[axis] for part in parts]
    known = [size for size in sizes if size is not None]
    return [resized(rows, axis, sum(known) if len(known) == len(parts) else None)]


def slice_(view: View) -> list[State]:
    """Part of axes that are not the tokens."""
    rows = view.rows(0)
    starts, ends = view.numbers(1) or [], view.numbers(2) or []
    axes = view.axes(3, list(range(len(starts)))) or []
    steps = view.numbers(4) or [1] * len(starts)
    require_apart(rows, axes)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        whole = rows.dims[axis]
        size = None if whole is None else len(range(whole)[_as_slice(start, end, step)])
        rows = resized(rows, axis % len(rows.dims), size)
    return [rows]


def _as_slice(start: int, end: int, step: int) -> slice:
    # A backward slice to before the first entry ends far below zero in ONNX, at None in Python.
    return slice(start, None if step < 0 and end < -(2**31) else end, step)


def squeeze(view: View) -> list[State]:
    """Axes dropped by name."""
    rows = view.rows(0)
    axes = view.axes(1)
    if axes is None:
        raise MixesError("drops axes that are not named")
    dropped = require_apart(rows, axes)
    return [rebuilt([each for axis, each in enumerate(marked_dims(rows)) if axis not in dropped])]


def unsqueeze(view: View) -> list[State]:
    """Axes added."""
    rows = view.rows(0)
    axes = view.axes(1) or []
    marked = marked_dims(rows)
    for axis in sorted(axis % (len(marked) + len(axes)) for axis in axes):
        marked.insert(axis, (1, False))
    return [rebuilt(marked)]


def transpose(view: View) -> list[State]:
    """Axes in another order."""
    rows = view.rows(0)
    marked = marked_dims(rows)
    order = attribute(view.node, "perm", None) or list(reversed(range(len(marked))))
    return [rebuilt([marked[axis] for axis in order])]


def reshape(view: View) -> list[State]:
    """The same elements in another shape."""
    target = view.numbers(1) or []
    rows = view.rows(0)
    if not attribute(view.node, "allowzero", 0):
        target = [
            known_size(rows.dims[index]) if size == 0 else size for index, size in enumerate(target)
        ]
    return [_regrouped(rows, target)]


def flatten(view: View) -> list[State]:
    """The same elements as a matrix."""
    rows = view.rows(0)
    axis = attribute(view.node, "axis", 1)
    leading = math.prod(known_size(size) for size in rows.dims[:axis])
    return [_regrouped(rows, [leading, -1])]


def _regrouped(rows: Rows, target: Sequence[int]) -> Rows:
    """Rows after a reshape: where a step to the next token is as many elements as before."""
    dims = [known_size(size) for size in rows.dims]
    stride = math.prod(dims[rows.axis :]) // STEP_TOKENS
    rest = math.prod(size for size in target if size != -1)
    sizes = [math.prod(dims) // rest if size == -1 else size for size in target]
    for axis, size in enumerate(sizes):
        if size % STEP_TOKENS == 0 and math.prod(sizes[axis:]) // STEP_TOKENS == stride:
            return Rows(tuple(sizes), axis)
    raise MixesError("regroups the elements of different tokens")


def expand(view: View) -> list[State]:
    """Repeated along axes of size 1."""
    return [broadcast(view.rows(0), tuple(view.numbers(1) or []))]


def tile(view: View) -> list[State]:
    """Repeated along axes that are not the tokens."""
    rows = view.rows(0)
    for axis, times in enumerate(view.numbers(1) or []):
        if times != 1:
            require_apart(rows, [axis])
            size = rows.dims[axis]
            rows = resized(rows, axis, None if size is None else size * times)
    return [rows]


def pad(view: View) -> list[State]:
    """Padded along axes that are not the tokens."""
    rows = view.rows(0)
    pads = view.numbers(1) or []
    axes = view.numbers(3) or list(range(len(rows.dims)))
    for index, axis in enumerate(axes):
        before, after = pads[index], pads[index + len(axes)]
        if before or after:
            (position,) = require_apart(rows, [axis])
            size = rows.dims[position]
            rows = resized(rows, position, None if size is None else size + before + after)
    return [rows]
