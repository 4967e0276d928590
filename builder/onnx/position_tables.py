"""Tables with one row per position: they bound the length of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.facts import PositionLimit
from paged_trt.builder.onnx.graph import attribute, operand, static_dim, value_name
from paged_trt.builder.onnx.probe import Probe, Step

_NEAR: Final = Step(5, 1)
_FAR: Final = Step(1000, 1)


def find_position_tables(
    model: ir.Model, probe: Probe, live: set[ir.Value]
) -> Iterator[PositionLimit]:
    """Rope and embedding tables that are read at the positions of a step.

    Args:
        model: the model.
        probe: evaluates the positions.
        live: values that the paged model keeps, so what only a mask reads is left out.

    Yields:
        Each table once per node that reads it.
    """
    for node in model.graph:
        if not live.intersection(node.outputs):
            continue
        table, positions = _table_and_positions(node)
        if table is None or positions is None or not table.is_initializer():
            continue
        rows = static_dim(table, 0)
        offset = _offset(probe, positions)
        if rows is not None and offset is not None:
            yield PositionLimit(name=value_name(table), positions=rows - offset)


def _table_and_positions(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    if node.op_type == "RotaryEmbedding":
        if node.domain == "com.microsoft":
            return operand(node, 2), operand(node, 1)
        return operand(node, 1), operand(node, 3)
    if node.op_type == "Gather" and node.domain == "" and attribute(node, "axis", 0) == 0:
        return operand(node, 0), operand(node, 1)
    return None, None


def _offset(probe: Probe, positions: ir.Value) -> int | None:
    """What is added to a position before the table is read; None for other indices."""
    if not probe.depends_on_lengths_only(positions):
        return None
    offsets = set()
    for step in (_NEAR, _FAR):
        try:
            array = probe.evaluate(positions, step)
        except EvaluationError:
            return None
        if array.size != 1:
            return None
        offsets.add(int(array.item()) - step.past)
    return offsets.pop() if len(offsets) == 1 else None
