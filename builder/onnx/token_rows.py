"""Shows that a model's nodes keep the tokens of a step apart.

In a paged step the token axis holds several sequences. Attention knows them apart and no other
node does, so each of the others has to work token by token. From the token ids, the positions
and the results of attention, the token axis is followed through every node that still matters.
A node that works along it, or that is not known, is refused by name.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.facts import IndexKind, IndexValue, LayerMatch, Layout
from paged_trt.builder.onnx.graph import (
    attribute,
    constant_array,
    node_name,
    operand,
    value_name,
)
from paged_trt.builder.onnx.lengths import recognise
from paged_trt.builder.onnx.probe import ATTENTION_MASK, Probe, Step
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.plugins.tensors import INPUT_IDS, POSITION_IDS

Dims = tuple[int | None, ...]
_TOKENS: Final = 1009
"""Tokens of the step whose shapes are followed: a prime that is no other dimension."""
_STEP: Final = Step(5, _TOKENS)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A value with one row per token.

    Attributes:
        dims: its shape with _TOKENS tokens; None where a dimension is not known.
        axis: the axis of the tokens, from 0; a token may own several of its entries.
    """

    dims: Dims
    axis: int

    @property
    def from_end(self) -> int:
        """The axis of the tokens, counted from the end: -1 is the last."""
        return self.axis - len(self.dims)


class _Count(enum.Enum):
    """A value that tells how many tokens or positions there are: a shape, not data."""

    COUNT = "count"


_State = _Rows | _Count | None
"""What is known of a value; None where it is the same for all tokens of all steps."""


class _MixesError(Exception):
    """A node does not keep tokens apart; the message says how."""


def require_token_rows(
    model: ir.Model,
    probe: Probe,
    *,
    matches: Sequence[LayerMatch],
    index_values: Sequence[IndexValue],
    live: Collection[ir.Value],
    logits: ir.Value,
) -> None:
    """Follow the tokens of a step through a dense model.

    Args:
        model: the model, sorted.
        probe: evaluates shapes.
        matches: the attention layers.
        index_values: values that the rewrite replaces.
        live: values that the paged model keeps.
        logits: the model's result.

    Raises:
        OnnxRewriteError: a node works along the tokens, or is not known to leave them apart.
    """
    tracker = _Tracker(probe, _sources(model, matches, index_values))
    attention = {found.node for found in matches}
    for node in model.graph:
        if node not in attention and any(output in live for output in node.outputs):
            tracker.visit(node)
    for found in matches:
        for value in (found.query, found.key, found.value):
            tracker.require_rows(value, found.node)
    tracker.require_rows(logits, logits.producer())


def _sources(
    model: ir.Model, matches: Sequence[LayerMatch], index_values: Sequence[IndexValue]
) -> dict[ir.Value, _State]:
    known: dict[ir.Value, _State] = {}
    for each in model.graph.inputs:
        if each.name in {INPUT_IDS, POSITION_IDS}:
            known[each] = _Rows((1, _TOKENS), 1)
        elif each.name == ATTENTION_MASK or not each.is_initializer():
            known[each] = _Count.COUNT
    for found in matches:
        heads, size = found.attention.num_q_heads, found.attention.value_head_dim
        in_heads = found.layout is Layout.HEADS
        known[found.node.outputs[0]] = (
            _Rows((1, heads, _TOKENS, size), 2)
            if in_heads
            else _Rows((1, _TOKENS, heads * size), 1)
        )
        known |= dict.fromkeys(found.node.outputs[1:], _Count.COUNT)
    for index in index_values:
        known[index.value] = _replaced(index)
    return known


def _replaced(index: IndexValue) -> _State:
    if index.kind is IndexKind.CONSTANT:
        return None
    if index.kind is IndexKind.NUM_TOKENS:
        return _Count.COUNT
    dims: list[int | None] = [1] * np.ndim(np.asarray(index.array))
    dims[index.token_axis] = _TOKENS
    return _Rows(tuple(dims), index.token_axis)


class _Tracker:
    """States of values, and the rules that lead from a node's inputs to its outputs."""

    def __init__(self, probe: Probe, known: dict[ir.Value, _State]) -> None:
        self._probe = probe
        self._known = known

    def visit(self, node: ir.Node) -> None:
        """Find the states of a node's outputs."""
        states = [None if each is None else self._state(each) for each in node.inputs]
        has_graph = any(
            found.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}
            for found in node.attributes.values()
        )
        # A graph inside a node reads what it likes, and names none of it.
        if not has_graph and not any(isinstance(state, _Rows) for state in states):
            result: _State = _Count.COUNT if _Count.COUNT in states else None
            self._set(node, [result] * len(node.outputs))
            return
        if node.op_type in {"Shape", "Size"}:
            self._set(node, [_Count.COUNT])
            return
        rule = _RULES.get((_domain(node), node.op_type))
        if rule is None:
            raise _refusal(node, "is not known to work token by token")
        try:
            self._set(node, rule(_View(node, states, self._probe)))
        except _MixesError as error:
            raise _refusal(node, str(error)) from None
        # What a malformed node trips over, such as an axis that its input does not have.
        except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise _refusal(node, f"is malformed ({error!r})") from error

    def require_rows(self, value: ir.Value, node: ir.Node | None) -> None:
        """Refuse an operand of attention, or logits, whose rows are not the step's tokens."""
        state = self._state(value)
        if isinstance(state, _Rows) and state.from_end == -2 and state.dims[-2] == _TOKENS:
            return
        where = value_name(value) if node is None else node_name(node)
        raise OnnxRewriteError(
            where,
            f"`{value_name(value)}` does not hold one row for each token of a step",
            _REMEDY,
        )

    def _state(self, value: ir.Value) -> _State:
        return self._known.get(value)

    def _set(self, node: ir.Node, states: Sequence[_State]) -> None:
        padded = [*states, *[states[0]] * (len(node.outputs) - len(states))]
        for output, state in zip(node.outputs, padded, strict=False):
            self._known.setdefault(output, state)


_REMEDY: Final = "use a model whose layers see other tokens through attention only"


def _refusal(node: ir.Node, how: str) -> OnnxRewriteError:
    return OnnxRewriteError(
        node_name(node),
        f"{node.op_type} {how}, and the tokens of a paged step belong to several sequences",
        _REMEDY,
    )


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


class _View:
    """One node with what is known of its inputs."""

    def __init__(self, node: ir.Node, states: Sequence[_State], probe: Probe) -> None:
        self.node = node
        self._states = states
        self._probe = probe

    def state(self, index: int) -> _State:
        """State of an input; None where it is left out."""
        return self._states[index] if index < len(self._states) else None

    def rows(self, index: int) -> _Rows:
        """An input that has to hold tokens."""
        found = self.state(index)
        if not isinstance(found, _Rows):
            raise _MixesError("reads tokens through an operand that is no data")
        return found

    def no_rows(self, *indices: int) -> None:
        """Refuse operands that differ between tokens."""
        if any(isinstance(self.state(index), _Rows) for index in indices):
            raise _MixesError("takes an operand that has to be a constant from the tokens")

    def data(self, index: int) -> _State:
        """An input as data: one that counts tokens has to turn out constant."""
        found = self.state(index)
        value = operand(self.node, index)
        if isinstance(found, _Count) and value is not None:
            meaning = None
            if self._probe.depends_on_lengths_only(value):
                meaning = recognise(self._probe, value)
            if meaning is None or meaning.kind is not IndexKind.CONSTANT:
                raise _MixesError(f"computes with the length of a step (`{value_name(value)}`)")
            return None
        return found

    def dims(self, index: int) -> Dims | None:
        """Shape of an input."""
        found = self.state(index)
        if isinstance(found, _Rows):
            return found.dims
        value = operand(self.node, index)
        array = constant_array(value) if value is not None and value.shape is None else None
        if array is not None:
            return array.shape
        return None if value is None else self._probe.shape(value)

    def numbers(self, index: int) -> list[int] | None:
        """Numbers of an operand such as a target shape; None where it is left out."""
        value = operand(self.node, index)
        if value is None:
            return None
        array = constant_array(value)
        if array is None:
            self.no_rows(index)
            array = self._evaluated(value)
        return [int(number) for number in np.atleast_1d(array)]

    def _evaluated(self, value: ir.Value) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        try:
            if self._probe.depends_on_lengths_only(value):
                return self._probe.evaluate(value, _STEP)
        except EvaluationError as error:
            raise _MixesError(f"has an operand that cannot be evaluated ({error})") from error
        raise _MixesError(f"has an operand that depends on data (`{value_name(value)}`)")

    def axes(self, index: int, default: list[int] | None = None) -> list[int] | None:
        """Axes of an operand, or of the attribute `axes` that older opsets have."""
        found = self.numbers(index)
        if found is None:
            found = attribute(self.node, "axes", None)
        return default if found is None else [int(axis) for axis in found]


_Rule = Callable[[_View], list[_State]]


def _along(rows: _Rows, axes: Sequence[int]) -> set[int]:
    """Axes from 0, none of which may be that of the tokens."""
    found = {axis % len(rows.dims) if rows.dims else axis for axis in axes}
    if rows.axis in found:
        raise _MixesError("works along the tokens of a step")
    return found


def _changed(rows: _Rows, axis: int, size: int | None) -> _Rows:
    dims = list(rows.dims)
    dims[axis] = size
    return replace(rows, dims=tuple(dims))


def _rebuilt(dims: Sequence[tuple[int | None, bool]]) -> _Rows:
    """Rows of dims that are marked where they hold the tokens."""
    axis = next(index for index, (_, is_tokens) in enumerate(dims) if is_tokens)
    return _Rows(tuple(size for size, _ in dims), axis)


def _marked(rows: _Rows) -> list[tuple[int | None, bool]]:
    return [(size, axis == rows.axis) for axis, size in enumerate(rows.dims)]


def _elementwise(view: _View) -> list[_State]:
    result: _Rows | None = None
    others: list[Dims] = []
    for index in range(len(view.node.inputs)):
        found = view.data(index)
        if isinstance(found, _Rows):
            result = found if result is None else _joined(result, found)
        elif (dims := view.dims(index)) is not None:
            others.append(dims)
    if result is None:
        return [None]
    for dims in others:
        result = _broadcast(result, dims)
    return [result]


def _joined(left: _Rows, right: _Rows) -> _Rows:
    _require_same_rows(left, right)
    return _broadcast(left, right.dims)


def _require_same_rows(left: _Rows, right: _Rows, *, is_apart: bool = True) -> None:
    same_rows = left.dims[left.axis] == right.dims[right.axis]
    if left.from_end != right.from_end or not same_rows or not is_apart:
        raise _MixesError("combines each token with every other token")


def _broadcast(rows: _Rows, dims: Dims) -> _Rows:
    if len(dims) >= -rows.from_end and dims[rows.from_end] not in {1, rows.dims[rows.axis], None}:
        raise _MixesError("combines the tokens with a constant along their axis")
    width = max(len(rows.dims), len(dims))
    mine = (1,) * (width - len(rows.dims)) + rows.dims
    theirs = (1,) * (width - len(dims)) + dims
    sizes = [
        None if left is None or right is None else max(left, right)
        for left, right in zip(mine, theirs, strict=True)
    ]
    sizes[rows.from_end] = rows.dims[rows.axis]
    return _Rows(tuple(sizes), width + rows.from_end)


def _rotary(position: int, tables: tuple[int, int]) -> _Rule:
    """Rotates each token by its position, or by rows of tables that were looked up for it."""

    def rule(view: _View) -> list[_State]:
        by_tables = all(isinstance(view.data(index), _Rows) for index in tables)
        # Positions that do not come with the tokens count from the first row of the step.
        if not by_tables and not isinstance(view.data(position), _Rows):
            raise _MixesError("counts positions from the first token of a step")
        if view.rows(0).from_end != -2:
            raise _MixesError("works along the tokens of a step")
        return [view.rows(0)]

    return rule


def _first(view: _View) -> list[_State]:
    """Token by token over input 0; the others are constants or go with the tokens."""
    rows = view.rows(0)
    for index in range(1, len(view.node.inputs)):
        view.data(index)
    return [rows]


def _norm(view: _View) -> list[_State]:
    rows = view.rows(0)
    axis = attribute(view.node, "axis", -1) % len(rows.dims)
    _along(rows, range(axis, len(rows.dims)))
    return _with_constants(view, rows, start=1)


def _skip_norm(view: _View) -> list[_State]:
    rows = _joined(view.rows(0), view.rows(1))
    _along(rows, [-1])
    return _with_constants(view, rows, start=2)


def _with_constants(view: _View, rows: _Rows, *, start: int) -> list[_State]:
    for index in range(start, len(view.node.inputs)):
        view.no_rows(index)
        view.data(index)
    return [rows]


def _weighted(width: str) -> _Rule:
    """A product with a quantised weight, whose result's size stands in an attribute."""

    def rule(view: _View) -> list[_State]:
        rows = view.rows(0)
        _along(rows, [-1])
        _with_constants(view, rows, start=1)
        return [_changed(rows, len(rows.dims) - 1, attribute(view.node, width, 0) or None)]

    return rule


def _same_width(view: _View) -> list[_State]:
    rows = view.rows(0)
    _along(rows, [-1])
    return [rows]


def _matmul(view: _View) -> list[_State]:
    left, right = view.data(0), view.data(1)
    left_dims, right_dims = view.dims(0), view.dims(1)
    if left_dims is None or right_dims is None or len(right_dims) < 2 or len(left_dims) < 2:
        raise _MixesError("has operands whose shapes are not known")
    if isinstance(left, _Rows) and left.from_end == -1:
        raise _MixesError("sums over the tokens of a step")
    if isinstance(right, _Rows) and right.from_end == -2:
        raise _MixesError("sums over the tokens of a step")
    if isinstance(left, _Rows) and isinstance(right, _Rows):
        _require_same_rows(left, right, is_apart=left.from_end < -2)
    rows = left if isinstance(left, _Rows) else right
    if not isinstance(rows, _Rows):
        raise _MixesError("reads tokens through an operand that is no data")
    width = max(len(left_dims), len(right_dims))
    batch = _batch_dims(left_dims[:-2], right_dims[:-2], width - 2)
    return [_Rows((*batch, left_dims[-2], right_dims[-1]), width + rows.from_end)]


def _batch_dims(left: Dims, right: Dims, width: int) -> Dims:
    left = (1,) * (width - len(left)) + left
    right = (1,) * (width - len(right)) + right
    return tuple(
        None if mine is None or theirs is None else max(mine, theirs)
        for mine, theirs in zip(left, right, strict=True)
    )


def _gemm(view: _View) -> list[_State]:
    rows = view.rows(0)
    view.no_rows(1, 2)
    if attribute(view.node, "transA", 0) or rows.from_end != -2:
        raise _MixesError("sums over the tokens of a step")
    weight = view.dims(1)
    size = None if weight is None else weight[0 if attribute(view.node, "transB", 0) else 1]
    return _with_constants(view, _changed(rows, 1, size), start=1)


def _gather(view: _View) -> list[_State]:
    axis = attribute(view.node, "axis", 0)
    indices = view.data(1)
    if isinstance(indices, _Rows):
        view.no_rows(0)
        table = view.dims(0)
        if table is None or axis % len(table) != 0:
            raise _MixesError("looks up tokens in a table of unknown shape, or not in its rows")
        return [_Rows(indices.dims + table[1:], indices.axis)]
    rows = view.rows(0)
    (position,) = _along(rows, [axis])
    sizes = view.dims(1)
    if sizes is None:
        raise _MixesError("has indices whose shape is not known")
    marked = _marked(rows)
    marked[position : position + 1] = [(size, False) for size in sizes]
    return [_rebuilt(marked)]


def _reduce(view: _View) -> list[_State]:
    rows = view.rows(0)
    axes = view.axes(1)
    if axes is None:
        if attribute(view.node, "noop_with_empty_axes", 0):
            return [rows]
        axes = list(range(len(rows.dims)))
    return [_reduced(view, rows, _along(rows, axes))]


def _arg_reduce(view: _View) -> list[_State]:
    rows = view.rows(0)
    return [_reduced(view, rows, _along(rows, [attribute(view.node, "axis", 0)]))]


def _reduced(view: _View, rows: _Rows, axes: set[int]) -> _Rows:
    keeps = bool(attribute(view.node, "keepdims", 1))
    marked = [
        (1, False) if axis in axes else each
        for axis, each in enumerate(_marked(rows))
        if keeps or axis not in axes
    ]
    return _rebuilt(marked)


def _axis_kept(default: int) -> _Rule:
    """Works along one axis and keeps the shape of input 0."""

    def rule(view: _View) -> list[_State]:
        rows = view.rows(0)
        _along(rows, [attribute(view.node, "axis", default)])
        return _first(view)

    return rule


def _gather_elements(view: _View) -> list[_State]:
    rows, indices = view.data(0), view.data(1)
    found = indices if isinstance(indices, _Rows) else rows
    if not isinstance(found, _Rows) or not isinstance(rows, _Rows):
        raise _MixesError("looks up tokens element by element in a constant")
    if not isinstance(indices, _Rows):
        raise _MixesError("looks up the same entries for all tokens")
    _require_same_rows(rows, indices)
    _along(rows, [attribute(view.node, "axis", 0)])
    return [found]


def _scatter_elements(view: _View) -> list[_State]:
    rows = view.rows(0)
    _along(rows, [attribute(view.node, "axis", 0)])
    for index in (1, 2):
        found = view.data(index)
        if not isinstance(found, _Rows):
            raise _MixesError("writes the same entries for all tokens")
        _require_same_rows(rows, found)
    return [rows]


def _top_k(view: _View) -> list[_State]:
    rows = view.rows(0)
    (axis,) = _along(rows, [attribute(view.node, "axis", -1)])
    count = view.numbers(1)
    found = _changed(rows, axis, count[0] if count else None)
    return [found, found]


def _cum_sum(view: _View) -> list[_State]:
    rows = view.rows(0)
    _along(rows, view.numbers(1) or [0])
    return [rows]


def _split(view: _View) -> list[_State]:
    rows = view.rows(0)
    (axis,) = _along(rows, [attribute(view.node, "axis", 0)])
    sizes = view.numbers(1) or attribute(view.node, "split", None)
    count = len(view.node.outputs)
    if sizes is None:
        whole = rows.dims[axis]
        even = None if whole is None else -(-whole // count)
        last = None if whole is None or even is None else whole - even * (count - 1)
        sizes = [*[even] * (count - 1), last]
    return [_changed(rows, axis, size) for size in sizes]


def _concat(view: _View) -> list[_State]:
    states = [view.data(index) for index in range(len(view.node.inputs))]
    parts = [state for state in states if isinstance(state, _Rows)]
    if len(parts) != len(states):
        raise _MixesError("puts values with and without tokens together")
    rows = parts[0]
    (axis,) = _along(rows, [attribute(view.node, "axis", 0)])
    for part in parts:
        _require_same_rows(rows, part)
    sizes = [part.dims[axis] for part in parts]
    known = [size for size in sizes if size is not None]
    return [_changed(rows, axis, sum(known) if len(known) == len(parts) else None)]


def _slice(view: _View) -> list[_State]:
    rows = view.rows(0)
    starts, ends = view.numbers(1) or [], view.numbers(2) or []
    axes = view.axes(3, list(range(len(starts)))) or []
    steps = view.numbers(4) or [1] * len(starts)
    _along(rows, axes)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        whole = rows.dims[axis]
        size = None if whole is None else len(range(whole)[_as_slice(start, end, step)])
        rows = _changed(rows, axis % len(rows.dims), size)
    return [rows]


def _as_slice(start: int, end: int, step: int) -> slice:
    # A backward slice to before the first entry ends far below zero in ONNX, at None in Python.
    return slice(start, None if step < 0 and end < -(2**31) else end, step)


def _squeeze(view: _View) -> list[_State]:
    rows = view.rows(0)
    axes = view.axes(1)
    if axes is None:
        raise _MixesError("drops axes that are not named")
    dropped = _along(rows, axes)
    return [_rebuilt([each for axis, each in enumerate(_marked(rows)) if axis not in dropped])]


def _unsqueeze(view: _View) -> list[_State]:
    rows = view.rows(0)
    axes = view.axes(1) or []
    marked = _marked(rows)
    for axis in sorted(axis % (len(marked) + len(axes)) for axis in axes):
        marked.insert(axis, (1, False))
    return [_rebuilt(marked)]


def _transpose(view: _View) -> list[_State]:
    rows = view.rows(0)
    marked = _marked(rows)
    order = attribute(view.node, "perm", None) or list(reversed(range(len(marked))))
    return [_rebuilt([marked[axis] for axis in order])]


def _reshape(view: _View) -> list[_State]:
    target = view.numbers(1) or []
    rows = view.rows(0)
    if not attribute(view.node, "allowzero", 0):
        target = [
            _known(rows.dims[index]) if size == 0 else size for index, size in enumerate(target)
        ]
    return [_regrouped(rows, target)]


def _flatten(view: _View) -> list[_State]:
    rows = view.rows(0)
    axis = attribute(view.node, "axis", 1)
    leading = math.prod(_known(size) for size in rows.dims[:axis])
    return [_regrouped(rows, [leading, -1])]


def _known(size: int | None) -> int:
    if size is None:
        raise _MixesError("has an input whose shape is not known")
    return size


def _regrouped(rows: _Rows, target: Sequence[int]) -> _Rows:
    """Rows after a reshape: where a step to the next token is as many elements as before."""
    dims = [_known(size) for size in rows.dims]
    stride = math.prod(dims[rows.axis :]) // _TOKENS
    rest = math.prod(size for size in target if size != -1)
    sizes = [math.prod(dims) // rest if size == -1 else size for size in target]
    for axis, size in enumerate(sizes):
        if size % _TOKENS == 0 and math.prod(sizes[axis:]) // _TOKENS == stride:
            return _Rows(tuple(sizes), axis)
    raise _MixesError("regroups the elements of different tokens")


def _expand(view: _View) -> list[_State]:
    return [_broadcast(view.rows(0), tuple(view.numbers(1) or []))]


def _tile(view: _View) -> list[_State]:
    rows = view.rows(0)
    for axis, times in enumerate(view.numbers(1) or []):
        if times != 1:
            _along(rows, [axis])
            size = rows.dims[axis]
            rows = _changed(rows, axis, None if size is None else size * times)
    return [rows]


def _pad(view: _View) -> list[_State]:
    rows = view.rows(0)
    pads = view.numbers(1) or []
    axes = view.numbers(3) or list(range(len(rows.dims)))
    for index, axis in enumerate(axes):
        before, after = pads[index], pads[index + len(axes)]
        if before or after:
            (position,) = _along(rows, [axis])
            size = rows.dims[position]
            rows = _changed(rows, position, None if size is None else size + before + after)
    return [rows]


def _one_hot(view: _View) -> list[_State]:
    rows = view.rows(0)
    view.no_rows(1, 2)
    axis = attribute(view.node, "axis", -1) % (len(rows.dims) + 1)
    depth = view.numbers(1)
    marked = _marked(rows)
    marked.insert(axis, (depth[0] if depth else None, False))
    return [_rebuilt(marked)]


_ELEMENTWISE: Final = frozenset(
    {"Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Div"}
    | {"Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual"}
    | {"HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less"}
    | {"LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not"}
    | {"Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign"}
    | {"Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh"}
    | {"ThresholdedRelu", "Where", "Xor"}
)
_REDUCTIONS: Final = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"}
    | {"ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"}
)
_MICROSOFT: Final = "com.microsoft"
_RULES: Final[Mapping[tuple[str, str], _Rule]] = {
    **{("", name): _elementwise for name in _ELEMENTWISE},
    **{(_MICROSOFT, name): _elementwise for name in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")},
    **{("", name): _reduce for name in _REDUCTIONS},
    **{("", name): _arg_reduce for name in ("ArgMax", "ArgMin")},
    **{("", name): _axis_kept(-1) for name in ("Softmax", "LogSoftmax", "Hardmax")},
    ("", "LpNormalization"): _axis_kept(-1),
    ("", "Dropout"): _first,
    ("", "QuantizeLinear"): _elementwise,
    ("", "DequantizeLinear"): _elementwise,
    ("", "RotaryEmbedding"): _rotary(3, (1, 2)),
    (_MICROSOFT, "RotaryEmbedding"): _rotary(1, (2, 3)),
    **{
        ("", name): _norm
        for name in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    },
    **{
        (_MICROSOFT, name): _skip_norm
        for name in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
    },
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    (_MICROSOFT, "MatMulNBits"): _weighted("N"),
    (_MICROSOFT, "MoE"): _same_width,
    (_MICROSOFT, "QMoE"): _same_width,
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "ScatterElements"): _scatter_elements,
    ("", "TopK"): _top_k,
    ("", "CumSum"): _cum_sum,
    ("", "OneHot"): _one_hot,
    ("", "Split"): _split,
    ("", "Concat"): _concat,
    ("", "Slice"): _slice,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Transpose"): _transpose,
    ("", "Reshape"): _reshape,
    ("", "Flatten"): _flatten,
    ("", "Expand"): _expand,
    ("", "Tile"): _tile,
    ("", "Pad"): _pad,
}
