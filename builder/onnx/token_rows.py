"""Shows that a model's nodes keep the tokens of a step apart.

In a paged step the token axis holds several sequences. Attention knows them apart and no other
node does, so each of the others has to work token by token. From the token ids, the positions
and the results of attention, the token axis is followed through every node that still matters.
A node that works along it, or that is not known, is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.facts import IndexKind, IndexValue, LayerMatch, Layout
from paged_trt.builder.onnx.graph import node_name, value_name
from paged_trt.builder.onnx.probe import ATTENTION_MASK, Probe
from paged_trt.builder.onnx.row_rules import RULES
from paged_trt.builder.onnx.row_view import View
from paged_trt.builder.onnx.rows import STEP_TOKENS, Count, MixesError, Rows, State
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.plugins.tensors import INPUT_IDS, POSITION_IDS


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
) -> dict[ir.Value, State]:
    known: dict[ir.Value, State] = {}
    for each in model.graph.inputs:
        if each.name in {INPUT_IDS, POSITION_IDS}:
            has_batch_axis = all(found.has_batch_axis for found in matches)
            known[each] = Rows((1, STEP_TOKENS), 1) if has_batch_axis else Rows((STEP_TOKENS,), 0)
        elif each.name == ATTENTION_MASK or not each.is_initializer():
            known[each] = Count.COUNT
    for found in matches:
        heads, size = found.attention.num_q_heads, found.attention.value_head_dim
        flat = Rows((STEP_TOKENS, heads * size), 0)
        if found.layout is Layout.HEADS:
            known[found.node.outputs[0]] = Rows((1, heads, STEP_TOKENS, size), 2)
        else:
            known[found.node.outputs[0]] = (
                Rows((1, *flat.dims), 1) if found.has_batch_axis else flat
            )
        known |= dict.fromkeys(found.node.outputs[1:], Count.COUNT)
    for index in index_values:
        known[index.value] = _replaced(index)
    return known


def _replaced(index: IndexValue) -> State:
    if index.kind is IndexKind.CONSTANT:
        return None
    if index.kind is IndexKind.NUM_TOKENS:
        return Count.COUNT
    dims: list[int | None] = [1] * np.ndim(np.asarray(index.array))
    dims[index.token_axis] = STEP_TOKENS
    return Rows(tuple(dims), index.token_axis)


class _Tracker:
    """States of values, and the rules that lead from a node's inputs to its outputs."""

    def __init__(self, probe: Probe, known: dict[ir.Value, State]) -> None:
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
        if not has_graph and not any(isinstance(state, Rows) for state in states):
            result: State = Count.COUNT if Count.COUNT in states else None
            self._set(node, [result] * len(node.outputs))
            return
        if node.op_type in {"Shape", "Size"}:
            self._set(node, [Count.COUNT])
            return
        rule = RULES.get((_domain(node), node.op_type))
        if rule is None:
            raise _refusal(node, "is not known to work token by token")
        try:
            self._set(node, rule(View(node, states, self._probe)))
        except MixesError as error:
            raise _refusal(node, str(error)) from None
        # What a malformed node trips over, such as an axis that its input does not have.
        except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise _refusal(node, f"is malformed ({error!r})") from error

    def require_rows(self, value: ir.Value, node: ir.Node | None) -> None:
        """Refuse an operand of attention, or logits, whose rows are not the step's tokens."""
        state = self._state(value)
        if isinstance(state, Rows) and state.from_end == -2 and state.dims[-2] == STEP_TOKENS:
            return
        where = value_name(value) if node is None else node_name(node)
        raise OnnxRewriteError(
            where,
            f"`{value_name(value)}` does not hold one row for each token of a step",
            _REMEDY,
        )

    def _state(self, value: ir.Value) -> State:
        return self._known.get(value)

    def _set(self, node: ir.Node, states: Sequence[State]) -> None:
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
