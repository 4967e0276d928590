"""Evaluates a model's index arithmetic: masks, positions and lengths.

Exporters spell a causal mask in many ways. Instead of matching each of them, the part of the
graph that computes a value from lengths alone is cut out and run in onnxruntime for chosen
numbers of past and new tokens, in a batch of one with nothing padded.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir

from paged_trt.builder.onnx.graph import Array, attribute, value_name
from paged_trt.builder.onnx.shapes import shapes_of_step
from paged_trt.plugins.errors import UnsupportedError
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


class EvaluationError(Exception):
    """onnxruntime cannot run the part of the graph that computes a value."""


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
        self.proved_masks: dict[tuple[ir.Value, bool], tuple[int, int]] = {}
        """Window and proved length by mask: the layers of a model share one or two masks."""
        self._shapes: dict[str, tuple[int | None, ...]] | None = None
        self._known: dict[ir.Value, bool] = {}
        self._sessions: dict[tuple[ir.Value, ir.Value | None], tuple[Any, list[ir.Value]]] = {}

    def shape(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """Shape of `value` in a step of few tokens, of whatever is known of it."""
        if value.shape is not None and all(isinstance(dim, int) for dim in value.shape):
            return tuple(int(dim) for dim in value.shape if isinstance(dim, int))
        if self._shapes is None:
            inputs = {
                value_name(source): tuple(self._source_shape(source, _SHAPE_STEP))
                for source in self._shape_sources
            }
            self._shapes = shapes_of_step(self._model, inputs)
        return self._shapes.get(value_name(value))

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
            given_array: what to supply.

        Raises:
            EvaluationError: onnxruntime refuses the nodes, or fails in them.
            UnsupportedError: onnxruntime is not installed.
        """
        key = (value, given)
        if key not in self._sessions:
            self._sessions[key] = self._session(value, given)
        session, leaves = self._sessions[key]
        feeds = {
            value_name(leaf): given_array if leaf is given else self._leaf_array(leaf, step)
            for leaf in leaves
        }
        try:
            (array,) = session.run(None, feeds, _run_options())
        # onnxruntime's exceptions have no common base of their own.
        except Exception as error:
            raise EvaluationError(f"with {step}: {error}") from error
        return np.asarray(array)

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
        return (
            node is not None
            and node.op_type == "Shape"
            and node.domain == ""
            and node.inputs[0] in self._shape_sources
        )

    def _leaf_array(self, leaf: ir.Value, step: Step) -> Array:
        if leaf in self._value_sources:
            dtype = (leaf.dtype or ir.DataType.INT64).numpy()
            if leaf.name == ATTENTION_MASK:
                return np.ones((1, step.total), dtype)
            return np.arange(step.past, step.total).astype(dtype)[None]
        node = leaf.producer()
        if node is None or node.inputs[0] is None:
            raise AssertionError(f"{leaf.name} is no leaf")
        shape = self._source_shape(node.inputs[0], step)
        start, end = attribute(node, "start", 0), attribute(node, "end", len(shape))
        return np.asarray(shape[start:end], np.int64)

    @staticmethod
    def _source_shape(source: ir.Value, step: Step) -> list[int]:
        if source.name == ATTENTION_MASK:
            return [1, step.total]
        if source.name in {INPUT_IDS, POSITION_IDS}:
            return [1, step.new]
        dims = source.shape or ir.Shape([1, 0, 0, 0])
        shape = [1, *(dim if isinstance(dim, int) else 0 for dim in dims[1:])]
        shape[2] = step.past
        return shape

    def _session(self, value: ir.Value, given: ir.Value | None) -> tuple[Any, list[ir.Value]]:
        runtime = _onnxruntime()
        try:
            proto, leaves = self._cut_model(value, given)
            session = runtime.InferenceSession(
                proto.SerializeToString(), _session_options(), providers=["CPUExecutionProvider"]
            )
        # A damaged node fails in onnx-ir or in onnxruntime, each with errors of its own.
        except Exception as error:
            raise EvaluationError(str(error)) from error
        return session, leaves

    def _cut_model(
        self, value: ir.Value, given: ir.Value | None
    ) -> tuple[onnx.ModelProto, list[ir.Value]]:
        nodes, leaves, constants = self._cut(value, given)
        graph = onnx.helper.make_graph(
            [ir.to_proto(node) for node in self._model.graph if node in nodes],
            "probe",
            [_value_info(leaf) for leaf in leaves],
            [onnx.helper.make_empty_tensor_value_info(value_name(value))],
            [_tensor_proto(constant) for constant in constants],
        )
        if value in leaves or value in constants:
            # An output needs a node that produces it.
            graph.node.append(
                onnx.helper.make_node("Identity", [value_name(value)], ["probe_output"])
            )
            graph.output[0].name = "probe_output"
        opsets = [
            onnx.helper.make_opsetid(domain, version)
            for domain, version in self._model.opset_imports.items()
        ]
        proto = onnx.helper.make_model(graph, opset_imports=opsets)
        proto.ir_version = self._model.ir_version
        return proto, leaves

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


def steps_of(pairs: Iterable[tuple[int, int]]) -> tuple[Step, ...]:
    """Steps of pairs (past, new)."""
    return tuple(Step(past, new) for past, new in pairs)


def _value_info(leaf: ir.Value) -> onnx.ValueInfoProto:
    if leaf.producer() is not None and leaf.dtype is None:
        dtype = ir.DataType.INT64
    else:
        dtype = leaf.dtype or ir.DataType.INT64
    # Nodes in the model see shapes that stand in no value_info here: any will do.
    return onnx.helper.make_tensor_value_info(value_name(leaf), dtype.value, None)


def _tensor_proto(constant: ir.Value) -> onnx.TensorProto:
    if constant.const_value is None:
        raise EvaluationError(f"`{value_name(constant)}` has no data")
    array = constant.const_value.numpy()
    return onnx.numpy_helper.from_array(np.asarray(array), value_name(constant))


@functools.cache
def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UnsupportedError(
            "proving a model's masks needs onnxruntime, which is not installed; run "
            '`pip install "paged-trt[compare]"`'
        ) from None
    return onnxruntime


def _session_options() -> Any:
    options = _onnxruntime().SessionOptions()
    options.graph_optimization_level = _onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    # Failures are part of the search and come back as exceptions.
    options.log_severity_level = 4
    return options


def _run_options() -> Any:
    options = _onnxruntime().RunOptions()
    options.log_severity_level = 4
    return options
