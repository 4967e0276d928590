"""Dialect: ai.onnx Attention (opset 23 to 25) with a KV cache beside it.

    B batch    S new tokens    P past tokens    H query heads    K key/value heads    D head size

The cache is the node's own (`past_key` `[B, K, P, D]` in, `present_key` out), or a
`Concat(past, new)` before it, with or without the heads repeated to H in between, or a
`TensorScatter(cache, new)` before it where the node has `nonpad_kv_seqlen`.

`is_causal=1` was evaluated with past tokens in onnxruntime 1.32 and in onnx's own evaluator.
With `past_key` inputs, query i of a step sees the keys up to P + i, as the operator's errata
say. Without them, the node cannot know P, and query i sees the keys up to i of all P + S: that
is wrong after a Concat, so it is refused there. Both apply softcap before the mask, as
PagedAttention does. `left_window_size` counts keys besides the query's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.concat_cache import WITH_CACHE, concat_cache
from paged_trt.builder.onnx.facts import LayerMatch, Layout, PositionLimit
from paged_trt.builder.onnx.graph import (
    EXPORT_COMMAND,
    NodeSchema,
    attribute,
    node_name,
    operand,
    require_static_dim,
    value_name,
)
from paged_trt.builder.onnx.mask import prove_mask
from paged_trt.builder.onnx.probe import Probe
from paged_trt.builder.onnx.scatter_cache import check_valid_length, scatter_cache
from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.errors import OnnxRewriteError

SCHEMA: Final = NodeSchema(
    handled=frozenset(
        {
            "is_causal",
            "scale",
            "softcap",
            "q_num_heads",
            "kv_num_heads",
            "left_window_size",
            "right_window_size",
        }
    ),
    # PagedAttention's softmax is float32 (1); the mode only matters for a refused output.
    neutral={"softmax_precision": (0, 1), "qk_matmul_output_mode": None},
    inputs=("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"),
    refused_inputs={},
    outputs=("Y", "present_key", "present_value", "qk_matmul_output"),
    refused_outputs={"qk_matmul_output": "export without `output_attentions`"},
)


def is_match(node: ir.Node) -> bool:
    """Whether `node` is attention of this dialect."""
    return node.domain == "" and node.op_type == "Attention"


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
    cache = _find_cache(node, probe)
    window, limits = _window(node, probe, knows_past=cache.knows_past)
    caches = cache.caches
    head_dim = require_static_dim(caches[0], 3, node=node)
    query = _required(node, 0)
    layout, num_q_heads = _layout(node, query, probe, head_dim=head_dim)
    attention = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=require_static_dim(caches[0], 1, node=node),
        head_dim=head_dim,
        value_head_dim=require_static_dim(caches[1], 3, node=node),
        softmax_scale=float(attribute(node, "scale", 1 / math.sqrt(head_dim))),
        softcap=float(attribute(node, "softcap", 0.0)),
        window=window,
    )
    if layout is Layout.FLAT:
        _check_kv_heads(node, attention, is_own_cache=cache.kv_layout is None)
    found = LayerMatch(
        node=node,
        attention=attention,
        layout=layout,
        kv_layout=cache.kv_layout,
        query=query,
        key=cache.key,
        value=cache.value,
        caches=caches,
        presents=cache.presents,
        step_inputs=cache.step_inputs,
    )
    return found, limits


@dataclass(frozen=True, kw_only=True)
class _Cache:
    """New keys and values, the caches that they join, and whether the node knows the past.

    `kv_layout` is that of what joins a cache outside the node; None is that of the query.
    """

    key: ir.Value
    value: ir.Value
    caches: tuple[ir.Value, ir.Value]
    presents: tuple[ir.Value, ir.Value]
    knows_past: bool = True
    kv_layout: Layout | None = None
    step_inputs: tuple[ir.Value, ...] = ()


def _find_cache(node: ir.Node, probe: Probe) -> _Cache:
    key, value, length = _required(node, 1), _required(node, 2), operand(node, 6)
    if operand(node, 4) is not None or operand(node, 5) is not None:
        if length is not None:
            raise OnnxRewriteError(
                node_name(node), "it has both `past_key` and `nonpad_kv_seqlen`", WITH_CACHE
            )
        caches, presents = _own_cache(node)
        return _Cache(key=key, value=value, caches=caches, presents=presents)
    _refuse_presents(node)
    if length is None:
        # 4-D operands say themselves how many heads they have.
        heads = attribute(node, "kv_num_heads", 0) or None
        keys, values = (concat_cache(node, each, probe, num_heads=heads) for each in (key, value))
        return _Cache(
            key=keys[0],
            value=values[0],
            caches=(keys[1], values[1]),
            presents=(keys[2], values[2]),
            knows_past=False,
            kv_layout=Layout.HEADS,
        )
    (*keys_, key_at), (*values_, value_at) = (scatter_cache(node, each) for each in (key, value))
    if key_at is not value_at:
        raise OnnxRewriteError(
            node_name(node),
            f"its keys are written at `{value_name(key_at)}` and its values at "
            f"`{value_name(value_at)}`",
            "export with one `write_indices`",
        )
    check_valid_length(node, length, probe)
    return _Cache(
        key=keys_[0],
        value=values_[0],
        caches=(keys_[1], values_[1]),
        presents=(keys_[2], values_[2]),
        kv_layout=Layout.HEADS,
        step_inputs=(key_at, *([length] if length.is_graph_input() else [])),
    )


def _required(node: ir.Node, index: int) -> ir.Value:
    found = operand(node, index)
    if found is None:
        raise OnnxRewriteError(
            node_name(node), f"input `{SCHEMA.inputs[index]}` is missing", "export the model again"
        )
    return found


def _own_cache(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]]:
    caches = _required(node, 4), _required(node, 5)
    for cache in caches:
        if not cache.is_graph_input():
            raise OnnxRewriteError(
                node_name(node), f"its cache `{value_name(cache)}` is no graph input", WITH_CACHE
            )
    if len(node.outputs) < 3:
        raise OnnxRewriteError(
            node_name(node), "it has `past_key` and no `present_key`", WITH_CACHE
        )
    return caches, (node.outputs[1], node.outputs[2])


def _refuse_presents(node: ir.Node) -> None:
    for name, output in zip(SCHEMA.outputs[1:3], node.outputs[1:3], strict=False):
        if output.uses() or output.is_graph_output():
            raise OnnxRewriteError(
                node_name(node), f"it has `{name}` and no `past_key`", WITH_CACHE
            )


def _layout(node: ir.Node, query: ir.Value, probe: Probe, *, head_dim: int) -> tuple[Layout, int]:
    """Layout of the operands, and the number of query heads."""
    shape = probe.shape(query) or ()
    if len(shape) == 4 and shape[1] is not None:
        if shape[3] not in {None, head_dim}:
            raise OnnxRewriteError(
                node_name(node),
                f"query heads have {shape[3]} elements and the cache {head_dim}",
                "export a model whose query and key heads have one size",
            )
        return Layout.HEADS, shape[1]
    num_q_heads = attribute(node, "q_num_heads", 0)
    if len(shape) == 3 and num_q_heads:
        if shape[2] not in {None, num_q_heads * head_dim}:
            raise OnnxRewriteError(
                node_name(node),
                f"its query is {shape[2]} wide and {num_q_heads} heads of {head_dim} need "
                f"{num_q_heads * head_dim}",
                "export a model whose query and key heads have one size",
            )
        return Layout.FLAT, int(num_q_heads)
    raise OnnxRewriteError(
        node_name(node),
        f"the shape of its query `{value_name(query)}` ({query.shape}) is not known well enough",
        "export with the numbers of heads and the head size fixed",
    )


def _check_kv_heads(node: ir.Node, attention: AttentionSpec, *, is_own_cache: bool) -> None:
    declared = attribute(node, "kv_num_heads", 0)
    # Heads of a cache outside the node may be repeated before it, which is proved there.
    if not declared or (is_own_cache and declared != attention.num_kv_heads):
        raise OnnxRewriteError(
            node_name(node),
            f"`kv_num_heads` is {declared} and the cache has {attention.num_kv_heads} heads",
            "export a cache `[batch, kv_num_heads, past, head_dim]`",
        )


def _window(
    node: ir.Node, probe: Probe, *, knows_past: bool
) -> tuple[int, tuple[PositionLimit, ...]]:
    """Window of mask and attributes together, with the length up to which it was proved."""
    left, right = (attribute(node, f"{side}_window_size", -1) for side in ("left", "right"))
    # No key to the right of the query is what causal means; a wider right side hides less.
    is_causal = bool(attribute(node, "is_causal", 0)) or right == 0
    if not knows_past and (is_causal or left >= 0 or right >= 0):
        raise OnnxRewriteError(
            node_name(node),
            "`is_causal` or a window after Concat(past, new) counts positions from the first "
            "key, not from the end of the past",
            "export with `past_key` and `past_value`, or with a causal mask input",
        )
    mask = operand(node, 3)
    if mask is not None and operand(node, 6) is not None:
        raise OnnxRewriteError(
            node_name(node),
            "it has a mask over a cache of fixed length, most of which holds nothing",
            "export with `is_causal=1` and no mask beside `nonpad_kv_seqlen`",
        )
    windows = [left + 1] if left >= 0 else []
    limits: tuple[PositionLimit, ...] = ()
    if mask is not None:
        proved = prove_mask(probe, mask, node=node, is_causal=is_causal)
        limits = (PositionLimit(name=value_name(mask), positions=proved.positions),)
        if proved.window != FULL_WINDOW:
            windows.append(proved.window)
    elif not is_causal:
        raise OnnxRewriteError(
            node_name(node),
            f"it has no mask, `is_causal` is 0 and `right_window_size` is {right}",
            EXPORT_COMMAND,
        )
    return min(windows, default=FULL_WINDOW), limits
