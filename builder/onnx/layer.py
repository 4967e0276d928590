"""Replaces one attention node by PagedAttention.

T tokens    H query heads    K key/value heads    D head size    V value head size
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from paged_trt.builder.onnx.facts import LayerMatch, Layout
from paged_trt.builder.onnx.graph import Emitter, attribute, constant_array, node_name, replace_uses
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE, OperatorSpec
from paged_trt.plugins.tensors import (
    PAGE_TABLE,
    PAST_LENS,
    QUERY_START_OFFSETS,
    EngineSpec,
    attention_name,
    key_pool_name,
    kv_scales_name,
    pool_output_name,
    value_pool_name,
)

_CONSTANTS: Final = "/paged_trt/constants"
_MOVES: Final = frozenset({"Reshape", "Transpose", "Unsqueeze", "Squeeze", "Identity", "Cast"})


def replace_layer(
    graph: ir.Graph,
    layer: LayerMatch,
    *,
    index: int,
    inputs: dict[str, ir.Value],
    spec: EngineSpec,
) -> dict[str, ir.Value]:
    """Put PagedAttention in the place of `layer.node`.

    Args:
        graph: the graph to change; it has to be sorted afterwards.
        layer: the match.
        index: number of the layer.
        inputs: the engine's inputs by name.
        spec: the engine.

    Returns:
        The layer's pool outputs, and its attention output, by name.
    """
    attention = layer.attention
    _name_rotary_heads(layer.query, attention.num_q_heads)
    _name_rotary_heads(layer.key, attention.num_kv_heads)
    emit = Emitter(graph, node_name(layer.node))
    shared = Emitter(graph, _CONSTANTS)
    pools = [key_pool_name(index), value_pool_name(index)]
    scales = (
        inputs[kv_scales_name(index)]
        if spec.kv_cache_dtype.is_quantised
        else _full(shared, f"unit_scales_{attention.num_kv_heads}", (2, attention.num_kv_heads), 1)
    )
    operands = [
        *_tokens(emit, layer),
        *(inputs[name] for name in pools),
        *(inputs[name] for name in (PAGE_TABLE, QUERY_START_OFFSETS, PAST_LENS)),
        _rope_table(shared, layer),
        scales,
        _sinks(shared, layer),
    ]
    operator = OperatorSpec(pool=spec.pool, attention=attention)
    paged = emit.many(
        OP_TYPE,
        operands,
        OP_TYPE,
        operator.to_attributes(),
        num_outputs=3,
        domain=OP_DOMAIN,
        overload=spec.kv_cache_dtype.value,
    )
    replace_uses(layer.node.outputs[0], _output(emit, layer, paged[0]))
    names = [attention_name(index), *map(pool_output_name, pools)]
    return dict(zip(names, paged, strict=True))


def _name_rotary_heads(value: ir.Value, num_heads: int) -> None:
    """Spell out the heads of a rotary embedding before attention.

    onnxruntime works a `num_heads` of 0 out from the table; TensorRT-RTX 1.7.1 divides by it, and
    the process ends.
    """
    node = value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if (
        node is not None
        and (node.domain, node.op_type) == ("com.microsoft", "RotaryEmbedding")
        and not attribute(node, "num_heads", 0)
    ):
        node.attributes["num_heads"] = ir.AttrInt64("num_heads", num_heads)


def _tokens(emit: Emitter, layer: LayerMatch) -> list[ir.Value]:
    """Query, key and value as `[T, heads, size]`."""
    attention = layer.attention
    heads = (attention.num_q_heads, attention.num_kv_heads, attention.num_kv_heads)
    sizes = (attention.head_dim, attention.head_dim, attention.value_head_dim)
    names = ("query", "key", "value")
    values = [layer.query, layer.key, layer.value]
    if layer.layout is Layout.PACKED:
        widths = [count * size for count, size in zip(heads, sizes, strict=True)]
        values = list(
            emit.many(
                "Split", [layer.query, emit.integers(widths)], "Split", {"axis": -1}, num_outputs=3
            )
        )
    kv_layout = layer.kv_layout or layer.layout
    layouts = (layer.layout, kv_layout, kv_layout)
    for index, layout in enumerate(layouts):
        if layout is Layout.HEADS:
            values[index] = _from_heads(emit, values[index], names[index])
        elif layout is not Layout.TOKENS:
            dims = emit.integers([-1, heads[index], sizes[index]])
            values[index] = emit.op("Reshape", [values[index], dims], f"{names[index]}/Reshape")
    for index, norm in enumerate(layer.head_norms or ()):
        values[index] = emit.op(
            "RMSNormalization",
            [values[index], norm.weight],
            f"{names[index]}/RMSNormalization",
            {"axis": -1, "epsilon": norm.epsilon},
        )
    return values


def _from_heads(emit: Emitter, value: ir.Value, name: str) -> ir.Value:
    """`[1, heads, T, size]` as `[T, heads, size]`."""
    squeezed = emit.op("Squeeze", [value, emit.integers([0])], f"{name}/Squeeze", dtype=value.dtype)
    return emit.op("Transpose", [squeezed], f"{name}/Transpose", {"perm": [1, 0, 2]})


def _output(emit: Emitter, layer: LayerMatch, output: ir.Value) -> ir.Value:
    """`[T, H, V]` as the dense node gave it."""
    attention = layer.attention
    if layer.layout is Layout.TOKENS:
        return output
    if layer.layout is Layout.HEADS:
        heads_first = emit.op("Transpose", [output], "output/Transpose", {"perm": [1, 0, 2]})
        return emit.op("Unsqueeze", [heads_first, emit.integers([0])], "output/Unsqueeze")
    width = attention.num_q_heads * attention.value_head_dim
    dims = [1, -1, width] if layer.has_batch_axis else [-1, width]
    return emit.op("Reshape", [output, emit.integers(dims)], "output/Reshape")


def _rope_table(shared: Emitter, layer: LayerMatch) -> ir.Value:
    """`[max_positions, 2, rotary_dim / 2]` float32; layers with the same table share it."""
    if not layer.rope_tables:
        return _full(shared, "no_rope", (1, 2, 1), 0)
    if layer.layout is Layout.TOKENS:
        return layer.rope_tables[0]
    cos, sin = (np.asarray(constant_array(table), np.float32) for table in layer.rope_tables)
    name = "rope_cos_sin/" + "/".join(str(table.name) for table in layer.rope_tables)
    return shared.constant(np.stack([cos, sin], axis=1), name)


def _sinks(shared: Emitter, layer: LayerMatch) -> ir.Value:
    count = layer.attention.num_q_heads
    if layer.sinks is None:
        return _full(shared, f"no_sinks_{count}", (count,), -np.inf)
    sinks = np.asarray(constant_array(layer.sinks), np.float32).reshape(-1)
    return shared.constant(sinks, f"sinks/{layer.sinks.name}")


def _full(shared: Emitter, name: str, shape: tuple[int, ...], number: float) -> ir.Value:
    return shared.constant(np.full(shape, number, np.float32), name)
