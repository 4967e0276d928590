"""A KV cache outside the attention node: `Concat(past, new)`, with the heads repeated or not.

P past tokens    S new tokens    H query heads    K key/value heads    D head size
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.graph import (
    Array,
    attribute,
    node_name,
    require_static_dim,
    value_name,
)
from paged_trt.builder.onnx.probe import Probe, steps_of
from paged_trt.plugins.errors import OnnxRewriteError

WITH_CACHE: Final = (
    "export with `use_cache=True`, so that each layer has a past and a present, both whole "
    "(`DynamicCache()` of transformers without a configuration)"
)
_REPEAT_OPS: Final = frozenset(
    {"Unsqueeze", "Expand", "Reshape", "Identity", "Tile", "Transpose", "Squeeze"}
)
"""Nodes that only move numbers, so that a proof in one type holds in every type."""
_REPEAT_STEPS: Final = steps_of([(3, 2), (0, 2), (1, 1)])


def concat_cache(
    node: ir.Node,
    operand_value: ir.Value,
    probe: Probe,
    *,
    head_dim: int | None = None,
    num_heads: int | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """New tokens, cache input and `Concat(past, new)` of a key or value operand.

    Args:
        node: the attention node.
        operand_value: keys or values as the node reads them, `[1, H, P + S, D]` or
            `[1, P + S, H * D]`, heads repeated from K.
        probe: evaluates what lies between.
        head_dim: D; None reads it off the cache.
        num_heads: H, where the node says it; None takes any multiple of K.

    Raises:
        OnnxRewriteError: there is no Concat of a cache, or more than repeated heads lies between.
    """
    present = operand_value
    while (producer := present.producer()) is not None and producer.op_type in _REPEAT_OPS:
        present = _first_input(producer)
    if producer is None or producer.op_type != "Concat" or not _is_cache_concat(producer):
        raise OnnxRewriteError(
            node_name(node),
            f"it has no KV cache: `{value_name(operand_value)}` comes from {_origin(producer)}, "
            "not from Concat(past, new)",
            WITH_CACHE,
        )
    cache, new = _first_input(producer), producer.inputs[1]
    if new is None:
        raise OnnxRewriteError(node_name(producer), "input 1 is missing", "export again")
    if present is not operand_value:
        size = require_static_dim(cache, 3, node=node) if head_dim is None else head_dim
        heads = require_static_dim(cache, 1, node=node)
        problem = _repeat_problem(
            operand_value, present, probe, shape=(heads, size), num_heads=num_heads
        )
        if problem is not None:
            raise OnnxRewriteError(
                node_name(node),
                f"what lies between the cache `{value_name(cache)}` and the node {problem}",
                "export with Concat(past, new) whose heads are only repeated (repeat_kv)",
            )
    return new, cache, present


def _origin(producer: ir.Node | None) -> str:
    if producer is None:
        return "a graph input"
    name = f"{producer.op_type} `{producer.name}`"
    if producer.op_type != "Concat":
        return name
    # Such as a cache that is cut to the window in the model.
    first = value_name(_first_input(producer))
    return f"{name}, whose first input `{first}` is no cache among the graph's inputs"


def _first_input(node: ir.Node) -> ir.Value:
    found = node.inputs[0]
    if found is None:
        raise OnnxRewriteError(node_name(node), "input 0 is missing", "export the model again")
    return found


def _is_cache_concat(node: ir.Node) -> bool:
    return (
        len(node.inputs) == 2
        and _first_input(node).is_graph_input()
        and attribute(node, "axis", None) in {2, -2}
        and _first_input(node).shape is not None
        and len(_first_input(node).shape or ()) == 4
    )


def _repeat_problem(
    repeated: ir.Value,
    present: ir.Value,
    probe: Probe,
    *,
    shape: tuple[int, int],
    num_heads: int | None,
) -> str | None:
    """Evaluate whether `repeated` is `present`, of heads and size `shape`, with each repeated."""
    if not probe.depends_on_lengths_only(repeated, given=present):
        return "depends on data"
    for step in _REPEAT_STEPS:
        given_shape = (1, shape[0], step.total, shape[1])
        # Neighbours differ, and so do heads and tokens.
        given = np.arange(np.prod(given_shape), dtype=np.float32).reshape(given_shape)
        try:
            found = probe.evaluate(repeated, step, given=present, given_array=given)
        except EvaluationError as error:
            return f"cannot be evaluated ({error})"
        repeats = _repeats(found, given)
        if repeats is None:
            return "does not repeat each head in place"
        if num_heads not in {None, repeats * shape[0]}:
            return f"makes {repeats * shape[0]} heads, and the node says {num_heads}"
    return None


def _repeats(found: Array, given: Array) -> int | None:
    """How often `found` has each head of `given`; None where it is something else."""
    _, heads, total, size = given.shape
    if found.ndim == 3 and found.shape[:2] == (1, total) and found.shape[2] % size == 0:
        found = found.reshape(1, total, -1, size).transpose(0, 2, 1, 3)
    groups = max(found.shape[1] // heads, 1) if found.ndim == 4 else 1
    return groups if np.array_equal(found, np.repeat(given, groups, axis=1)) else None
