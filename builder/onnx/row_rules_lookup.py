"""Rules of operators that look entries up, or move them."""

from __future__ import annotations

from paged_trt.builder.onnx.graph import attribute
from paged_trt.builder.onnx.row_view import View
from paged_trt.builder.onnx.rows import (
    MixesError,
    Rows,
    State,
    marked_dims,
    rebuilt,
    require_apart,
    require_same_rows,
    resized,
)


def gather(view: View) -> list[State]:
    """A look-up of tokens in a table, or of entries of each token."""
    axis = attribute(view.node, "axis", 0)
    indices = view.data(1)
    if isinstance(indices, Rows):
        view.no_rows(0)
        table = view.dims(0)
        if table is None or axis % len(table) != 0:
            raise MixesError("looks up tokens in a table of unknown shape, or not in its rows")
        return [Rows(indices.dims + table[1:], indices.axis)]
    rows = view.rows(0)
    (position,) = require_apart(rows, [axis])
    sizes = view.dims(1)
    if sizes is None:
        raise MixesError("has indices whose shape is not known")
    marked = marked_dims(rows)
    marked[position : position + 1] = [(size, False) for size in sizes]
    return [rebuilt(marked)]


def gather_elements(view: View) -> list[State]:
    """A look-up by indices that go with the tokens."""
    rows, indices = view.data(0), view.data(1)
    found = indices if isinstance(indices, Rows) else rows
    if not isinstance(found, Rows) or not isinstance(rows, Rows):
        raise MixesError("looks up tokens element by element in a constant")
    if not isinstance(indices, Rows):
        raise MixesError("looks up the same entries for all tokens")
    require_same_rows(rows, indices)
    require_apart(rows, [attribute(view.node, "axis", 0)])
    return [found]


def scatter_elements(view: View) -> list[State]:
    """Entries written at indices that go with the tokens."""
    rows = view.rows(0)
    require_apart(rows, [attribute(view.node, "axis", 0)])
    for index in (1, 2):
        found = view.data(index)
        if not isinstance(found, Rows):
            raise MixesError("writes the same entries for all tokens")
        require_same_rows(rows, found)
    return [rows]


def top_k(view: View) -> list[State]:
    """The largest entries of each token."""
    rows = view.rows(0)
    (axis,) = require_apart(rows, [attribute(view.node, "axis", -1)])
    count = view.numbers(1)
    found = resized(rows, axis, count[0] if count else None)
    return [found, found]


def one_hot(view: View) -> list[State]:
    """A new axis of classes."""
    rows = view.rows(0)
    view.no_rows(1, 2)
    axis = attribute(view.node, "axis", -1) % (len(rows.dims) + 1)
    depth = view.numbers(1)
    marked = marked_dims(rows)
    marked.insert(axis, (depth[0] if depth else None, False))
    return [rebuilt(marked)]
