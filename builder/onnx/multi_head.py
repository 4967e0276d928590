"""Dialect: com.microsoft MultiHeadAttention, as onnxruntime-genai writes it for float16 on a CPU.

    B batch    S new tokens    P past tokens    H query heads    K key/value heads    D head size

query is `[B, S, H * D]`. The cache is the node's own (`past_key` `[B, H, P, D]`, key and value
`[B, S, H * D]`), or a `Concat(past, new)` before it, `[B, K, P, D]`, with the heads repeated to H.
The mask is `attention_bias`, or `unidirectional` where the node knows the past.
"""

from __future__ import annotations

import math
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.concat_cache import WITH_CACHE, concat_cache
from paged_trt.builder.onnx.facts import LayerMatch, Layout, PositionLimit
from paged_trt.builder.onnx.graph import (
    NodeSchema,
    attribute,
    node_name,
    operand,
    require_static_dim,
    value_name,
)
from paged_trt.builder.onnx.mask import prove_mask
from paged_trt.builder.onnx.probe import Probe
from paged_trt.builder.onnx.runtime_attention import graph_input, head_dim_of_width, named_operand
from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.errors import OnnxRewriteError

SCHEMA: Final = NodeSchema(
    handled=frozenset({"num_heads", "scale", "unidirectional"}),
    # This only matters for a padding mask, which is refused.
    neutral={"mask_filter_value": None},
    inputs=(
        "query",
        "key",
        "value",
        "bias",
        "key_padding_mask",
        "attention_bias",
        "past_key",
        "past_value",
        "past_sequence_length",
        "cache_indirection",
    ),
    refused_inputs={
        "bias": "export with the bias of the projections as Add nodes",
        "key_padding_mask": "export with a causal `attention_bias`",
        "past_sequence_length": "export with a cache that grows (`past_present_share_buffer=0`)",
        "cache_indirection": "export without beam search",
    },
    outputs=("output", "present_key", "present_value", "qk"),
    refused_outputs={"qk": "export without attention scores"},
)
_Sides = tuple[ir.Value, ir.Value]


def is_match(node: ir.Node) -> bool:
    """Whether `node` is attention of this dialect."""
    return node.domain == "com.microsoft" and node.op_type == "MultiHeadAttention"


def match(node: ir.Node, probe: Probe) -> tuple[LayerMatch, tuple[PositionLimit, ...]]:
    """Read one node.

    Args:
        node: a node for which `is_match` holds.
        probe: evaluates the model's masks.

    Returns:
        The layer, and the length up to which its mask was proved.

    Raises:
        OnnxRewriteError: the node says something that PagedAttention cannot do.
    """
    SCHEMA.check(node)
    query, key, value = _operands(node)
    num_heads = int(attribute(node, "num_heads", 0))
    head_dim = head_dim_of_width(node, num_heads)
    has_own_cache = operand(node, 6) is not None or operand(node, 7) is not None
    if has_own_cache:
        keys, values, caches, presents = key, value, *_own_cache(node)
    else:
        (keys, key_cache, key_present), (values, value_cache, value_present) = (
            concat_cache(node, each, probe, head_dim=head_dim, num_heads=num_heads)
            for each in (key, value)
        )
        caches, presents = (key_cache, value_cache), (key_present, value_present)
    window, limits = _window(node, probe, has_own_cache=has_own_cache)
    attention = AttentionSpec(
        num_q_heads=num_heads,
        num_kv_heads=require_static_dim(caches[0], 1, node=node),
        head_dim=head_dim,
        value_head_dim=head_dim,
        # The operator takes a scale of 0 for "not given".
        softmax_scale=float(attribute(node, "scale", 0.0)) or 1 / math.sqrt(head_dim),
        window=window,
    )
    found = LayerMatch(
        node=node,
        attention=attention,
        layout=Layout.FLAT,
        kv_layout=Layout.FLAT if has_own_cache else Layout.HEADS,
        query=query,
        key=keys,
        value=values,
        caches=caches,
        presents=presents,
    )
    return found, limits


def _operands(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    query, key, value = (operand(node, index) for index in range(3))
    if query is None or key is None or value is None:
        raise OnnxRewriteError(
            node_name(node),
            "query, key and value are packed into one input",
            "export them as three inputs",
        )
    return query, key, value


def _own_cache(node: ir.Node) -> tuple[_Sides, _Sides]:
    caches = graph_input(node, SCHEMA, "past_key"), graph_input(node, SCHEMA, "past_value")
    if len(node.outputs) < 3:
        raise OnnxRewriteError(
            node_name(node), "it has `past_key` and no `present_key`", WITH_CACHE
        )
    return caches, (node.outputs[1], node.outputs[2])


def _window(
    node: ir.Node, probe: Probe, *, has_own_cache: bool
) -> tuple[int, tuple[PositionLimit, ...]]:
    """Window of the mask, with the length up to which it was proved."""
    is_causal = bool(attribute(node, "unidirectional", 0))
    if is_causal and not has_own_cache:
        raise OnnxRewriteError(
            node_name(node),
            "`unidirectional` after Concat(past, new) counts positions from the first key, not "
            "from the end of the past",
            "export with `past_key` and `past_value`, or with a causal `attention_bias`",
        )
    mask = named_operand(node, SCHEMA, "attention_bias")
    if mask is not None:
        proved = prove_mask(probe, mask, node=node, is_causal=is_causal)
        return proved.window, (PositionLimit(name=value_name(mask), positions=proved.positions),)
    if not is_causal:
        raise OnnxRewriteError(
            node_name(node),
            "it has no `attention_bias` and `unidirectional` is 0",
            "export a decoder with a causal mask",
        )
    return FULL_WINDOW, ()
