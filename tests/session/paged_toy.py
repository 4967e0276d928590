"""A two-layer decoder written twice by hand: paged, and dense without any cache."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE, OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.reference import paged_attention_function
from paged_trt.plugins.tensors import EngineSpec, LogitsMode, attention_name, kv_scales_name
from paged_trt.runtime.reference_executor import ReferenceExecutor

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 32, 4, 2, 16, 96
POSITIONS = 512
Array = npt.NDArray[Any]


def make_spec(
    *,
    activation: DType = DType.FLOAT16,
    kv: DType | None = None,
    logits_mode: LogitsMode = LogitsMode.LAST,
    max_batch_size: int = 3,
    capacity: int = 384,
    retained_pages: int = 2,
    max_num_tokens: int = 320,
    windows: tuple[int, ...] = (FULL_WINDOW,) * LAYERS,
    greedy_in_engine: bool = False,
    layer_outputs: bool = False,
) -> EngineSpec:
    attention = AttentionSpec(
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        value_head_dim=HEAD_DIM,
        softmax_scale=HEAD_DIM**-0.5,
        rope=Rope.HALF_SPLIT,
        rotary_dim=HEAD_DIM,
    )
    return EngineSpec(
        pool=KvPoolSpec.plan(
            max_batch_size=max_batch_size,
            max_kv_cache_capacity=capacity,
            retained_pages=retained_pages,
        ),
        layers=tuple(dataclasses.replace(attention, window=each) for each in windows),
        activation_dtype=activation,
        kv_cache_dtype=kv or activation,
        vocab_size=VOCAB,
        logits_dtype=activation,
        logits_mode=logits_mode,
        max_input_len=min(capacity, 320),
        max_num_tokens=max_num_tokens,
        reads_position_ids=False,
        greedy_in_engine=greedy_in_engine,
        layer_outputs=layer_outputs,
    )


@functools.cache
def weights() -> dict[str, Array]:
    """float32 weights that bfloat16 and float16 hold exactly enough, by initializer name."""
    rng = np.random.default_rng(3)
    shapes = {"embedding": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}
    for layer in range(LAYERS):
        shapes[f"q.{layer}"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"k.{layer}"] = (HIDDEN, KV_HEADS * HEAD_DIM)
        shapes[f"v.{layer}"] = (HIDDEN, KV_HEADS * HEAD_DIM)
        shapes[f"o.{layer}"] = (HEADS * HEAD_DIM, HIDDEN)
    return {
        name: (rng.standard_normal(shape) * (1.0 if name == "embedding" else HIDDEN**-0.5))
        .astype(np.float32)
        for name, shape in shapes.items()
    }  # fmt: skip


def rope_table() -> Array:
    """`[POSITIONS, 2, HEAD_DIM / 2]` float32."""
    frequency = 10000.0 ** (-np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    angle = np.outer(np.arange(POSITIONS), frequency)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


class _Graph:
    def __init__(self, element: DType) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers = [
            numpy_helper.from_array(array.astype(element.numpy), name)
            for name, array in weights().items()
        ]

    def op(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], output, **attributes))
        return output

    def constant(self, name: str, values: Any, dtype: type = np.int64) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def model(
        self,
        inputs: list[onnx.ValueInfoProto],
        outputs: list[onnx.ValueInfoProto],
        functions: list[onnx.FunctionProto],
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "toy", inputs, outputs, initializer=self.initializers)
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid(OP_DOMAIN, 1)]
        model = helper.make_model(graph, functions=functions, opset_imports=opsets)
        model.ir_version = 11
        return model


def make_paged(spec: EngineSpec) -> onnx.ModelProto:
    graph = _Graph(spec.activation_dtype)
    graph.constant("rope", rope_table(), np.float32)
    graph.constant("sinks", np.full(HEADS, -np.inf), np.float32)
    graph.constant("ones", np.ones((2, KV_HEADS)), np.float32)
    graph.constant("first", [0])
    graph.constant("second", [1])
    graph.constant("end", [2**31])
    graph.constant("one", np.int32(1), np.int32)
    ids = graph.op("Squeeze", ["input_ids", "first"], "ids")
    hidden = graph.op("Gather", ["embedding", ids], "hidden")
    for layer in range(LAYERS):
        hidden = _paged_layer(graph, spec, layer, hidden)
    if spec.logits_mode is LogitsMode.LAST:
        graph.op("Slice", ["query_start_offsets", "second", "end", "first"], "ends")
        graph.op("Sub", ["ends", "one"], "last")
        hidden = graph.op("Gather", [hidden, "last"], "last_hidden")
        graph.op("MatMul", [hidden, "head"], "logits")
    else:
        graph.op("MatMul", [hidden, "head"], "rows")
        graph.op("Unsqueeze", ["rows", "first"], "logits")
    if spec.greedy_in_engine:
        graph.op("ArgMax", ["logits"], "next_tokens", axis=-1, keepdims=0)
    values = [
        helper.make_tensor_value_info(each.name, each.dtype.onnx, list(each.dims))
        for each in spec.tensors()
    ]
    num_inputs = sum(each.role.is_input for each in spec.tensors())
    function = paged_attention_function(spec.kv_cache_dtype)
    return graph.model(values[:num_inputs], values[num_inputs:], [function])


def _paged_layer(graph: _Graph, spec: EngineSpec, layer: int, hidden: str) -> str:
    parts = []
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        flat = graph.op("MatMul", [hidden, f"{name}.{layer}"], f"{name}_flat.{layer}")
        shape = graph.constant(f"{name}_shape.{layer}", [-1, heads, HEAD_DIM])
        parts.append(graph.op("Reshape", [flat, shape], f"{name}_heads.{layer}"))
    quantised = spec.kv_cache_dtype.is_quantised
    inputs = [
        *parts,
        f"key_pool.{layer}",
        f"value_pool.{layer}",
        "page_table",
        "query_start_offsets",
        "past_lens",
        "rope",
        kv_scales_name(layer) if quantised else "ones",
        "sinks",
    ]
    operator = OperatorSpec(pool=spec.pool, attention=spec.layers[layer])
    graph.nodes.append(
        helper.make_node(
            OP_TYPE,
            inputs,
            [attention_name(layer), f"key_pool_out.{layer}", f"value_pool_out.{layer}"],
            domain=OP_DOMAIN,
            overload=spec.kv_cache_dtype.value,
            **operator.to_attributes(),
        )
    )
    shape = graph.constant(f"flat_shape.{layer}", [-1, HEADS * HEAD_DIM])
    flat = graph.op("Reshape", [attention_name(layer), shape], f"flat.{layer}")
    projected = graph.op("MatMul", [flat, f"o.{layer}"], f"projected.{layer}")
    return graph.op("Add", [hidden, projected], f"hidden.{layer}")


def make_dense() -> onnx.ModelProto:
    """float32, standard operators only, the whole sequence each time."""
    graph = _Graph(DType.FLOAT32)
    graph.constant("cos", rope_table()[None, :, 0], np.float32)
    graph.constant("sin", rope_table()[None, :, 1], np.float32)
    hidden = graph.op("Gather", ["embedding", "input_ids"], "hidden")
    for layer in range(LAYERS):
        parts = {}
        for name in "qkv":
            parts[name] = graph.op("MatMul", [hidden, f"{name}.{layer}"], f"{name}_flat.{layer}")
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            inputs = [parts[name], "cos_rows", "sin_rows"]
            parts[name] = graph.op(
                "RotaryEmbedding", inputs, f"{name}_rotated.{layer}", num_heads=heads
            )
        attended = graph.op(
            "Attention",
            [parts["q"], parts["k"], parts["v"]],
            f"attended.{layer}",
            is_causal=1,
            q_num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        )
        projected = graph.op("MatMul", [attended, f"o.{layer}"], f"projected.{layer}")
        hidden = graph.op("Add", [hidden, projected], f"hidden.{layer}")
    graph.op("MatMul", [hidden, "head"], "logits")
    graph.constant("first", [0])
    graph.constant("second", [1])
    rows = [
        helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
        helper.make_node("Slice", ["cos", "first", "length", "second"], ["cos_rows"]),
        helper.make_node("Slice", ["sin", "first", "length", "second"], ["sin_rows"]),
    ]
    graph.nodes[:0] = rows
    value = helper.make_tensor_value_info
    return graph.model(
        [value("input_ids", TensorProto.INT64, [1, "length"])],
        [value("logits", TensorProto.FLOAT, [1, "length", VOCAB])],
        [],
    )


@functools.cache
def _dense_session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        make_dense().SerializeToString(), providers=["CPUExecutionProvider"]
    )


@functools.cache
def dense_greedy(prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], Array]:
    """Tokens, and logits `[count, VOCAB]` float32."""
    ids, rows = list(prompt), []
    for _ in range(count):
        feeds = {"input_ids": np.asarray([ids], np.int64)}
        row = _dense_session().run(["logits"], feeds)[0][0, -1]
        rows.append(row)
        ids.append(int(row.argmax()))
    return tuple(ids[len(prompt) :]), np.stack(rows)


def make_scales(spec: EngineSpec) -> dict[str, Array]:
    if not spec.kv_cache_dtype.is_quantised:
        return {}
    key, value = (0.04, 0.065) if spec.kv_cache_dtype is DType.INT8 else (0.02, 0.03)
    scales = np.asarray([[key, 1.1 * key], [value, 1.1 * value]], np.float32)
    return {kv_scales_name(layer): scales for layer in range(LAYERS)}


def open_toy(spec: EngineSpec, folder: Path) -> ReferenceExecutor:
    path = folder / "model.onnx"
    onnx.save(
        make_paged(spec),
        path,
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=1024,
    )
    return ReferenceExecutor(path, spec, kv_scales=make_scales(spec))


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    rng = np.random.default_rng([length, seed])
    tokens: list[int] = rng.integers(0, VOCAB, length).tolist()
    return tokens
