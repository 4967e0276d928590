"""The dialects of `com.microsoft::GroupQueryAttention`, as onnxruntime-genai writes them."""

from __future__ import annotations

import math

import onnx_ir as ir

from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.graph import GraphWriter
from paged_trt.scripts.example_models.rotary import rotary_tables

MICROSOFT = "com.microsoft"


class GroupQueryAttention:
    """Writes attention and normalisation of the two GQA dialects.

    Args:
        writer: the graph under construction; its inputs are declared.
    """

    def __init__(self, writer: GraphWriter) -> None:
        self._writer = writer
        self._cos, self._sin = rotary_tables(writer)
        mask, scope = writer.input("attention_mask"), "/model/attn_mask_reformat/attn_mask_subgraph"
        to_int32 = {"to": ir.DataType.INT32}
        total = writer.op(
            "ReduceSum", [mask, writer.integers([1])], f"{scope}/ReduceSum", {"keepdims": 0}
        )
        last = writer.op("Sub", [total, writer.integers([1])], f"{scope}/Sub")
        self._last_index = writer.op("Cast", [last], f"{scope}/Sub/Cast", to_int32)
        shape = writer.op("Shape", [mask], f"{scope}/Shape")
        longest = writer.op("Gather", [shape, writer.integers(1)], f"{scope}/Gather", {"axis": 0})
        self._total_length = writer.op("Cast", [longest], f"{scope}/Gather/Cast", to_int32)

    def add_and_norm(
        self, hidden: ir.Value, branch: ir.Value | None, *, weight: str, scope: str
    ) -> tuple[ir.Value, ir.Value]:
        """Adds a residual branch and normalises; returns the sum and the normalised sum."""
        writer, scale = self._writer, self._writer.weight(weight)
        epsilon = writer.config.norm_epsilon
        if branch is None:
            attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
            normed = writer.op(
                "SimplifiedLayerNormalization", [hidden, scale], f"{scope}/LayerNorm", attributes
            )
            return hidden, normed
        outputs = writer.op_many(
            "SkipSimplifiedLayerNormalization",
            [hidden, branch, scale],
            f"{scope}/SkipLayerNorm",
            {"epsilon": epsilon},
            domain=MICROSOFT,
            num_outputs=4,
        )
        # Outputs 1 and 2 are statistics of training; an empty name is ONNX for "not wanted".
        outputs[1].name = outputs[2].name = ""
        return outputs[3], outputs[0]

    def attend(self, layer: int, normed: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Attention of one layer without its output projection.

        Returns:
            `[batch, seq, num_heads * head_dim]` and the present key and value,
            `[batch, num_kv_heads, total, head_dim]`.
        """
        writer, config = self._writer, self._writer.config
        is_packed = writer.dialect is Dialect.GQA
        attributes: dict[str, object] = {
            "num_heads": config.num_heads,
            "kv_num_heads": config.num_kv_heads,
            "scale": 1 / math.sqrt(config.head_dim),
            "local_window_size": -1 if config.window is None else config.window,
            "softcap": config.softcap or 0.0,
            "do_rotary": int(is_packed),
            "rotary_interleaved": 0,
        }
        queries = self._packed(layer, normed) if is_packed else self._split(layer, normed)
        operands = [
            *queries,
            writer.input(f"past_key_values.{layer}.key"),
            writer.input(f"past_key_values.{layer}.value"),
            self._last_index,
            self._total_length,
        ]
        if is_packed:
            operands += [self._cos, self._sin]
        output, key, value = writer.op_many(
            "GroupQueryAttention",
            operands,
            f"/model/layers.{layer}/attn/GroupQueryAttention",
            attributes,
            domain=MICROSOFT,
            num_outputs=3,
        )
        return output, key, value

    def _packed(self, layer: int, normed: ir.Value) -> list[ir.Value | None]:
        """Packed QKV `[batch, seq, (num_heads + 2 * num_kv_heads) * head_dim]` and two holes."""
        writer, prefix = self._writer, f"model.layers.{layer}.self_attn"
        weight = writer.weight(
            *(f"{prefix}.{letter}_proj.weight" for letter in "qkv"),
            transposed=True,
            name=f"model.layers.{layer}.attn.qkv_proj.MatMul.weight",
        )
        name = f"/model/layers.{layer}/attn/qkv_proj/MatMul"
        return [writer.op("MatMul", [normed, weight], name), None, None]

    def _split(self, layer: int, normed: ir.Value) -> list[ir.Value | None]:
        """Rotated query and key, and value, each `[batch, seq, heads * head_dim]`."""
        writer, scope = self._writer, f"/model/layers.{layer}/attn"
        results: list[ir.Value | None] = []
        for letter in "qkv":
            weight = writer.weight(
                f"model.layers.{layer}.self_attn.{letter}_proj.weight", transposed=True
            )
            value = writer.op("MatMul", [normed, weight], f"{scope}/{letter}_proj/MatMul")
            if letter != "v":
                value = writer.op(
                    "RotaryEmbedding",
                    [value, writer.input("position_ids"), self._cos, self._sin],
                    f"{scope}/{letter}_rotary/RotaryEmbedding",
                    {"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0},
                    domain=MICROSOFT,
                )
            results.append(value)
        return results
