"""Dialect: com.microsoft PagedAttention, as onnxruntime-genai writes it for its paged engine.

    T packed tokens    N sequences    H query heads    K key/value heads    D head size

The model has no batch axis: token ids are `[T]`, the cache is `[num_blocks, block_size, K, D]`.
Block table, cumulative lengths and past lengths are inputs of the graph, and become those of
this project: the pool's layout and page size are set by the engine. `slot_mapping` says where the
caller wants a token's key and value; it goes with the block table, and the engine writes each
token into its sequence's page. `attention_metadata` are bounds that choose a launch and never
change a result, as the operator's text says.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.facts import LayerMatch, PositionLimit
from paged_trt.builder.onnx.graph import (
    NodeSchema,
    node_name,
    require_static_dim,
    value_name,
)
from paged_trt.builder.onnx.probe import Probe
from paged_trt.builder.onnx.runtime_attention import (
    HANDLED,
    UNQUANTISED,
    graph_input,
    named_operand,
    operands_of,
    read_attention,
    read_head_norms,
    read_rope,
    read_sinks,
)
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.errors import OnnxRewriteError

SCHEMA: Final = NodeSchema(
    handled=HANDLED,
    neutral={
        "is_causal": (1,),
        "rotary_offset": (0,),
        "v_head_size": (0,),
        "kv_cache_layout": ("SEPARATE",),
        "k_quant_type": ("NONE",),
        "v_quant_type": ("NONE",),
        # What the cache's own element type says anyway.
        "k_cache_dtype": ("", "float16", "bfloat16"),
        "v_cache_dtype": ("", "float16", "bfloat16"),
    },
    inputs=(
        "query",
        "key",
        "value",
        "key_cache",
        "value_cache",
        "cumulative_sequence_length",
        "past_seqlens",
        "block_table",
        "cos_cache",
        "sin_cache",
        "slot_mapping",
        "head_sink",
        "q_norm_weight",
        "k_norm_weight",
        "k_scale",
        "v_scale",
        "attention_metadata",
    ),
    refused_inputs={
        "k_scale": UNQUANTISED,
        "v_scale": UNQUANTISED,
    },
    outputs=("output", "key_cache_out", "value_cache_out"),
)
_LENGTHS: Final = ("cumulative_sequence_length", "past_seqlens", "block_table")


def is_match(node: ir.Node) -> bool:
    """Whether `node` is attention of this dialect."""
    return node.domain == "com.microsoft" and node.op_type == "PagedAttention"


def match(node: ir.Node, probe: Probe) -> tuple[LayerMatch, tuple[PositionLimit, ...]]:
    """Read one node.

    Args:
        node: a node for which `is_match` holds.
        probe: not needed here.

    Returns:
        The layer, and the positions that its rope table reaches.

    Raises:
        OnnxRewriteError: the node says something that PagedAttention cannot do.
    """
    SCHEMA.check(node)
    caches = graph_input(node, SCHEMA, "key_cache"), graph_input(node, SCHEMA, "value_cache")
    if len(node.outputs) != len(SCHEMA.outputs):
        raise OnnxRewriteError(
            node_name(node),
            f"it has {len(node.outputs)} outputs, not {len(SCHEMA.outputs)}",
            "export with both caches as outputs",
        )
    query, key, value, layout = operands_of(node)
    rope, tables, limits = read_rope(node, SCHEMA)
    head_dim = require_static_dim(caches[0], 3, node=node)
    attention = read_attention(node, head_dim=head_dim, rope=rope, tables=tables)
    _check_caches(node, caches, attention)
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
        head_norms=read_head_norms(node, SCHEMA, head_dim=head_dim),
        step_inputs=_step_inputs(node),
        has_batch_axis=False,
    )
    return found, limits


def _check_caches(
    node: ir.Node, caches: tuple[ir.Value, ir.Value], attention: AttentionSpec
) -> None:
    expected = (attention.num_kv_heads, attention.head_dim)
    for cache in caches:
        found = tuple(require_static_dim(cache, axis, node=node) for axis in (2, 3))
        if found != expected:
            raise OnnxRewriteError(
                node_name(node),
                f"its cache `{cache.name}` holds {found[0]} heads of {found[1]} elements and its "
                f"attributes say {expected[0]} of {expected[1]}",
                "export caches `[num_blocks, block_size, kv_num_heads, head_size]`",
            )


def _step_inputs(node: ir.Node) -> tuple[ir.Value, ...]:
    """Graph inputs that go with the node; its lengths have to be some."""
    lengths = [graph_input(node, SCHEMA, name) for name in _LENGTHS]
    slots = named_operand(node, SCHEMA, "slot_mapping")
    if slots is not None and not slots.is_graph_input():
        raise OnnxRewriteError(
            node_name(node),
            f"its `slot_mapping` (`{value_name(slots)}`) is computed in the model, and the engine "
            "writes each token into its sequence's page",
            "export with `slot_mapping` as a graph input, or without it",
        )
    metadata = named_operand(node, SCHEMA, "attention_metadata")
    given = [each for each in (slots, metadata) if each is not None and each.is_graph_input()]
    return (*lengths, *given)
