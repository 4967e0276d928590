"""A KV cache of fixed length beside the attention node: `TensorScatter(cache, new, write_indices)`.

    B batch    M cache length    S new tokens    K key/value heads    D head size

The cache is `[B, K, M, D]` in and out, `write_indices` `[B]` says where the new tokens go, and
`nonpad_kv_seqlen` `[B]` how many rows are valid afterwards. Both are inputs of the graph whose
meaning is the operators' own: the past of each sequence, and the past with the new tokens.

onnxruntime 1.32 was evaluated: with `nonpad_kv_seqlen` and `is_causal`, query i of a step sees the
keys up to `nonpad_kv_seqlen - S + i`, as the operator's errata say.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.graph import (
    NodeSchema,
    attribute,
    node_name,
    operand,
    value_name,
)
from paged_trt.builder.onnx.probe import Probe, steps_of
from paged_trt.plugins.errors import OnnxRewriteError

_SCHEMA: Final = NodeSchema(
    handled=frozenset({"axis"}),
    neutral={"mode": ("linear",)},
    inputs=("past_cache", "update", "write_indices"),
    refused_inputs={},
    outputs=("present_cache",),
)
_TOKEN_AXES: Final = frozenset({2, -2})
_STEPS: Final = steps_of([(0, 1), (0, 5), (3, 2), (128, 1), (4095, 7)])
_REMEDY: Final = (
    "export caches `[batch, kv_num_heads, max_sequence_length, head_size]` that TensorScatter "
    "updates at `write_indices`"
)


def scatter_cache(
    node: ir.Node, operand_value: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """New tokens, cache input, updated cache and write indices of a key or value operand.

    Args:
        node: the attention node.
        operand_value: keys or values as the node reads them.

    Raises:
        OnnxRewriteError: they come from elsewhere, or are written in another way.
    """
    scatter = operand_value.producer()
    if scatter is None or (scatter.domain, scatter.op_type) != ("", "TensorScatter"):
        raise OnnxRewriteError(
            node_name(node),
            f"it has `nonpad_kv_seqlen`, and `{value_name(operand_value)}` does not come from "
            "TensorScatter(cache, new)",
            _REMEDY,
        )
    _SCHEMA.check(scatter)
    cache, new, indices = (operand(scatter, index) for index in range(3))
    if cache is None or not cache.is_graph_input() or len(cache.shape or ()) != 4:
        raise OnnxRewriteError(
            node_name(scatter), "its cache is no graph input of 4 dimensions", _REMEDY
        )
    if new is None or attribute(scatter, "axis", -2) not in _TOKEN_AXES:
        raise OnnxRewriteError(
            node_name(scatter), "it does not write along the third axis of the cache", _REMEDY
        )
    if indices is None or not indices.is_graph_input():
        raise OnnxRewriteError(
            node_name(scatter),
            "its `write_indices` are no graph input, so it writes at the start of the cache",
            _REMEDY,
        )
    return new, cache, operand_value, indices


def check_valid_length(node: ir.Node, length: ir.Value, probe: Probe) -> None:
    """Refuse a valid length other than past and new tokens.

    Args:
        node: the attention node.
        length: its `nonpad_kv_seqlen`; a graph input is what the caller says it is.
        probe: knows `write_indices` as the past.

    Raises:
        OnnxRewriteError: it is computed, and comes out as something else.
    """
    if length.is_graph_input():
        return
    problem = _length_problem(length, probe)
    if problem is None:
        return
    raise OnnxRewriteError(
        node_name(node),
        f"its `nonpad_kv_seqlen` {problem}, not `write_indices` plus the new tokens",
        _REMEDY,
    )


def _length_problem(length: ir.Value, probe: Probe) -> str | None:
    if not probe.depends_on_lengths_only(length):
        return "is computed from data"
    for step in _STEPS:
        try:
            found = probe.evaluate(length, step)
        except EvaluationError as error:
            return f"cannot be evaluated ({error})"
        if not np.array_equal(found, [step.total]):
            return f"is {found.tolist()} with {step}"
    return None
