"""Evaluates a model's index arithmetic: masks, positions and lengths.

Exporters spell a causal mask in many ways. Instead of matching each of them, the part of the
graph that computes a value from lengths alone is cut out and run in onnxruntime for chosen
numbers of past and new tokens, in a batch of one with nothing padded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError, Evaluator
from paged_trt.builder.onnx.graph import Array, attribute, static_dim, value_name
from paged_trt.builder.onnx.shapes import shapes_of_step
from paged_trt.plugins.tensors import INPUT_IDS, POSITION_IDS

ATTENTION_MASK: Final = "attention_mask"


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens in the cache before a step, and tokens of the step."""

    past: int
    new: int

    @property
    def total(self) -> int:
        """Tokens in the cache after the step."""
        return self.past + self.new

    def __str__(self) -> str:
        return f"{self.new} new tokens after {self.past} past ones"


_SHAPE_STEP: Final = Step(5, 3)
_UNKNOWN_SIZES: Final = (61, 67)


class Probe:
    """Evaluates values of one graph that depend on nothing but lengths.

    Args:
        model: the model; it is not changed.
        caches: graph inputs that hold past keys or values.
    """

    def __init__(self, model: ir.Model, caches: Collection[ir.Value]) -> None:
        self._model = model
        self._shape_sources = {*caches}
        self._value_sources: set[ir.Value] = set()
        for graph_input in model.graph.inputs:
            if graph_input.name in {INPUT_IDS, ATTENTION_MASK, POSITION_IDS}:
                self._shape_sources.add(graph_input)
            if graph_input.name in {ATTENTION_MASK, POSITION_IDS}:
                self._value_sources.add(graph_input)
        self._past_sources = {
            each for each in model.graph.inputs if _is_read_by(each, "TensorScatter", 2)
        }
        """Where TensorScatter writes is the past of a sequence."""
        self._value_sources |= self._past_sources
        self.proved_masks: dict[tuple[ir.Value, bool], tuple[int, int]] = {}
        """Window and proved length by mask: the layers of a model share one or two masks."""
        self._shapes: dict[Step, dict[str, tuple[int | None, ...]]] = {}
        self._known: dict[ir.Value, bool] = {}
        self._evaluators: dict[tuple[ir.Value, ir.Value | None], Evaluator] = {}

    def shape(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """Shape of `value` in a step of few tokens, of whatever is known of it."""
        declared = None
        if value.shape is not None:
            declared = tuple(dim if isinstance(dim, int) else None for dim in value.shape)
            if None not in declared:
                return declared
        return self._shapes_at(_SHAPE_STEP).get(value_name(value), declared)

    def depends_on_lengths_only(self, value: ir.Value, *, given: ir.Value | None = None) -> bool:
        """Whether `value` can be evaluated, `given` being supplied from outside."""
        known = {given: True} if given is not None else self._known
        return self._can_evaluate(value, known)

    def evaluate(
        self,
        value: ir.Value,
        step: Step,
        *,
        given: ir.Value | None = None,
        given_array: Array | None = None,
    ) -> Array:
        """The array of `value` in `step`.

        Args:
            value: a value for which `depends_on_lengths_only` holds.
            step: how many past and new tokens.
            given: a value that is supplied instead of computed.
            given_array: what to supply, float32.

        Raises:
            EvaluationError: onnxruntime refuses the nodes, or fails in them.
            UnsupportedError: onnxruntime is not installed.
        """
        key = (value, given)
        if key not in self._evaluators:
            nodes, leaves, constants = self._cut(value, given)
            self._evaluators[key] = Evaluator(
                [node for node in self._model.graph if node in nodes],
                leaves,
                constants,
                result=value,
                model=self._model,
                given=given,
            )
        evaluator = self._evaluators[key]
        leaves = [leaf for leaf in evaluator.leaves if leaf is not given]
        fed = {}
        if given is not None and given_array is not None:
            fed[value_name(given)] = given_array
        # An exporter may leave the size of a cache's heads open. Two sizes have to agree then.
        is_open = any(self._is_open(leaf, step) for leaf in leaves)
        try:
            found, *others = (
                evaluator.run(
                    fed | {value_name(leaf): self._leaf_array(leaf, step, size) for leaf in leaves}
                )
                for size in _UNKNOWN_SIZES[: 2 if is_open else 1]
            )
        except EvaluationError as error:
            raise EvaluationError(f"with {step}: {error}") from error
        if any(not np.array_equal(found, other) for other in others):
            raise EvaluationError(f"with {step}: it depends on a size that the model leaves open")
        return found

    def _can_evaluate(self, value: ir.Value, known: dict[ir.Value, bool]) -> bool:
        # Iterative: a mask may hang under hundreds of nodes.
        stack = [value]
        while stack:
            current = stack[-1]
            if current in known:
                stack.pop()
                continue
            parents = self._parents(current)
            if parents is None:
                known[current] = False
                continue
            unknown = [parent for parent in parents if parent not in known]
            if unknown:
                stack.extend(unknown)
            else:
                known[current] = all(known[parent] for parent in parents)
        return known[value]

    def _parents(self, value: ir.Value) -> list[ir.Value] | None:
        """Values that `value` is computed from; None where it cannot be evaluated."""
        if value.is_initializer() or value in self._value_sources or self._is_shape_leaf(value):
            return []
        node = value.producer()
        if node is None or any(
            found.type in {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}
            for found in node.attributes.values()
        ):
            return None
        return [parent for parent in node.inputs if parent is not None]

    def _is_shape_leaf(self, value: ir.Value) -> bool:
        node = value.producer()
        if node is None or (node.domain, node.op_type) != ("", "Shape") or not node.inputs[0]:
            return False
        source = node.inputs[0]
        # Shapes of hidden states and caches follow from those of the inputs.
        inferred = self._shapes_at(_SHAPE_STEP).get(value_name(source), (None,))
        return source in self._shape_sources or None not in inferred

    def _shapes_at(self, step: Step) -> dict[str, tuple[int | None, ...]]:
        if step not in self._shapes:
            inputs = {
                value_name(source): self._input_shape(source, step)
                for source in self._shape_sources
            }
            self._shapes[step] = shapes_of_step(self._model, inputs)
        return self._shapes[step]

    def _is_open(self, leaf: ir.Value, step: Step) -> bool:
        node = leaf.producer()
        if leaf in self._value_sources or node is None or node.inputs[0] is None:
            return False
        return None in self._source_shape(node.inputs[0], step)

    def _leaf_array(self, leaf: ir.Value, step: Step, unknown: int) -> Array:
        if leaf in self._value_sources:
            dtype = (leaf.dtype or ir.DataType.INT64).numpy()
            if leaf in self._past_sources:
                return np.full(1, step.past, dtype)
            if leaf.name == ATTENTION_MASK:
                return np.ones((1, step.total), dtype)
            return np.arange(step.past, step.total).astype(dtype)[None]
        node = leaf.producer()
        if node is None or node.inputs[0] is None:
            raise AssertionError(f"{leaf.name} is no leaf")
        shape = self._source_shape(node.inputs[0], step)
        start, end = attribute(node, "start", 0), attribute(node, "end", len(shape))
        dims = [unknown if dim is None else dim for dim in shape[start:end]]
        return np.asarray(dims, np.int64)

    def _source_shape(self, source: ir.Value, step: Step) -> tuple[int | None, ...]:
        if source in self._shape_sources:
            return self._input_shape(source, step)
        inferred = self._shapes_at(step).get(value_name(source), (None,))
        if None in inferred:
            raise EvaluationError(f"with {step} the shape of `{source.name}` is not known")
        return inferred

    @staticmethod
    def _input_shape(source: ir.Value, step: Step) -> tuple[int | None, ...]:
        if source.name == ATTENTION_MASK:
            return (1, step.total)
        if source.name in {INPUT_IDS, POSITION_IDS}:
            has_batch_axis = source.shape is None or len(source.shape) > 1
            return (1, step.new) if has_batch_axis else (step.new,)
        # A cache of fixed length has one that no step tells.
        is_fixed = _is_read_by(source, "TensorScatter", 0)
        length = static_dim(source, 2) if is_fixed else step.past
        return (1, static_dim(source, 1), length, static_dim(source, 3))

    def _cut(
        self, value: ir.Value, given: ir.Value | None
    ) -> tuple[set[ir.Node], list[ir.Value], list[ir.Value]]:
        nodes: set[ir.Node] = set()
        leaves: list[ir.Value] = []
        constants: list[ir.Value] = []
        seen: set[ir.Value] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            if current is given or current in self._value_sources or self._is_shape_leaf(current):
                leaves.append(current)
            elif current.is_initializer():
                constants.append(current)
            else:
                node = current.producer()
                if node is None:
                    raise AssertionError(f"{current.name} has no producer")
                nodes.add(node)
                stack.extend(parent for parent in node.inputs if parent is not None)
        return nodes, leaves, constants


def _is_read_by(value: ir.Value, op_type: str, slot: int) -> bool:
    return any(node.op_type == op_type and index == slot for node, index in value.uses())


def steps_of(pairs: Iterable[tuple[int, int]]) -> tuple[Step, ...]:
    """Steps of pairs (past, new)."""
    return tuple(Step(past, new) for past, new in pairs)
