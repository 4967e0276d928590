"""Small paged models that need no rewrite: engine I/O and nodes of the contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from paged_trt.plugins import tensors
from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE, OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.reference import paged_attention_function
from paged_trt.plugins.tensors import EngineSpec, LogitsMode

HIDDEN = 64
VOCAB = 32
OPSET = 23


def make_spec(
    *,
    kv_cache_dtype: DType = DType.FLOAT16,
    activation_dtype: DType = DType.FLOAT16,
    num_layers: int = 2,
    retained_pages: int = 3,
    value_head_dim: int = 16,
    rope: Rope = Rope.HALF_SPLIT,
) -> EngineSpec:
    """A spec of small layers with unlike heads, so that a swap of two sizes shows."""
    layer = AttentionSpec(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        value_head_dim=value_head_dim,
        softmax_scale=0.125,
        window=200,
        softcap=30.0,
        rope=rope,
        rotary_dim=0 if rope is Rope.NONE else 16,
    )
    return EngineSpec(
        pool=KvPoolSpec.plan(
            max_batch_size=4, max_kv_cache_capacity=300, retained_pages=retained_pages
        ),
        layers=(layer,) * num_layers,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
        vocab_size=VOCAB,
        logits_dtype=activation_dtype,
        logits_mode=LogitsMode.LAST,
        max_input_len=256,
        max_num_tokens=64,
        reads_position_ids=False,
    )


def make_model(spec: EngineSpec) -> onnx.ModelProto:
    """A paged model of `spec` with random weights."""
    graph = _Graph(spec)
    hidden = graph.node("Gather", [graph.weight("embedding", VOCAB, HIDDEN), "ids"])
    for index in range(len(spec.layers)):
        hidden = graph.layer(index, hidden)
    # Row offsets[n + 1] - 1 is the last token of sequence n.
    ends = graph.node("Slice", [tensors.QUERY_START_OFFSETS, graph.ints(1), graph.ints(2**31 - 1)])
    last = graph.node("Sub", [ends, graph.constant(np.array(1, np.int32))])
    rows = graph.node("Gather", [hidden, last])
    graph.node("MatMul", [rows, graph.weight("head", HIDDEN, VOCAB)], outputs=[tensors.LOGITS])
    return graph.model()


def write_model(model: onnx.ModelProto, directory: Path, *, external: bool = True) -> Path:
    """Save `model.onnx`, by default with every weight in `model.onnx.data`."""
    path = directory / "model.onnx"
    onnx.save_model(
        model,
        path,
        save_as_external_data=external,
        location="model.onnx.data",
        size_threshold=64,
    )
    return path


def paged_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The PagedAttention nodes, for a test to change."""
    return [node for node in model.graph.node if node.op_type == OP_TYPE]


class _Graph:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(7)
        shape = self.constant(np.array([-1], np.int64))
        self.nodes.append(helper.make_node("Reshape", [tensors.INPUT_IDS, shape], ["ids"]))

    def constant(self, array: np.ndarray) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def weight(self, name: str, *dims: int) -> str:
        array = self.random.normal(0, 0.1, dims).astype(self.spec.activation_dtype.numpy)
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def node(
        self, op_type: str, inputs: list[str], *, outputs: list[str] | None = None, **kwargs: object
    ) -> str:
        name = f"{op_type.lower()}_{len(self.nodes)}"
        outputs = outputs or [name]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **kwargs))
        return outputs[0]

    def heads(self, name: str, hidden: str, heads: int, dim: int) -> str:
        flat = self.node("MatMul", [hidden, self.weight(name, HIDDEN, heads * dim)])
        return self.node("Reshape", [flat, self.ints(-1, heads, dim)])

    def layer(self, index: int, hidden: str) -> str:
        spec, attention = self.spec, self.spec.layers[index]
        heads = (
            ("query", attention.num_q_heads, attention.head_dim),
            ("key", attention.num_kv_heads, attention.head_dim),
            ("value", attention.num_kv_heads, attention.value_head_dim),
        )
        pools = [tensors.key_pool_name(index), tensors.value_pool_name(index)]
        output = f"attention_{index}"
        self.nodes.append(
            helper.make_node(
                OP_TYPE,
                [
                    *(self.heads(f"{name}.{index}", hidden, *size) for name, *size in heads),
                    *pools,
                    *(tensors.PAGE_TABLE, tensors.QUERY_START_OFFSETS, tensors.PAST_LENS),
                    self.rope_table(attention),
                    self.scales(index, attention),
                    self.constant(np.full(attention.num_q_heads, -np.inf, np.float32)),
                ],
                [output, *map(tensors.pool_output_name, pools)],
                name=f"layer.{index}/attention",
                domain=OP_DOMAIN,
                overload=spec.kv_cache_dtype.value,
                **OperatorSpec(pool=spec.pool, attention=attention).to_attributes(),
            )
        )
        width = attention.num_q_heads * attention.value_head_dim
        flat = self.node("Reshape", [output, self.ints(-1, width)])
        projected = self.node("MatMul", [flat, self.weight(f"output.{index}", width, HIDDEN)])
        return self.node("Add", [hidden, projected])

    def rope_table(self, attention: AttentionSpec) -> str:
        if attention.rope is Rope.NONE:
            return self.constant(np.ones((1, 2, 1), np.float32))
        half = attention.rotary_dim // 2
        angles = np.outer(
            np.arange(self.spec.pool.max_kv_cache_capacity), 1e4 ** -(np.arange(half) / half)
        )
        return self.constant(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))

    def scales(self, index: int, attention: AttentionSpec) -> str:
        if self.spec.kv_cache_dtype.is_quantised:
            return tensors.kv_scales_name(index)
        return self.constant(np.ones((2, attention.num_kv_heads), np.float32))

    def model(self) -> onnx.ModelProto:
        values = [
            helper.make_tensor_value_info(tensor.name, tensor.dtype.onnx, tensor.dims)
            for tensor in self.spec.tensors()
        ]
        inputs = sum(tensor.role.is_input for tensor in self.spec.tensors())
        graph = helper.make_graph(
            self.nodes, "paged", values[:inputs], values[inputs:], self.initializers
        )
        return helper.make_model(
            graph,
            functions=[paged_attention_function(self.spec.kv_cache_dtype)],
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(OP_DOMAIN, 1)],
            ir_version=10,
        )


def with_pages(spec: EngineSpec, extra: int) -> EngineSpec:
    """`spec` with other retained pages."""
    pool = dataclasses.replace(spec.pool, num_pages=spec.pool.num_pages + extra)
    return dataclasses.replace(spec, pool=pool)
