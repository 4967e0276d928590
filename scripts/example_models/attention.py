"""The dialects of ai.onnx `Attention`: boolean mask, KV cache, rotary embedding."""

from __future__ import annotations

import math

import onnx_ir as ir

from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.graph import GraphWriter
from paged_trt.scripts.example_models.rotary import (
    rotary_of_positions,
    rotary_tables,
    rotate_by_primitives,
)


class OnnxAttention:
    """Writes attention and normalisation of the ai.onnx dialects.

    Args:
        writer: the graph under construction; its inputs are declared.
    """

    def __init__(self, writer: GraphWriter) -> None:
        self._writer = writer
        key = writer.input("past_key_values.0.key")
        self._batch = writer.op("Shape", [key], "/model/Shape", {"start": 0, "end": 1})
        past = writer.op("Shape", [key], "/model/Shape_1", {"start": 2, "end": 3})
        self._seq = writer.op(
            "Shape", [writer.input("input_ids")], "/model/Shape_2", {"start": 1, "end": 2}
        )
        self._total = writer.op("Add", [past, self._seq], "/model/Add")
        self._mask = self._write_mask(past)
        if writer.dialect is Dialect.ATTENTION23_PAST:
            self._cos, self._sin = rotary_tables(writer)
        else:
            twice = writer.dialect is Dialect.ATTENTION24_CONCAT
            self._cos, self._sin = rotary_of_positions(writer, self._batch, twice=twice)
            if twice:
                axis = writer.integers([1])
                scope = "/model/rotary_emb/Unsqueeze"
                self._cos = writer.op("Unsqueeze", [self._cos, axis], f"{scope}_cos")
                self._sin = writer.op("Unsqueeze", [self._sin, axis], f"{scope}_sin")

    def add_and_norm(
        self, hidden: ir.Value, branch: ir.Value | None, *, weight: str, scope: str
    ) -> tuple[ir.Value, ir.Value]:
        """Adds a residual branch and normalises; returns the sum and the normalised sum."""
        writer = self._writer
        if branch is not None:
            hidden = writer.op("Add", [hidden, branch], f"{scope}/residual/Add")
        scale = writer.weight(weight)
        epsilon = writer.config.norm_epsilon
        if writer.dialect is not Dialect.ATTENTION24_CONCAT:
            attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
            name = f"{scope}/RMSNormalization"
            return hidden, writer.op("RMSNormalization", [hidden, scale], name, attributes)
        wide = writer.op("Cast", [hidden], f"{scope}/Cast", {"to": ir.DataType.FLOAT})
        two = writer.floating(2.0)
        small = writer.floating(epsilon)
        square = writer.op("Pow", [wide, two], f"{scope}/Pow")
        mean = writer.op(
            "ReduceMean", [square, writer.integers([-1])], f"{scope}/ReduceMean", {"keepdims": 1}
        )
        root = writer.op("Sqrt", [writer.op("Add", [mean, small], f"{scope}/Add")], f"{scope}/Sqrt")
        factor = writer.op("Reciprocal", [root], f"{scope}/Reciprocal")
        normed = writer.op("Mul", [wide, factor], f"{scope}/Mul")
        normed = writer.op("Cast", [normed], f"{scope}/Cast_1", {"to": writer.element_type})
        return hidden, writer.op("Mul", [scale, normed], f"{scope}/Mul_1")

    def attend(self, layer: int, normed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Attention of one layer without its output projection.

        Returns:
            `[batch, seq, num_heads * head_dim]` and the present key and value,
            `[batch, num_kv_heads, total, head_dim]`.
        """
        writer, config = self._writer, self._writer.config
        scope = f"/model/layers.{layer}/self_attn"
        query = self._rotate(self._project(layer, "q", normed), f"{scope}/q_rotary")
        key = self._rotate(self._project(layer, "k", normed), f"{scope}/k_rotary")
        value = self._project(layer, "v", normed)
        past = [writer.input(f"past_key_values.{layer}.{part}") for part in ("key", "value")]
        attributes: dict[str, object] = {"is_causal": 0, "scale": 1 / math.sqrt(config.head_dim)}
        if config.softcap is not None:
            attributes["softcap"] = config.softcap
        name = f"{scope}/Attention"
        if writer.dialect is Dialect.ATTENTION23_PAST:
            operands = [query, key, value, self._mask, *past]
            output, present_key, present_value = writer.op_many(
                "Attention", operands, name, attributes, num_outputs=3
            )
        else:
            present_key, present_value = (
                writer.op("Concat", [old, new], f"{scope}/{part}_cache/Concat", {"axis": -2})
                for old, new, part in zip(past, (key, value), ("key", "value"), strict=True)
            )
            operands = [
                query,
                self._repeat_heads(present_key, f"{scope}/repeat_key"),
                self._repeat_heads(present_value, f"{scope}/repeat_value"),
                self._mask,
            ]
            output = writer.op("Attention", operands, name, attributes)
        output = writer.op("Transpose", [output], f"{scope}/Transpose", {"perm": [0, 2, 1, 3]})
        return self._reshape(output, [-1], f"{scope}/Reshape"), present_key, present_value

    def _project(self, layer: int, letter: str, normed: ir.Value) -> ir.Value:
        """One of q, k, v as `[batch, heads, seq, head_dim]`."""
        writer = self._writer
        scope = f"/model/layers.{layer}/self_attn/{letter}_proj"
        weight = f"model.layers.{layer}.self_attn.{letter}_proj.weight"
        value = writer.op(
            "MatMul", [normed, writer.weight(weight, transposed=True)], f"{scope}/MatMul"
        )
        value = self._reshape(value, [-1, writer.config.head_dim], f"{scope}/Reshape")
        return writer.op("Transpose", [value], f"{scope}/Transpose", {"perm": [0, 2, 1, 3]})

    def _reshape(self, value: ir.Value, tail: list[int], name: str) -> ir.Value:
        """Reshapes to `[batch, seq, *tail]`."""
        writer = self._writer
        if writer.dialect is Dialect.ATTENTION23_PAST:
            return writer.op("Reshape", [value, writer.integers([0, 0, *tail])], name)
        shape = writer.op(
            "Concat", [self._batch, self._seq, writer.integers(tail)], f"{name}/Concat", {"axis": 0}
        )
        return writer.op("Reshape", [value, shape], name)

    def _rotate(self, value: ir.Value, scope: str) -> ir.Value:
        """Rotary embedding of `[batch, heads, seq, head_dim]`."""
        writer = self._writer
        if writer.dialect is Dialect.ATTENTION24_CONCAT:
            return rotate_by_primitives(writer, value, self._cos, self._sin, scope)
        operands = [value, self._cos, self._sin]
        if writer.dialect is Dialect.ATTENTION23_PAST:
            operands.append(writer.input("position_ids"))
        return writer.op("RotaryEmbedding", operands, f"{scope}/RotaryEmbedding")

    def _repeat_heads(self, value: ir.Value, scope: str) -> ir.Value:
        """Repeats KV heads: `[batch, num_kv_heads, ...]` to `[batch, num_heads, ...]`."""
        writer, config = self._writer, self._writer.config
        repeats = config.num_heads // config.num_kv_heads
        if repeats == 1:
            return value
        value = writer.op("Unsqueeze", [value, writer.integers([2])], f"{scope}/Unsqueeze")
        shape = writer.op(
            "Concat",
            [
                self._batch,
                writer.integers([config.num_kv_heads, repeats]),
                self._total,
                writer.integers([config.head_dim]),
            ],
            f"{scope}/Concat",
            {"axis": 0},
        )
        value = writer.op("Expand", [value, shape], f"{scope}/Expand")
        shape = writer.op(
            "Concat",
            [
                self._batch,
                writer.integers([config.num_heads]),
                self._total,
                writer.integers([config.head_dim]),
            ],
            f"{scope}/Concat_1",
            {"axis": 0},
        )
        return writer.op("Reshape", [value, shape], f"{scope}/Reshape")

    def _write_mask(self, past: ir.Value) -> ir.Value:
        """Causal AND window AND padding, `[batch, 1, seq, total] bool`; True is visible."""
        writer, scope = self._writer, "/model/mask"
        start = writer.op("Squeeze", [past], f"{scope}/Squeeze")
        end = writer.op("Squeeze", [self._total], f"{scope}/Squeeze_1")
        one = writer.integers(1)
        query = writer.op("Range", [start, end, one], f"{scope}/Range")
        query = writer.op("Unsqueeze", [query, writer.integers([0, 1, 3])], f"{scope}/Unsqueeze")
        key = writer.op("Range", [writer.integers(0), end, one], f"{scope}/Range_1")
        key = writer.op("Unsqueeze", [key, writer.integers([0, 1, 2])], f"{scope}/Unsqueeze_1")
        mask = writer.op("LessOrEqual", [key, query], f"{scope}/LessOrEqual")
        if writer.config.window is not None:
            oldest = writer.op(
                "Sub", [query, writer.integers(writer.config.window)], f"{scope}/window/Sub"
            )
            newer = writer.op("Greater", [key, oldest], f"{scope}/window/Greater")
            mask = writer.op("And", [mask, newer], f"{scope}/window/And")
        return writer.op("And", [mask, self._write_padding(key)], f"{scope}/And")

    def _write_padding(self, key: ir.Value) -> ir.Value:
        """`attention_mask` as `[batch, 1, 1, total] bool`."""
        writer, scope = self._writer, "/model/mask/padding"
        padding = writer.op(
            "Cast", [writer.input("attention_mask")], f"{scope}/Cast", {"to": ir.DataType.BOOL}
        )
        if writer.dialect is Dialect.ATTENTION23_PAST:
            return writer.op("Unsqueeze", [padding, writer.integers([1, 2])], f"{scope}/Unsqueeze")
        # torch exports the indexing `attention_mask[batch_index, key_index]`.
        size = writer.op("Squeeze", [self._batch], f"{scope}/Squeeze")
        rows = writer.op("Range", [writer.integers(0), size, writer.integers(1)], f"{scope}/Range")
        rows = writer.op("Unsqueeze", [rows, writer.integers([1, 2, 3])], f"{scope}/Unsqueeze")
        shape = writer.op(
            "Concat",
            [self._batch, writer.integers([1, 1]), self._total],
            f"{scope}/Concat",
            {"axis": 0},
        )
        pairs = []
        for index, each in enumerate((rows, key)):
            wide = writer.op("Expand", [each, shape], f"{scope}/Expand_{index}")
            pairs.append(
                writer.op(
                    "Unsqueeze", [wide, writer.integers([-1])], f"{scope}/Unsqueeze_pair_{index}"
                )
            )
        indices = writer.op("Concat", pairs, f"{scope}/Concat_1", {"axis": -1})
        return writer.op("GatherND", [padding, indices], f"{scope}/GatherND")
