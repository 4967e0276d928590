"""The dialects of attention, and the nodes of a model that speak one of them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx import attention, group_query, multi_head, paged, runtime_paged
from paged_trt.builder.onnx.facts import Dialect, LayerMatch, PositionLimit
from paged_trt.builder.onnx.graph import EXPORT_COMMAND, node_name
from paged_trt.builder.onnx.probe import Probe
from paged_trt.builder.onnx.weights import require_readable_weights
from paged_trt.plugins.errors import ConfigError, OnnxRewriteError, UnsupportedError

Match = Callable[[ir.Node, Probe], tuple[LayerMatch, tuple[PositionLimit, ...]]]
DIALECTS: Final[tuple[tuple[Dialect, Callable[[ir.Node], bool], Match], ...]] = (
    (Dialect.PAGED_ATTENTION, paged.is_match, paged.match),
    (Dialect.ATTENTION, attention.is_match, attention.match),
    (Dialect.GROUP_QUERY_ATTENTION, group_query.is_match, group_query.match),
    (Dialect.MULTI_HEAD_ATTENTION, multi_head.is_match, multi_head.match),
    (Dialect.RUNTIME_PAGED_ATTENTION, runtime_paged.is_match, runtime_paged.match),
)
_UNSUPPORTED: Final = frozenset({"DecoderMaskedMultiHeadAttention", "Attention"})
_EDGE_LLM: Final = (
    "an operator of TensorRT Edge-LLM, whose file is not a whole model: its runtime looks up the "
    "token embeddings (input `inputs_embeds`) and computes the rope tables (input "
    "`rope_rotary_cos_sin`) outside of it"
)
_TENSORRT: Final = "an operator of TensorRT, with a KV cache of its own"
_OTHER_PLUGINS: Final = {
    "AttentionPlugin": _EDGE_LLM,
    "TRT_Attention": _TENSORRT,
    "TRT_KVCacheUpdate": _TENSORRT,
}


def match_layer(
    node: ir.Node, match: Match, probe: Probe
) -> tuple[LayerMatch, tuple[PositionLimit, ...]]:
    """One layer, and the limits of its tables and masks.

    Args:
        node: an attention node.
        match: of its dialect.
        probe: of its model.

    Raises:
        OnnxRewriteError: the node cannot become PagedAttention.
        UnsupportedError: a mask has to be proved and onnxruntime is not installed.
    """
    try:
        return match(node, probe)
    except UnsupportedError:
        raise
    except ConfigError as error:
        raise OnnxRewriteError(
            node_name(node), f"its attention is impossible: {error}", "export it again"
        ) from error


def unsupported(node: ir.Node) -> OnnxRewriteError | None:
    """Why an attention node of no known dialect is refused; None for every other node."""
    if node.op_type in _OTHER_PLUGINS:
        return OnnxRewriteError(
            node_name(node),
            f"{node.domain}::{node.op_type} is {_OTHER_PLUGINS[node.op_type]}",
            "start from the model that it was exported from: " + EXPORT_COMMAND,
        )
    if node.domain != "com.microsoft" or node.op_type not in _UNSUPPORTED:
        return None
    return OnnxRewriteError(
        node_name(node),
        f"com.microsoft::{node.op_type} is not supported",
        "export with onnxruntime-genai's GroupQueryAttention (`-e cuda -p fp16`), or "
        + EXPORT_COMMAND,
    )


def attention_nodes(model: ir.Model) -> tuple[Dialect, list[ir.Node], Match]:
    """The attention nodes of a model, which share one dialect.

    Raises:
        OnnxRewriteError: there are none, they mix dialects, or a node cannot be built.
    """
    found = [
        (dialect, nodes, match)
        for dialect, is_match, match in DIALECTS
        if (nodes := [node for node in model.graph if is_match(node)])
    ]
    for node in model.graph:
        if (error := unsupported(node)) is not None:
            raise error
    require_readable_weights(model.graph)
    if not found:
        raise OnnxRewriteError(
            model.graph.name or "model", _why_no_attention(model), EXPORT_COMMAND
        )
    if len(found) > 1:
        raise OnnxRewriteError(
            node_name(found[1][1][0]),
            f"the model mixes {found[0][0].value} and {found[1][0].value}",
            "export all layers in one dialect",
        )
    return found[0]


def _why_no_attention(model: ir.Model) -> str:
    counts = collections.Counter(node.op_type for node in model.graph)
    if counts["Softmax"] and counts["MatMul"]:
        return (
            f"there is no attention node: attention is spelt out in {counts['MatMul']} MatMul and "
            f"{counts['Softmax']} Softmax nodes"
        )
    return "there is no attention node"
