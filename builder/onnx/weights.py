"""Weights that TensorRT cannot read, refused by name before anything is rewritten.

TensorRT takes weight-only quantisation as DequantizeLinear nodes of signed codes around zero: INT8
with one scale per tensor or column, INT8 and INT4 with one scale per block of rows. Its parsers
refuse unsigned codes and zero points other than 0 (TensorRT-RTX 1.6.1 and 1.7.1).
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from paged_trt.builder.onnx.graph import constant_array, node_name, operand, value_name
from paged_trt.plugins.errors import OnnxRewriteError

_RUNTIME_ONLY: Final = frozenset({"MatMulNBits", "QMoE", "GatherBlockQuantized"})
"""Operators of quantised weights that TensorRT's parsers leave to a plugin of onnxruntime."""
_UNSIGNED: Final = frozenset(
    {ir.DataType.UINT8, ir.DataType.UINT4, ir.DataType.UINT2, ir.DataType.UINT16}
)
_REMEDY: Final = (
    "quantise symmetrically to INT8 or INT4, with zero points of 0 or none; onnxruntime-genai does "
    "so with `--extra_options is_symmetric=true use_qdq=true`"
)


def require_readable_weights(graph: ir.Graph) -> None:
    """Refuse a graph whose weights no TensorRT reads.

    Raises:
        OnnxRewriteError: a node dequantises in a way that TensorRT does not; the message names it.
    """
    for node in graph:
        if node.domain == "com.microsoft" and node.op_type in _RUNTIME_ONLY:
            raise OnnxRewriteError(
                node_name(node),
                f"com.microsoft::{node.op_type} has no counterpart in TensorRT",
                "export weights as DequantizeLinear nodes: with onnxruntime-genai that is "
                "`--extra_options use_qdq=true`",
            )
        if node.op_type == "DequantizeLinear" and node.domain in {"", "com.microsoft"}:
            _check_dequantisation(node)


def _check_dequantisation(node: ir.Node) -> None:
    codes, zeros = operand(node, 0), operand(node, 2)
    if codes is not None and codes.dtype is not None and codes.dtype in _UNSIGNED:
        raise OnnxRewriteError(
            node_name(node),
            f"it dequantises {codes.dtype.name} codes (`{value_name(codes)}`), and TensorRT reads "
            "signed ones only",
            _REMEDY,
        )
    array = constant_array(zeros)
    if zeros is not None and (array is None or array.any()):
        raise OnnxRewriteError(
            node_name(node),
            f"its zero points `{value_name(zeros)}` are not all 0, and TensorRT takes no others",
            _REMEDY,
        )
