"""Dialect: com.microsoft GroupQueryAttention, as onnxruntime-genai writes it.

    B batch    S new tokens    P past tokens    H query heads    K key/value heads    D head size

query is `[B, S, H * D]`, or `[B, S, (H + 2 * K) * D]` without key and value; the cache is
`[B, K, P, D]` in and out. The node is causal; `local_window_size` counts the keys that a query
sees, itself included. `seqlens_k` and `total_sequence_length` have to be those of a batch of one
with nothing padded, which is proved by evaluation.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.facts import IndexKind, LayerMatch, PositionLimit
from paged_trt.builder.onnx.graph import (
    NodeSchema,
    attribute,
    node_name,
    operand,
    require_static_dim,
    static_dim,
    value_name,
)
from paged_trt.builder.onnx.lengths import recognise
from paged_trt.builder.onnx.mask import SMALL_STEPS
from paged_trt.builder.onnx.probe import Probe, steps_of
from paged_trt.builder.onnx.runtime_attention import (
    HANDLED,
    UNQUANTISED,
    graph_input,
    operands_of,
    read_attention,
    read_head_norms,
    read_rope,
    read_sinks,
)
from paged_trt.plugins.errors import OnnxRewriteError

SCHEMA: Final = NodeSchema(
    handled=HANDLED,
    neutral={
        "causal": (1,),
        "smooth_softmax": (0, -1),
        # How much of the past the dense cache keeps. The window says what a query sees.
        "sliding_window_cache": (0, 1),
        "kv_cache_bit_width": (0,),
        "k_quant_type": ("NONE",),
        "v_quant_type": ("NONE",),
        # This only matters for an output that is refused.
        "qk_output": None,
    },
    inputs=(
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
        "cos_cache",
        "sin_cache",
        "position_ids",
        "attention_bias",
        "head_sink",
        "k_scale",
        "v_scale",
        "q_norm_weight",
        "k_norm_weight",
        "query_seqlens",
    ),
    refused_inputs={
        "attention_bias": "export a model without an attention bias",
        "k_scale": UNQUANTISED,
        "v_scale": UNQUANTISED,
        "query_seqlens": "export without `query_seqlens`",
    },
    outputs=("output", "present_key", "present_value", "output_qk"),
    refused_outputs={"output_qk": "export without `output_qk`"},
)
_LENGTH_STEPS: Final = (*SMALL_STEPS, *steps_of([(4095, 1), (4096, 2), (131071, 1)]))


def is_match(node: ir.Node) -> bool:
    """Whether `node` is attention of this dialect."""
    return node.domain == "com.microsoft" and node.op_type == "GroupQueryAttention"


def match(node: ir.Node, probe: Probe) -> tuple[LayerMatch, tuple[PositionLimit, ...]]:
    """Read one node.

    Args:
        node: a node for which `is_match` holds.
        probe: evaluates the model's lengths.

    Returns:
        The layer, and the positions that its rope table reaches.

    Raises:
        OnnxRewriteError: the node says something that PagedAttention cannot do.
    """
    SCHEMA.check(node)
    _check_lengths(node, probe)
    caches = graph_input(node, SCHEMA, "past_key"), graph_input(node, SCHEMA, "past_value")
    if len(node.outputs) < 3:
        raise OnnxRewriteError(
            node_name(node), "it has no present_key and present_value", "export with a KV cache"
        )
    query, key, value, layout = operands_of(node)
    _check_positions(node, probe)
    rope, tables, limits = read_rope(node, SCHEMA)
    _check_kv_heads(node, caches[0])
    attention = read_attention(node, head_dim=_head_dim(node, caches), rope=rope, tables=tables)
    found = LayerMatch(
        node=node,
        attention=attention,
        layout=layout,
        query=query,
        key=key,
        value=value,
        caches=caches,
        presents=(node.outputs[1], node.outputs[2]),
        rope_tables=tables,
        sinks=read_sinks(node, SCHEMA, num_q_heads=attention.num_q_heads),
        head_norms=read_head_norms(node, SCHEMA, head_dim=attention.head_dim),
    )
    return found, limits


def _head_dim(node: ir.Node, caches: tuple[ir.Value, ir.Value]) -> int | None:
    """Head size of the caches; None where both leave it open, as for quantised caches."""
    sizes = [static_dim(cache, 3) for cache in caches]
    if sizes[0] != sizes[1]:
        raise OnnxRewriteError(
            node_name(node),
            f"its key cache has heads of {sizes[0]} elements and its value cache of {sizes[1]}",
            "export key and value caches with one head size",
        )
    return sizes[0]


def _check_kv_heads(node: ir.Node, cache: ir.Value) -> None:
    declared, found = attribute(node, "kv_num_heads", 0), require_static_dim(cache, 1, node=node)
    if declared != found:
        raise OnnxRewriteError(
            node_name(node),
            f"`kv_num_heads` is {declared} and the cache has {found} heads",
            "export a cache `[batch, kv_num_heads, past, head_dim]`",
        )


def _check_lengths(node: ir.Node, probe: Probe) -> None:
    for index, extra in ((5, -1), (6, 0)):
        name = SCHEMA.inputs[index]
        value = operand(node, index)
        reason = None
        if value is None or not probe.depends_on_lengths_only(value):
            reason = f"its `{name}` is not computed from attention_mask and lengths alone"
        else:
            reason = _wrong_length(probe, value, extra, name)
        if reason is not None:
            raise OnnxRewriteError(
                node_name(node), reason, "export with the lengths taken from `attention_mask`"
            )


def _wrong_length(probe: Probe, value: ir.Value, extra: int, name: str) -> str | None:
    for step in _LENGTH_STEPS:
        try:
            found = probe.evaluate(value, step)
        except EvaluationError as error:
            return f"its `{name}` cannot be evaluated: {error}"
        if found.size != 1 or found.item() != step.total + extra:
            return f"its `{name}` is {found.tolist()} with {step}, not {step.total + extra}"
    return None


def _check_positions(node: ir.Node, probe: Probe) -> None:
    positions = operand(node, 9)
    if positions is None:
        return
    found = None
    if probe.depends_on_lengths_only(positions):
        found = recognise(probe, positions)
    if found is None or found.kind is not IndexKind.POSITIONS:
        raise OnnxRewriteError(
            node_name(node),
            f"its `position_ids` ({value_name(positions)}) do not count the tokens of a sequence",
            "export with `position_ids` as a graph input, or without them",
        )
