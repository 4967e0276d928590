"""Dialect: models that hold paged_trt PagedAttention nodes already.

Exporters that register PagedAttention write them, and so does the rewrite. The node is checked
against the shapes of its inputs; what belongs to the pool is set again for the engine.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.facts import LayerMatch, Layout, PositionLimit
from paged_trt.builder.onnx.graph import (
    NodeSchema,
    attribute,
    constant_array,
    node_name,
    static_dim,
    value_name,
)
from paged_trt.builder.onnx.probe import Probe
from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec, Rope
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.plugins.fields import (
    FLOAT_ATTRIBUTES,
    INT_ATTRIBUTES,
    OP_DOMAIN,
    OP_TYPE,
    OP_VERSION,
)
from paged_trt.plugins.reference import INPUT_NAMES, OUTPUT_NAMES
from paged_trt.plugins.tensors import PAGE_TABLE, PAST_LENS, QUERY_START_OFFSETS

STEP_INPUTS: Final = (PAGE_TABLE, QUERY_START_OFFSETS, PAST_LENS)
SCHEMA: Final = NodeSchema(
    handled=frozenset({*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES}),
    neutral={"plugin_version": (OP_VERSION,), "plugin_namespace": (OP_DOMAIN,)},
    inputs=INPUT_NAMES,
    refused_inputs={},
    outputs=OUTPUT_NAMES,
)
_NEEDED: Final = ("num_q_heads", "num_kv_heads", "head_dim", "value_head_dim", "softmax_scale")
_REMEDY: Final = "write the node as the op's contract says"


def is_match(node: ir.Node) -> bool:
    """Whether `node` is attention of this dialect."""
    return node.domain == OP_DOMAIN and node.op_type == OP_TYPE


def match(node: ir.Node, probe: Probe) -> tuple[LayerMatch, tuple[PositionLimit, ...]]:
    """Read one node.

    Args:
        node: a node for which `is_match` holds.
        probe: not needed here.

    Returns:
        The layer, and the positions that its rope table reaches.

    Raises:
        OnnxRewriteError: an attribute or input is missing, unknown or contradicts a shape.
    """
    SCHEMA.check(node)
    missing = [name for name in _NEEDED if name not in node.attributes]
    if missing:
        raise OnnxRewriteError(node_name(node), f"attribute `{missing[0]}` is missing", _REMEDY)
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != len(INPUT_NAMES) or len(node.outputs) != len(OUTPUT_NAMES):
        raise OnnxRewriteError(
            node_name(node),
            f"it has {len(inputs)} inputs and {len(node.outputs)} outputs, "
            f"not {len(INPUT_NAMES)} and {len(OUTPUT_NAMES)}",
            _REMEDY,
        )
    attention = AttentionSpec(
        num_q_heads=int(attribute(node, "num_q_heads", 0)),
        num_kv_heads=int(attribute(node, "num_kv_heads", 0)),
        head_dim=int(attribute(node, "head_dim", 0)),
        value_head_dim=int(attribute(node, "value_head_dim", 0)),
        softmax_scale=float(attribute(node, "softmax_scale", 0.0)),
        window=int(attribute(node, "window", FULL_WINDOW)),
        softcap=float(attribute(node, "softcap", 0.0)),
        rope=_rope(node),
        rotary_dim=int(attribute(node, "rotary_dim", 0)),
    )
    _check_shapes(node, inputs, attention)
    _check_sources(node, inputs)
    has_rope = attention.rope is not Rope.NONE
    found = LayerMatch(
        node=node,
        attention=attention,
        layout=Layout.TOKENS,
        query=inputs[0],
        key=inputs[1],
        value=inputs[2],
        caches=(inputs[3], inputs[4]),
        presents=(node.outputs[1], node.outputs[2]),
        rope_tables=(inputs[8],) if has_rope else (),
        sinks=inputs[10],
    )
    limit = PositionLimit(name=value_name(inputs[8]), positions=static_dim(inputs[8], 0) or 0)
    return found, (limit,) if has_rope else ()


def _rope(node: ir.Node) -> Rope:
    try:
        return Rope(attribute(node, "rope", 0))
    except ValueError:
        raise OnnxRewriteError(
            node_name(node), f"`rope` is {attribute(node, 'rope', 0)}, not 0, 1 or 2", _REMEDY
        ) from None


def _check_shapes(node: ir.Node, inputs: list[ir.Value], attention: AttentionSpec) -> None:
    kv_heads = attention.num_kv_heads
    expected: dict[int, tuple[int | None, ...]] = {
        0: (None, attention.num_q_heads, attention.head_dim),
        1: (None, kv_heads, attention.head_dim),
        2: (None, kv_heads, attention.value_head_dim),
        3: (None, kv_heads, None, attention.head_dim),
        4: (None, kv_heads, None, attention.value_head_dim),
        9: (2, kv_heads),
        10: (attention.num_q_heads,),
    }
    if attention.rope is not Rope.NONE:
        expected[8] = (None, 2, attention.rotary_dim // 2)
    for index, dims in expected.items():
        shape = inputs[index].shape
        if shape is None:
            continue
        wrong = len(shape) != len(dims) or any(
            isinstance(found, int) and wanted not in {None, found}
            for found, wanted in zip(shape, dims, strict=True)
        )
        if wrong:
            wanted_text = ", ".join("?" if dim is None else str(dim) for dim in dims)
            raise OnnxRewriteError(
                node_name(node),
                f"input `{INPUT_NAMES[index]}` has the shape {shape}, and the attributes say "
                f"[{wanted_text}]",
                _REMEDY,
            )


def _check_sources(node: ir.Node, inputs: list[ir.Value]) -> None:
    for index in (3, 4):
        if not inputs[index].is_graph_input():
            raise OnnxRewriteError(
                node_name(node), f"its `{INPUT_NAMES[index]}` is no graph input", _REMEDY
            )
    for index, name in zip((5, 6, 7), STEP_INPUTS, strict=True):
        if not inputs[index].is_graph_input() or inputs[index].name != name:
            raise OnnxRewriteError(
                node_name(node), f"input {index} is not the graph input `{name}`", _REMEDY
            )
    scales = constant_array(inputs[9])
    if not inputs[9].is_graph_input() and (scales is None or not (scales == 1).all()):
        raise OnnxRewriteError(
            node_name(node),
            "its `kv_scales` are neither a graph input nor ones",
            "pass the scales with `--kv-scales`",
        )
    for index in (8, 10):
        if constant_array(inputs[index]) is None:
            raise OnnxRewriteError(
                node_name(node), f"its `{INPUT_NAMES[index]}` is no constant", _REMEDY
            )
