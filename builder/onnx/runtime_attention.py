"""What onnxruntime's own attention operators have in common: operands, rope, sinks, head norms.

    S tokens    H query heads    K key/value heads    D head size

query is `[..., S, H * D]`, or `[..., S, (H + 2 * K) * D]` without key and value.
"""

from __future__ import annotations

import math
from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.facts import HeadNorm, Layout, PositionLimit
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
from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec, Rope
from paged_trt.plugins.errors import OnnxRewriteError

_DEFAULT_EPSILON: Final = 1e-6
HANDLED: Final = frozenset(
    {
        "num_heads",
        "kv_num_heads",
        "scale",
        "softcap",
        "local_window_size",
        "do_rotary",
        "rotary_interleaved",
        "qk_norm_epsilon",
        "q_norm_epsilon",
        "k_norm_epsilon",
    }
)
"""Attributes that this module reads."""
UNQUANTISED: Final = (
    "export with an unquantised KV cache; quantise the pool with `--kv-cache-dtype`"
)


def named_operand(node: ir.Node, schema: NodeSchema, name: str) -> ir.Value | None:
    """Input of that name; None where it is left out."""
    return operand(node, schema.inputs.index(name))


def graph_input(node: ir.Node, schema: NodeSchema, name: str) -> ir.Value:
    """Input of that name, which has to be one of the graph's.

    Raises:
        OnnxRewriteError: it is left out, or computed.
    """
    found = named_operand(node, schema, name)
    if found is None or not found.is_graph_input():
        raise OnnxRewriteError(
            node_name(node),
            f"its input `{name}` is no graph input",
            "export with a KV cache whose parts are inputs of the graph",
        )
    return found


def operands_of(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, Layout]:
    """Query, key, value and their layout.

    Raises:
        OnnxRewriteError: one of them is missing.
    """
    query, key, value = (operand(node, index) for index in range(3))
    if query is None or (key is None) != (value is None):
        raise OnnxRewriteError(
            node_name(node), "one of query, key and value is missing", "export the model again"
        )
    if key is None or value is None:
        return query, query, query, Layout.PACKED
    return query, key, value, Layout.FLAT


def read_attention(
    node: ir.Node, *, head_dim: int | None, rope: Rope, tables: tuple[ir.Value, ...]
) -> AttentionSpec:
    """Geometry of a node.

    Args:
        node: the node.
        head_dim: size of a head in the cache; None works it out from the width of the query.
        rope: as `read_rope` gives it.
        tables: likewise.

    Raises:
        OnnxRewriteError: heads, sizes and widths contradict each other, or say too little.
        ConfigError: no attention has that geometry.
    """
    num_q_heads = int(attribute(node, "num_heads", 0))
    num_kv_heads = int(attribute(node, "kv_num_heads", 0))
    *_, layout = operands_of(node)
    packed_heads = num_q_heads + (2 * num_kv_heads if layout is Layout.PACKED else 0)
    size = head_dim or head_dim_of_width(node, packed_heads)
    heads = [packed_heads] if layout is Layout.PACKED else [num_q_heads, num_kv_heads, num_kv_heads]
    for value, count, name in zip(node.inputs, heads, ("query", "key", "value"), strict=False):
        if (width := _width(value)) not in {None, count * size}:
            raise OnnxRewriteError(
                node_name(node),
                f"its {name} is {width} wide and the heads need {count * size}",
                "export the model again",
            )
    window = int(attribute(node, "local_window_size", -1))
    return AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        value_head_dim=size,
        # The operators take a scale of 0 for "not given".
        softmax_scale=float(attribute(node, "scale", 0.0)) or 1 / math.sqrt(size),
        softcap=float(attribute(node, "softcap", 0.0)),
        window=FULL_WINDOW if window < 0 else window,
        rope=rope,
        rotary_dim=2 * require_static_dim(tables[0], 1, node=node) if tables else 0,
    )


def head_dim_of_width(node: ir.Node, num_heads: int) -> int:
    """Size of a head, from the width of the query.

    Args:
        node: the node.
        num_heads: heads that lie side by side in its query.

    Raises:
        OnnxRewriteError: the width is not known, or is no multiple of the heads.
    """
    width = _width(node.inputs[0])
    if not width or not num_heads or width % num_heads:
        raise OnnxRewriteError(
            node_name(node),
            f"the size of its heads is not known: its query is {width} wide and holds "
            f"{num_heads} heads",
            "export with the head size fixed",
        )
    return width // num_heads


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


def read_rope(
    node: ir.Node, schema: NodeSchema
) -> tuple[Rope, tuple[ir.Value, ...], tuple[PositionLimit, ...]]:
    """Rotary embedding, its two tables, and the positions that they reach.

    Raises:
        OnnxRewriteError: the tables are no constants of one shape.
    """
    if not attribute(node, "do_rotary", 0):
        return Rope.NONE, (), ()
    tables, shapes = [], []
    for name in ("cos_cache", "sin_cache"):
        table = named_operand(node, schema, name)
        array = constant_array(table)
        if table is None or array is None:
            raise OnnxRewriteError(
                node_name(node),
                f"it rotates, and its `{name}` is no constant",
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


def read_sinks(node: ir.Node, schema: NodeSchema, *, num_q_heads: int) -> ir.Value | None:
    """Constant `[num_q_heads]` of sinks; None where there are none.

    Raises:
        OnnxRewriteError: they are computed, or of another number.
    """
    sinks = named_operand(node, schema, "head_sink")
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


def read_head_norms(
    node: ir.Node, schema: NodeSchema, *, head_dim: int
) -> tuple[HeadNorm, HeadNorm] | None:
    """RMS norms of query and key heads; None where the node has none.

    Raises:
        OnnxRewriteError: there is one without the other, or a weight of another size.
    """
    names = ("q_norm_weight", "k_norm_weight")
    weights = [named_operand(node, schema, name) for name in names]
    if weights == [None, None]:
        return None
    shared = float(attribute(node, "qk_norm_epsilon", _DEFAULT_EPSILON))
    norms = []
    for name, weight, part in zip(names, weights, ("q", "k"), strict=True):
        if weight is None or static_dim(weight, 0) not in {None, head_dim}:
            raise OnnxRewriteError(
                node_name(node),
                f"its `{name}` is no vector of {head_dim} numbers",
                "export with norms of both query and key heads, or of neither",
            )
        epsilon = float(attribute(node, f"{part}_norm_epsilon", shared))
        norms.append(HeadNorm(weight=weight, epsilon=epsilon))
    return norms[0], norms[1]
