"""Dialect: ai.onnx Attention (opset 23 to 25) with a KV cache beside it.

    B batch    S new tokens    P past tokens    H query heads    K key/value heads    D head size

The cache is either the node's own (`past_key` `[B, K, P, D]` in, `present_key` out) or a
`Concat(past, new)` before it, with or without the heads repeated to H in between.

`is_causal=1` was evaluated with past tokens in onnxruntime 1.32 and in onnx's own evaluator.
With `past_key` inputs, query i of a step sees the keys up to P + i, as the operator's errata
say. Without them, the node cannot know P, and query i sees the keys up to i of all P + S: that
is wrong after a Concat, so it is refused there. Both apply softcap before the mask, as
PagedAttention does. `left_window_size` counts keys besides the query's own.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
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
from paged_trt.builder.onnx.probe import Probe, steps_of
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
    refused_inputs={
        "nonpad_kv_seqlen": "export with `past_key` and `past_value`, or with Concat(past, new)"
    },
    outputs=("Y", "present_key", "present_value", "qk_matmul_output"),
    refused_outputs={"qk_matmul_output": "export without `output_attentions`"},
)
_REPEAT_OPS: Final = frozenset(
    {"Unsqueeze", "Expand", "Reshape", "Identity", "Tile", "Transpose", "Squeeze"}
)
"""Nodes that only move numbers, so that a proof in one type holds in every type."""
_REPEAT_STEPS: Final = steps_of([(3, 2), (0, 2), (1, 1)])
_WITH_CACHE: Final = "export with `use_cache=True`, so that each layer has a past and a present"


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
    query, key, value = (_required(node, index) for index in range(3))
    if operand(node, 4) is not None or operand(node, 5) is not None:
        caches, presents = _own_cache(node)
    else:
        _refuse_presents(node)
        (key, key_cache, key_present), (value, value_cache, value_present) = (
            _concat_cache(node, each, probe) for each in (key, value)
        )
        caches, presents = (key_cache, value_cache), (key_present, value_present)
    window, limits = _window(node, probe, has_own_cache=presents[0].producer() is node)
    head_dim = require_static_dim(caches[0], 3, node=node)
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
    _check_kv_heads(node, attention, layout)
    found = LayerMatch(
        node=node,
        attention=attention,
        layout=layout,
        query=query,
        key=key,
        value=value,
        caches=caches,
        presents=presents,
    )
    return found, limits


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
                node_name(node), f"its cache `{value_name(cache)}` is no graph input", _WITH_CACHE
            )
    if len(node.outputs) < 3:
        raise OnnxRewriteError(
            node_name(node), "it has `past_key` and no `present_key`", _WITH_CACHE
        )
    return caches, (node.outputs[1], node.outputs[2])


def _refuse_presents(node: ir.Node) -> None:
    for name, output in zip(SCHEMA.outputs[1:3], node.outputs[1:3], strict=False):
        if output.uses() or output.is_graph_output():
            raise OnnxRewriteError(
                node_name(node), f"it has `{name}` and no `past_key`", _WITH_CACHE
            )


def _concat_cache(
    node: ir.Node, present_heads: ir.Value, probe: Probe
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """New tokens, cache input and `Concat(past, new)` of a key or value operand."""
    present = present_heads
    while (producer := present.producer()) is not None and producer.op_type in _REPEAT_OPS:
        present = _first_input(producer)
    if producer is None or producer.op_type != "Concat" or not _is_cache_concat(producer):
        origin = "a graph input" if producer is None else f"{producer.op_type} `{producer.name}`"
        raise OnnxRewriteError(
            node_name(node),
            f"it has no KV cache: `{value_name(present_heads)}` comes from {origin}, "
            "not from Concat(past, new)",
            _WITH_CACHE,
        )
    cache, new = _first_input(producer), producer.inputs[1]
    if new is None:
        raise OnnxRewriteError(node_name(producer), "input 1 is missing", "export again")
    if present is not present_heads:
        _require_repeat(node, present_heads, present, cache, probe)
    return new, cache, present


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


def _require_repeat(
    node: ir.Node, repeated: ir.Value, present: ir.Value, cache: ir.Value, probe: Probe
) -> None:
    """Prove by evaluation that `repeated` is `present` with each head repeated in place."""
    num_kv_heads = require_static_dim(cache, 1, node=node)
    head_dim = require_static_dim(cache, 3, node=node)
    problem = "depends on data"
    if probe.depends_on_lengths_only(repeated, given=present):
        problem = "does not repeat each head in place"
        for step in _REPEAT_STEPS:
            shape = (1, num_kv_heads, step.total, head_dim)
            # Neighbours differ, and so do heads and tokens.
            given = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            try:
                found = probe.evaluate(repeated, step, given=present, given_array=given)
            except EvaluationError as error:
                problem = f"cannot be evaluated ({error})"
                break
            groups = found.shape[1] // num_kv_heads if found.ndim == 4 else 0
            if not np.array_equal(found, np.repeat(given, max(groups, 1), axis=1)):
                break
        else:
            return
    raise OnnxRewriteError(
        node_name(node),
        f"what lies between the cache `{value_name(cache)}` and the node {problem}",
        "export with Concat(past, new) whose heads are only repeated (repeat_kv)",
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
        return Layout.FLAT, int(num_q_heads)
    raise OnnxRewriteError(
        node_name(node),
        f"the shape of its query `{value_name(query)}` ({query.shape}) is not known well enough",
        "export with the numbers of heads and the head size fixed",
    )


def _check_kv_heads(node: ir.Node, attention: AttentionSpec, layout: Layout) -> None:
    declared = attribute(node, "kv_num_heads", 0)
    if layout is Layout.FLAT and declared != attention.num_kv_heads:
        raise OnnxRewriteError(
            node_name(node),
            f"`kv_num_heads` is {declared} and the cache has {attention.num_kv_heads} heads",
            "export a cache `[batch, kv_num_heads, past, head_dim]`",
        )


def _window(
    node: ir.Node, probe: Probe, *, has_own_cache: bool
) -> tuple[int, tuple[PositionLimit, ...]]:
    """Window of mask and attributes together, with the length up to which it was proved."""
    is_causal = bool(attribute(node, "is_causal", 0))
    left, right = (attribute(node, f"{side}_window_size", -1) for side in ("left", "right"))
    if not has_own_cache and (is_causal or left >= 0 or right >= 0):
        raise OnnxRewriteError(
            node_name(node),
            "`is_causal` or a window after Concat(past, new) counts positions from the first "
            "key, not from the end of the past",
            "export with `past_key` and `past_value`, or with a causal mask input",
        )
    mask = operand(node, 3)
    windows = [left + 1] if left >= 0 else []
    limits: tuple[PositionLimit, ...] = ()
    if mask is not None:
        proved = prove_mask(probe, mask, node=node, is_causal=is_causal)
        limits = (PositionLimit(name=value_name(mask), positions=proved.positions),)
        if proved.window != FULL_WINDOW:
            windows.append(proved.window)
    elif not is_causal:
        raise OnnxRewriteError(
            node_name(node), "it has no mask and `is_causal` is 0", EXPORT_COMMAND
        )
    return min(windows, default=FULL_WINDOW), limits
