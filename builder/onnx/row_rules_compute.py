"""Rules of operators that compute: which of them keep the tokens of a step apart."""

from __future__ import annotations

from paged_trt.builder.onnx.graph import attribute
from paged_trt.builder.onnx.row_view import Rule, View
from paged_trt.builder.onnx.rows import (
    Dims,
    MixesError,
    Rows,
    State,
    broadcast,
    joined,
    marked_dims,
    rebuilt,
    require_apart,
    require_same_rows,
    resized,
)


def elementwise(view: View) -> list[State]:
    """Element by element; operands that count tokens have to turn out constant."""
    result: Rows | None = None
    others: list[Dims] = []
    for index in range(len(view.node.inputs)):
        found = view.data(index)
        if isinstance(found, Rows):
            result = found if result is None else joined(result, found)
        elif (dims := view.dims(index)) is not None:
            others.append(dims)
    if result is None:
        return [None]
    for dims in others:
        result = broadcast(result, dims)
    return [result]


def rotary(position: int, tables: tuple[int, int]) -> Rule:
    """Rotates each token by its position, or by rows of tables that were looked up for it."""

    def rule(view: View) -> list[State]:
        by_tables = all(isinstance(view.data(index), Rows) for index in tables)
        # Positions that do not come with the tokens count from the first row of the step.
        if not by_tables and not isinstance(view.data(position), Rows):
            raise MixesError("counts positions from the first token of a step")
        if view.rows(0).from_end != -2:
            raise MixesError("works along the tokens of a step")
        return [view.rows(0)]

    return rule


def first(view: View) -> list[State]:
    """Token by token over input 0; the others are constants or go with the tokens."""
    rows = view.rows(0)
    for index in range(1, len(view.node.inputs)):
        view.data(index)
    return [rows]


def norm(view: View) -> list[State]:
    """A norm over axes behind that of the tokens."""
    rows = view.rows(0)
    axis = attribute(view.node, "axis", -1) % len(rows.dims)
    require_apart(rows, range(axis, len(rows.dims)))
    return with_constants(view, rows, start=1)


def skip_norm(view: View) -> list[State]:
    """A norm of a sum."""
    rows = joined(view.rows(0), view.rows(1))
    require_apart(rows, [-1])
    return with_constants(view, rows, start=2)


def with_constants(view: View, rows: Rows, *, start: int) -> list[State]:
    """Rows, where all operands from `start` on are constants."""
    for index in range(start, len(view.node.inputs)):
        view.no_rows(index)
        view.data(index)
    return [rows]


def weighted(width: str) -> Rule:
    """A product with a quantised weight, whose result's size stands in an attribute."""

    def rule(view: View) -> list[State]:
        rows = view.rows(0)
        require_apart(rows, [-1])
        with_constants(view, rows, start=1)
        return [resized(rows, len(rows.dims) - 1, attribute(view.node, width, 0) or None)]

    return rule


def same_width(view: View) -> list[State]:
    """A mixture of experts: token by token, and as wide as before."""
    rows = view.rows(0)
    require_apart(rows, [-1])
    return [rows]


def matmul(view: View) -> list[State]:
    """A product that does not sum over the tokens."""
    left, right = view.data(0), view.data(1)
    left_dims, right_dims = view.dims(0), view.dims(1)
    if left_dims is None or right_dims is None or len(right_dims) < 2 or len(left_dims) < 2:
        raise MixesError("has operands whose shapes are not known")
    if isinstance(left, Rows) and left.from_end == -1:
        raise MixesError("sums over the tokens of a step")
    if isinstance(right, Rows) and right.from_end == -2:
        raise MixesError("sums over the tokens of a step")
    if isinstance(left, Rows) and isinstance(right, Rows):
        require_same_rows(left, right, is_apart=left.from_end < -2)
    rows = left if isinstance(left, Rows) else right
    if not isinstance(rows, Rows):
        raise MixesError("reads tokens through an operand that is no data")
    width = max(len(left_dims), len(right_dims))
    batch = _batch_dims(left_dims[:-2], right_dims[:-2], width - 2)
    return [Rows((*batch, left_dims[-2], right_dims[-1]), width + rows.from_end)]


def _batch_dims(left: Dims, right: Dims, width: int) -> Dims:
    left = (1,) * (width - len(left)) + left
    right = (1,) * (width - len(right)) + right
    return tuple(
        None if mine is None or theirs is None else max(mine, theirs)
        for mine, theirs in zip(left, right, strict=True)
    )


def gemm(view: View) -> list[State]:
    """A product with a constant."""
    rows = view.rows(0)
    view.no_rows(1, 2)
    if attribute(view.node, "transA", 0) or rows.from_end != -2:
        raise MixesError("sums over the tokens of a step")
    weight = view.dims(1)
    size = None if weight is None else weight[0 if attribute(view.node, "transB", 0) else 1]
    return with_constants(view, resized(rows, 1, size), start=1)


def reduce(view: View) -> list[State]:
    """A reduction of axes that are not the tokens."""
    rows = view.rows(0)
    axes = view.axes(1)
    if axes is None:
        if attribute(view.node, "noop_with_empty_axes", 0):
            return [rows]
        axes = list(range(len(rows.dims)))
    return [_reduced(view, rows, require_apart(rows, axes))]


def arg_reduce(view: View) -> list[State]:
    """An ArgMax or ArgMin."""
    rows = view.rows(0)
    return [_reduced(view, rows, require_apart(rows, [attribute(view.node, "axis", 0)]))]


def _reduced(view: View, rows: Rows, axes: set[int]) -> Rows:
    keeps = bool(attribute(view.node, "keepdims", 1))
    marked = [
        (1, False) if axis in axes else each
        for axis, each in enumerate(marked_dims(rows))
        if keeps or axis not in axes
    ]
    return rebuilt(marked)


def axis_kept(default: int) -> Rule:
    """Works along one axis and keeps the shape of input 0."""

    def rule(view: View) -> list[State]:
        rows = view.rows(0)
        require_apart(rows, [attribute(view.node, "axis", default)])
        return first(view)

    return rule


def cum_sum(view: View) -> list[State]:
    """A running sum within each token."""
    rows = view.rows(0)
    require_apart(rows, view.numbers(1) or [0])
    return [rows]
