"""Writes a dense (not paged) Llama as the ONNX file that an exporter would write.

The files are inputs of Paged TRT: one model in several dialects, made without torch.

Letters of the shapes: batch, seq (new tokens), past, total = past + seq.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.example_models.attention import OnnxAttention
from paged_trt.scripts.example_models.config import Dialect, LlamaConfig
from paged_trt.scripts.example_models.graph import FloatArray, GraphWriter
from paged_trt.scripts.example_models.group_query import GroupQueryAttention

WEIGHT_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def write_llama(
    path: Path,
    config: LlamaConfig,
    weights: Mapping[str, FloatArray],
    *,
    dialect: Dialect,
    dtype: DType = DType.FLOAT16,
) -> None:
    """Writes `path` and, beside it, its weights as `<path>.data`.

    Args:
        path: the file to write, such as `model.onnx`; its folder exists.
        config: shape of the model.
        weights: float arrays by the names and shapes of `config.weight_shapes()`.
        dialect: how the graph is spelt.
        dtype: type of weights, activations and cache.

    Raises:
        ConfigError: a weight is missing or misshapen, or `dtype` is no float type.
    """
    model = make_llama(config, weights, dialect=dialect, dtype=dtype)
    # Small constants stay in the file, so that tools can read shapes without the data.
    ir.save(model, path, external_data=f"{path.name}.data", size_threshold_bytes=1024)


def make_llama(
    config: LlamaConfig,
    weights: Mapping[str, FloatArray],
    *,
    dialect: Dialect,
    dtype: DType = DType.FLOAT16,
) -> ir.Model:
    """The model of `write_llama`, whose weights load when they are asked for."""
    if dtype not in WEIGHT_DTYPES:
        names = ", ".join(sorted(f"`{each.value}`" for each in WEIGHT_DTYPES))
        raise ConfigError(f"weights cannot be stored as `{dtype.value}`; pass one of {names}")
    writer = GraphWriter(config, weights, dialect=dialect, dtype=dtype)
    _declare_inputs(writer)
    presents, logits = _write_decoder(writer)
    writer.add_output(logits, "logits", ["batch_size", "sequence_length", config.vocab_size])
    cache: list[int | str] = [
        "batch_size",
        config.num_kv_heads,
        "total_sequence_length",
        config.head_dim,
    ]
    for layer, present in enumerate(presents):
        for part, value in zip(("key", "value"), present, strict=True):
            writer.add_output(value, f"present.{layer}.{part}", cache)
    model = ir.Model(
        writer.graph, ir_version=dialect.ir_version, producer_name="paged_trt.example_models"
    )
    # Exporters annotate intermediate values; a rewriter must cope with that.
    ShapeInferencePass(strict_mode=False)(model)
    return model


def _declare_inputs(writer: GraphWriter) -> None:
    tokens = ["batch_size", "sequence_length"]
    writer.add_input("input_ids", tokens, ir.DataType.INT64)
    writer.add_input("attention_mask", ["batch_size", "total_sequence_length"], ir.DataType.INT64)
    if writer.dialect.has_position_ids:
        writer.add_input("position_ids", tokens, ir.DataType.INT64)
    config = writer.config
    cache: list[int | str] = [
        "batch_size",
        config.num_kv_heads,
        "past_sequence_length",
        config.head_dim,
    ]
    for layer in range(config.num_layers):
        for part in ("key", "value"):
            writer.add_input(f"past_key_values.{layer}.{part}", cache, writer.element_type)


def _write_decoder(writer: GraphWriter) -> tuple[list[tuple[ir.Value, ir.Value]], ir.Value]:
    """All layers; returns present key and value of each, and the logits."""
    style = (GroupQueryAttention if writer.dialect.is_gqa else OnnxAttention)(writer)
    table = writer.weight("model.embed_tokens.weight")
    hidden = writer.op("Gather", [table, writer.input("input_ids")], "/model/embed_tokens/Gather")
    branch: ir.Value | None = None
    presents = []
    for layer in range(writer.config.num_layers):
        prefix, scope = f"model.layers.{layer}", f"/model/layers.{layer}"
        hidden, normed = style.add_and_norm(
            hidden,
            branch,
            weight=f"{prefix}.input_layernorm.weight",
            scope=f"{scope}/input_layernorm",
        )
        output, key, value = style.attend(layer, normed)
        presents.append((key, value))
        branch = _linear(writer, output, f"{prefix}.self_attn.o_proj", f"{scope}/attn/o_proj")
        hidden, normed = style.add_and_norm(
            hidden,
            branch,
            weight=f"{prefix}.post_attention_layernorm.weight",
            scope=f"{scope}/post_attention_layernorm",
        )
        branch = _write_mlp(writer, layer, normed)
    _, normed = style.add_and_norm(hidden, branch, weight="model.norm.weight", scope="/model/norm")
    return presents, _write_head(writer, normed)


def _write_mlp(writer: GraphWriter, layer: int, normed: ir.Value) -> ir.Value:
    """`down(silu(gate(x)) * up(x))`."""
    prefix, scope = f"model.layers.{layer}.mlp", f"/model/layers.{layer}/mlp"
    gate = _linear(writer, normed, f"{prefix}.gate_proj", f"{scope}/gate_proj")
    up = _linear(writer, normed, f"{prefix}.up_proj", f"{scope}/up_proj")
    sigmoid = writer.op("Sigmoid", [gate], f"{scope}/act_fn/Sigmoid")
    active = writer.op("Mul", [gate, sigmoid], f"{scope}/act_fn/Mul")
    product = writer.op("Mul", [active, up], f"{scope}/Mul")
    return _linear(writer, product, f"{prefix}.down_proj", f"{scope}/down_proj")


def _write_head(writer: GraphWriter, normed: ir.Value) -> ir.Value:
    """Logits `[batch, seq, vocab_size]`; tied embeddings are stored once and transposed here."""
    if not writer.config.tie_embeddings:
        return _linear(writer, normed, "lm_head", "/lm_head")
    table = writer.weight("model.embed_tokens.weight")
    transposed = writer.op("Transpose", [table], "/lm_head/Transpose", {"perm": [1, 0]})
    return writer.op("MatMul", [normed, transposed], "/lm_head/MatMul")


def _linear(writer: GraphWriter, value: ir.Value, module: str, scope: str) -> ir.Value:
    weight = writer.weight(f"{module}.weight", transposed=True)
    return writer.op("MatMul", [value, weight], f"{scope}/MatMul")
