"""Dialect: com.microsoft GroupQueryAttention, as onnxruntime-genai writes it.

    B batch    S new tokens    P past tokens    H query heads    K key/value heads    D head size

query is `[B, S, H * D]`, or `[B, S, (H + 2 * K) * D]` without key and value; the cache is
`[B, K, P, D]` in and out. The node is causal; `local_window_size` counts the keys that a query
sees, itself included. `seqlens_k` and `total_sequence_length` have to be those of a batch of one
with nothing padded, which is proved by evaluation.
"""

from __future__ import annotations

import math
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.facts import IndexKind, LayerMatch, Layout, PositionLimit
from paged_trt.builder.onnx.graph import (
    NodeSchema,
    attribute,
    constant_array,
    node_name,
    operand,
    require_static_dim,
    static_dim,
    value_name,
)
from paged_trt.builder.onnx.lengths import recognise
from paged_trt.builder.onnx.mask import SMALL_STEPS
from paged_trt.builder.onnx.probe import Probe, steps_of
from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec, Rope
from paged_trt.plugins.errors import OnnxRewriteError

_UNQUANTISED = "export with an unquantised KV cache; quantise the pool with `--kv-cache-dtype`"
_NO_NORM = "export with the query and key norm as nodes of their own"
SCHEMA: Final = NodeSchema(
    handled=frozenset(
        {
            "num_heads",
            "kv_num_heads",
            "scale",
            "softcap",
            "local_window_size",
            "do_rotary",
            "rotary_interleaved",
        }
    ),
    neutral={
        "causal": (1,),
        "smooth_softmax": (0, -1),
        "sliding_window_cache": (0,),
        "kv_cache_bit_width": (0,),
        "k_quant_type": ("NONE",),
        "v_quant_type": ("NONE",),
        # These only matter for the norm weights and the output, which are refused.
        "qk_norm_epsilon": None,
        "q_norm_epsilon": None,
        "k_norm_epsilon": None,
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
        "k_scale": _UNQUANTISED,
        "v_scale": _UNQUANTISED,
        "q_norm_weight": _NO_NORM,
        "k_norm_weight": _NO_NORM,
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
    caches = _cache(node, 3), _cache(node, 4)
    if len(node.outputs) < 3:
        raise OnnxRewriteError(
            node_name(node), "it has no present_key and present_value", "export with a KV cache"
        )
    query, key, value, layout = _operands(node)
    rope, tables, limits = _rope(node, probe)
    attention = _attention(node, caches, rope=rope, tables=tables)
    _check_width(node, attention, layout)
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
        sinks=_sinks(node, attention.num_q_heads),
    )
    return found, limits


def _attention(
    node: ir.Node,
    caches: tuple[ir.Value, ir.Value],
    *,
    rope: Rope,
    tables: tuple[ir.Value, ...],
) -> AttentionSpec:
    head_dim = require_static_dim(caches[0], 3, node=node)
    num_kv_heads = require_static_dim(caches[0], 1, node=node)
    declared = attribute(node, "kv_num_heads", 0)
    if declared != num_kv_heads:
        raise OnnxRewriteError(
            node_name(node),
            f"`kv_num_heads` is {declared} and the cache has {num_kv_heads} heads",
            "export a cache `[batch, kv_num_heads, past, head_dim]`",
        )
    window = int(attribute(node, "local_window_size", -1))
    return AttentionSpec(
        num_q_heads=int(attribute(node, "num_heads", 0)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=require_static_dim(caches[1], 3, node=node),
        # The operator takes a scale of 0 for "not given".
        softmax_scale=float(attribute(node, "scale", 0.0)) or 1 / math.sqrt(head_dim),
        softcap=float(attribute(node, "softcap", 0.0)),
        window=FULL_WINDOW if window < 0 else window,
        rope=rope,
        rotary_dim=2 * require_static_dim(tables[0], 1, node=node) if tables else 0,
    )


def _cache(node: ir.Node, index: int) -> ir.Value:
    cache = operand(node, index)
    if cache is None or not cache.is_graph_input():
        raise OnnxRewriteError(
            node_name(node),
            f"its input `{SCHEMA.inputs[index]}` is no graph input",
            "export with a KV cache whose parts are inputs of the graph",
        )
    return cache


def _operands(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, Layout]:
    query, key, value = (operand(node, index) for index in range(3))
    if query is None or (key is None) != (value is None):
        raise OnnxRewriteError(
            node_name(node), "one of query, key and value is missing", "export the model again"
        )
    if key is None or value is None:
        return query, query, query, Layout.PACKED
    return query, key, value, Layout.FLAT


def _check_width(node: ir.Node, attention: AttentionSpec, layout: Layout) -> None:
    heads = {"query": attention.num_q_heads}
    if layout is Layout.PACKED:
        heads["query"] += 2 * attention.num_kv_heads
    else:
        heads |= {"key": attention.num_kv_heads, "value": attention.num_kv_heads}
    for index, (name, count) in enumerate(heads.items()):
        width, expected = _width(node.inputs[index]), count * attention.head_dim
        if width not in {None, expected}:
            raise OnnxRewriteError(
                node_name(node),
                f"its {name} is {width} wide and the heads need {expected}",
                "export the model again",
            )


def _width(value: ir.Value | None) -> int | None:
    """Last dimension, from the weight of a product or bias where no shape says it."""
    if value is None:
        return None
    producer = value.producer()
    if value.shape is not None or producer is None:
        return static_dim(value, -1)
    if producer.op_type not in {"MatMul", "Add"}:
        return None
    widths = {
        static_dim(each, -1)
        for each in producer.inputs
        if each is not None and each.is_initializer() and each.shape is not None
    }
    return widths.pop() if len(widths) == 1 else None


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


def _rope(
    node: ir.Node, probe: Probe
) -> tuple[Rope, tuple[ir.Value, ...], tuple[PositionLimit, ...]]:
    _check_positions(node, probe)
    if not attribute(node, "do_rotary", 0):
        return Rope.NONE, (), ()
    tables, shapes = [], []
    for index in (7, 8):
        table = operand(node, index)
        array = constant_array(table)
        if table is None or array is None:
            raise OnnxRewriteError(
                node_name(node),
                f"it rotates, and its `{SCHEMA.inputs[index]}` is no constant",
                "export with one rope table (models that switch between two are not supported)",
            )
        tables.append(table)
        shapes.append(array.shape)
    if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
        raise OnnxRewriteError(
            node_name(node),
            f"its rope tables have the shapes {list(shapes[0])} and {list(shapes[1])}",
            "export tables `[max_positions, rotary_dim / 2]`",
        )
    rope = Rope.INTERLEAVED if attribute(node, "rotary_interleaved", 0) else Rope.HALF_SPLIT
    limit = PositionLimit(name=value_name(tables[0]), positions=int(shapes[0][0]))
    return rope, tuple(tables), (limit,)


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


def _sinks(node: ir.Node, num_q_heads: int) -> ir.Value | None:
    sinks = operand(node, 11)
    if sinks is None:
        return None
    array = constant_array(sinks)
    if array is None or array.size != num_q_heads:
        raise OnnxRewriteError(
            node_name(node),
            f"its `head_sink` is no constant of {num_q_heads} numbers",
            "export with the sinks as weights",
        )
    return sinks
