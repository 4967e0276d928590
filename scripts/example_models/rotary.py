"""Rotary embedding, as tables of all positions and as the graph of the asked positions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from paged_trt.scripts.example_models.config import LlamaConfig
from paged_trt.scripts.example_models.graph import FloatArray, GraphWriter


def inverse_frequencies(config: LlamaConfig) -> FloatArray:
    """Angle per position of each rotated pair, `[head_dim / 2] float32`."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    return (config.rope_theta**-exponents).astype(np.float32)


def rotary_tables(writer: GraphWriter) -> tuple[ir.Value, ir.Value]:
    """Initializers `cos_cache` and `sin_cache`, `[max_positions, head_dim / 2]`."""
    positions = np.arange(writer.config.max_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(writer.config))
    return (
        writer.table("cos_cache", np.cos(angles), writer.element_type),
        writer.table("sin_cache", np.sin(angles), writer.element_type),
    )


def rotary_of_positions(
    writer: GraphWriter, batch: ir.Value, *, twice: bool
) -> tuple[ir.Value, ir.Value]:
    """Cosine and sine of the asked positions, computed in float32.

    Args:
        writer: the graph under construction.
        batch: batch size, `[1] int64`.
        twice: give `[batch, seq, head_dim]`, each pair's angle in both halves, instead of
            `[batch, seq, head_dim / 2]`.
    """
    scope = "/model/rotary_emb"
    frequencies = writer.table(
        "model.rotary_emb.inv_freq",
        inverse_frequencies(writer.config)[None, :, None],
        ir.DataType.FLOAT,
    )
    shape = writer.op(
        "Concat",
        [batch, writer.integers([1]), writer.integers([1])],
        f"{scope}/Concat",
        {"axis": 0},
    )
    frequencies = writer.op("Expand", [frequencies, shape], f"{scope}/Expand")
    positions = writer.op(
        "Unsqueeze", [writer.input("position_ids"), writer.integers([1])], f"{scope}/Unsqueeze"
    )
    positions = writer.op("Cast", [positions], f"{scope}/Cast", {"to": ir.DataType.FLOAT})
    angles = writer.op("MatMul", [frequencies, positions], f"{scope}/MatMul")
    angles = writer.op("Transpose", [angles], f"{scope}/Transpose", {"perm": [0, 2, 1]})
    if twice:
        angles = writer.op("Concat", [angles, angles], f"{scope}/Concat_1", {"axis": -1})
    results = []
    for function in ("Cos", "Sin"):
        value = writer.op(function, [angles], f"{scope}/{function}")
        results.append(
            writer.op("Cast", [value], f"{scope}/Cast_{function}", {"to": writer.element_type})
        )
    return results[0], results[1]


def rotate_by_primitives(
    writer: GraphWriter, value: ir.Value, cos: ir.Value, sin: ir.Value, scope: str
) -> ir.Value:
    """`value * cos + rotate_half(value) * sin` in primitive nodes.

    Args:
        writer: the graph under construction.
        value: `[batch, heads, seq, head_dim]`.
        cos: `[batch, 1, seq, head_dim]`.
        sin: likewise.
        scope: prefix of the node names.
    """
    half, axis = writer.config.head_dim // 2, writer.integers([3])
    ends = np.iinfo(np.int64).max
    first = writer.op(
        "Slice", [value, writer.integers([0]), writer.integers([half]), axis], f"{scope}/Slice"
    )
    second = writer.op(
        "Slice", [value, writer.integers([half]), writer.integers([ends]), axis], f"{scope}/Slice_1"
    )
    negated = writer.op("Neg", [second], f"{scope}/Neg")
    turned = writer.op("Concat", [negated, first], f"{scope}/Concat", {"axis": -1})
    straight = writer.op("Mul", [value, cos], f"{scope}/Mul")
    crossed = writer.op("Mul", [turned, sin], f"{scope}/Mul_1")
    return writer.op("Add", [straight, crossed], f"{scope}/Add")
