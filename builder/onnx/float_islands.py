"""Decides which float32 values of a model stay float32 when it becomes a half-precision model.

Three kinds of float value, found in one walk forward and one back:

- ISLAND stays float32. It starts where an integer becomes a float (positions, whose angles need
  the digits), where the exporter cast to float32 on purpose, and at squares (a norm's sum of
  squares passes float16's range long before the norm does). What is computed from islands and
  constants alone belongs to the island. It ends at the next cast, which said "back to the
  model's type" before the exporter resolved that to float32, and before a weight's product.
- LOW becomes half precision: everything else that is computed from hidden states. Where an
  island meets it, the island is cast down.
- CONSTANT is computed from weights alone. It follows those who read it.
"""

from __future__ import annotations

import enum
from typing import Final

import onnx_ir as ir

from paged_trt.plugins.fields import OP_DOMAIN


class Kind(enum.Enum):
    """What becomes of a float value."""

    LOW = "low"
    ISLAND = "island"
    CONSTANT = "constant"
    NO_FLOAT = "no_float"


_NO_FLOAT_RESULT: Final = frozenset(
    {"Shape", "Size", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "Less"}
    | {"LessOrEqual", "And", "Or", "Not", "Xor", "IsNaN", "IsInf", "NonZero"}
)
_SQUARES: Final = frozenset({"Pow", "ReduceSumSquare", "ReduceL2"})
_PRODUCTS: Final = frozenset({"MatMul", "Gemm", "Conv", "Einsum"})
_PAGED_FLOAT_INPUTS: Final = frozenset({8, 9, 10})
"""Rope table, KV scales and sinks of PagedAttention are float32 in any model."""


class FloatKinds:
    """Kinds of all values of a graph, and what each input of a node has to be.

    Args:
        graph: a float32 model's graph, sorted, its constants lifted to initializers.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._kinds: dict[ir.Value, Kind] = {}
        self._nodes: dict[ir.Node, Kind] = {}
        self._hidden: set[ir.Value] = set()
        for value in graph.initializers.values():
            is_float = value.const_value is not None and (
                value.const_value.dtype is ir.DataType.FLOAT
            )
            self._kinds[value] = Kind.CONSTANT if is_float else Kind.NO_FLOAT
        for node in graph:
            self._visit(node)
        for node in reversed(list(graph)):
            if self._nodes[node] is Kind.CONSTANT:
                self._settle_constant(node)

    def of(self, value: ir.Value) -> Kind:
        """Kind of a value; CONSTANT is left for initializers only."""
        return self._kinds.get(value, Kind.NO_FLOAT)

    def wanted(self, node: ir.Node, index: int) -> Kind:
        """What input `index` of `node` has to be; NO_FLOAT where it is no float."""
        value = node.inputs[index]
        if value is None or self.of(value) is Kind.NO_FLOAT:
            return Kind.NO_FLOAT
        if node.domain == OP_DOMAIN:
            return Kind.ISLAND if index in _PAGED_FLOAT_INPUTS else Kind.LOW
        if node.op_type == "Cast":
            # A cast takes either; what it reads need not be converted for it.
            return self._nodes[node] if self.of(value) is Kind.CONSTANT else self.of(value)
        return self._nodes[node] if self._nodes[node] is not Kind.NO_FLOAT else Kind.LOW

    def _visit(self, node: ir.Node) -> None:
        kinds = {self.of(value) for value in node.inputs if value is not None}
        kind = self._kind(node, kinds)
        if kind is Kind.LOW or not self._hidden.isdisjoint(node.inputs):
            self._hidden.update(node.outputs)
        self._nodes[node] = kind
        result = Kind.NO_FLOAT if node.op_type in _NO_FLOAT_RESULT else kind
        for output in node.outputs:
            self._kinds[output] = result

    def _kind(self, node: ir.Node, kinds: set[Kind]) -> Kind:
        if node.domain == OP_DOMAIN:
            return Kind.LOW
        if node.op_type == "Cast":
            if node.attributes["to"].value != ir.DataType.FLOAT:
                return Kind.NO_FLOAT
            ends = {Kind.ISLAND: Kind.LOW, Kind.CONSTANT: Kind.CONSTANT}
            return next((ends[kind] for kind in kinds if kind in ends), Kind.ISLAND)
        if node.op_type == "ConstantOfShape":
            value = node.attributes.get("value")
            is_float = value is None or value.value.dtype is ir.DataType.FLOAT
            return Kind.CONSTANT if is_float else Kind.NO_FLOAT
        if Kind.LOW in kinds:
            return Kind.ISLAND if _is_square(node) else Kind.LOW
        if Kind.ISLAND in kinds:
            reads_hidden = not self._hidden.isdisjoint(node.inputs)
            return Kind.LOW if reads_hidden and node.op_type in _PRODUCTS else Kind.ISLAND
        if Kind.CONSTANT in kinds:
            # A row of a table that the step picks, such as an embedding, is a hidden state.
            picks = node.op_type in {"Gather", "GatherElements", "GatherND"}
            index = node.inputs[1] if picks else None
            return Kind.LOW if index is not None and not index.is_initializer() else Kind.CONSTANT
        return Kind.NO_FLOAT

    def _settle_constant(self, node: ir.Node) -> None:
        readers = {
            self.wanted(reader, index) for output in node.outputs for reader, index in output.uses()
        }
        kind = Kind.ISLAND if Kind.ISLAND in readers else Kind.LOW
        self._nodes[node] = kind
        for output in node.outputs:
            if self.of(output) is not Kind.NO_FLOAT:
                self._kinds[output] = kind


def _is_square(node: ir.Node) -> bool:
    is_product = node.op_type == "Mul" and node.inputs[0] is node.inputs[1]
    return node.domain == "" and (is_product or node.op_type in _SQUARES)
