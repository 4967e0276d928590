"""Gives RMSNormalization nodes one type.

torch writes a float16 input beside a float32 scale, which the operator's schema allows, with the
scale's type for the result. onnxruntime 1.32 spells the operator out, and multiplies the two.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.graph import Emitter, node_name

_NORMS: Final = frozenset({("", "RMSNormalization")})


def unify_norm_types(graph: ir.Graph) -> None:
    """Cast the input of each norm to the type of its scale; the graph has to be sorted afterwards.

    Args:
        graph: the graph to change. Nodes whose types are not known stay.
    """
    for node in list(graph):
        if (node.domain, node.op_type) not in _NORMS or len(node.inputs) < 2:
            continue
        value, scale = node.inputs[:2]
        if value is None or scale is None or None in (value.dtype, scale.dtype):
            continue
        if value.dtype is not scale.dtype:
            emit = Emitter(graph, node_name(node))
            attributes = {"to": scale.dtype}
            node.replace_input_with(
                0, emit.op("Cast", [value], "Cast", attributes, dtype=scale.dtype)
            )
