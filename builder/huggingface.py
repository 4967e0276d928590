"""Exports a model of transformers straight to PagedAttention nodes, with no rewrite.

    T packed tokens    H query heads    K key/value heads    D head size

Everything that a model hands to its attention is seen (`huggingface_attention`), whatever an ONNX
operator has a place for. A first run of the model records it, a second one is exported.

torch, transformers and onnxscript are needed by the call, not by this module.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from paged_trt.builder.huggingface_attention import State, attention_of, package, record
from paged_trt.builder.onnx.norm_types import unify_norm_types
from paged_trt.builder.onnx.postconditions import require_paged
from paged_trt.builder.onnx.save import save_model
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE, OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.reference import OPSET, paged_attention_function
from paged_trt.plugins.tensors import LOGITS, POSITION_IDS, EngineSpec, LogitsMode, TensorSpec

_EXPORT_OPSET: Final = 23


def export_huggingface(
    model: Any,
    directory: Path,
    *,
    max_batch_size: int = 1,
    max_kv_cache_capacity: int | None = None,
) -> Path:
    """Write `model` as a paged ONNX model that `paged-trt build` and onnxruntime take.

    Args:
        model: a causal language model of transformers, float16 or bfloat16, on the CPU. Its
            attention implementation is another one during the call.
        directory: an existing folder.
        max_batch_size: sequences of the pool in the file; a build sets its own.
        max_kv_cache_capacity: tokens of one sequence in it; None takes the model's positions.

    Returns:
        Path of `model.onnx` in `directory`.

    Raises:
        UnsupportedError: the model's attention says something that PagedAttention cannot do,
            does not go through AttentionInterface, or a package is missing.
        ConfigError: a limit is invalid, or the model is of another type.
    """
    package("onnxscript")  # torch's exporter needs it, and says so late
    state = State()
    with attention_of(model, state), package("torch").no_grad():
        record(model, state)
        spec = _spec(
            model,
            [layer.attention for layer in state.layers],
            max_batch_size=max_batch_size,
            max_kv_cache_capacity=max_kv_cache_capacity,
        )
        exported = _export(model, state, spec)
    spec = _finish(exported, spec)
    require_paged(exported, spec)
    return save_model(exported, directory)


def _spec(
    model: Any,
    layers: Sequence[AttentionSpec],
    *,
    max_batch_size: int,
    max_kv_cache_capacity: int | None,
) -> EngineSpec:
    name = str(model.dtype).removeprefix("torch.")
    if name not in {dtype.value for dtype in ACTIVATION_DTYPES}:
        raise ConfigError(f"the model has to be float16 or bfloat16, got {name}; convert it first")
    dtype = DType(name)
    capacity = max_kv_cache_capacity
    if capacity is None:
        capacity = int(model.config.max_position_embeddings)
    return EngineSpec(
        pool=KvPoolSpec.plan(
            max_batch_size=max_batch_size,
            max_kv_cache_capacity=capacity,
            retained_pages=None,
            kv_pool_pages=None,
        ),
        layers=tuple(layers),
        activation_dtype=dtype,
        kv_cache_dtype=dtype,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        logits_dtype=dtype,
        logits_mode=LogitsMode.ALL,
        max_input_len=capacity,
        max_num_tokens=capacity,
        reads_position_ids=True,
    )


def _export(model: Any, state: State, spec: EngineSpec) -> ir.Model:
    torch = package("torch")
    tensors = spec.tensors()
    inputs = [tensor for tensor in tensors if tensor.role.is_input]
    symbols = {dim for tensor in inputs for dim in tensor.dims if isinstance(dim, str)}
    dims = {name: torch.export.Dim(name) for name in sorted(symbols)}
    shapes = [
        {axis: dims[dim] for axis, dim in enumerate(tensor.dims) if isinstance(dim, str)}
        for tensor in inputs
    ]
    # Unlike sizes, so that no two symbols are taken for one; none is 0 or 1.
    sizes = dict(zip(sorted(symbols), (2, 3, 7, 4), strict=False))
    module = _paged_module(model, state, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            tuple(_example(tensor, sizes) for tensor in inputs),
            input_names=[tensor.name for tensor in inputs],
            output_names=[tensor.name for tensor in tensors if not tensor.role.is_input],
            dynamic_shapes=(tuple(shapes),),
            dynamo=True,
            opset_version=_EXPORT_OPSET,
            verbose=False,
        )
    exported: ir.Model = program.model
    return exported


def _example(tensor: TensorSpec, sizes: dict[str, int]) -> Any:
    torch = package("torch")
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.dims]
    return torch.zeros(shape, dtype=getattr(torch, tensor.dtype.value))


def _paged_module(model: Any, state: State, spec: EngineSpec) -> Any:
    """The module that is exported: the tensor table in, logits and pools out."""
    torch = package("torch")
    num_step_inputs = sum(tensor.role.is_input for tensor in spec.tensors()) - len(spec.pools())
    module = torch.nn.Module()
    module.model = model
    module.register_buffer("no_rope", torch.zeros(1, 2, 1))
    for index, layer in enumerate(state.layers):
        heads = layer.attention.num_q_heads
        sinks = torch.full((heads,), -torch.inf) if layer.sinks is None else layer.sinks
        module.register_buffer(f"sinks_{index}", sinks)
        module.register_buffer(f"unit_scales_{index}", torch.ones(2, layer.attention.num_kv_heads))

    def forward(*tensors: Any) -> tuple[Any, ...]:
        input_ids, position_ids, *lengths = tensors[:num_step_inputs]
        pools = list(tensors[num_step_inputs:])

        def call(index: int, query: Any, key: Any, value: Any) -> Any:
            own = slice(2 * index, 2 * index + 2)
            operands = (query, key, value)
            output, *updated = _node(module, state, spec, index, operands, pools[own], lengths)
            pools[own] = updated
            return output.unsqueeze(0)

        state.call = call
        try:
            result = model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        finally:
            state.call = None
        return (result.logits, *pools)

    module.forward = forward
    return module


def _node(
    module: Any,
    state: State,
    spec: EngineSpec,
    index: int,
    heads_first: Sequence[Any],
    pools: Sequence[Any],
    lengths: Sequence[Any],
) -> Any:
    """One PagedAttention node; `heads_first` are `[1, heads, T, size]`."""
    torch = package("torch")
    attention = state.layers[index].attention
    tokens = [each[0].transpose(0, 1) for each in heads_first]
    operands = (
        *tokens,
        *pools,
        *lengths,
        module.no_rope,
        getattr(module, f"unit_scales_{index}"),
        getattr(module, f"sinks_{index}"),
    )
    shape = (tokens[0].shape[0], attention.num_q_heads, attention.value_head_dim)
    return torch.onnx.ops.symbolic_multi_out(
        f"{OP_DOMAIN}::{OP_TYPE}",
        operands,
        OperatorSpec(pool=spec.pool, attention=attention).to_attributes(),
        dtypes=(tokens[0].dtype, *(pool.dtype for pool in pools)),
        shapes=(shape, *(pool.shape for pool in pools)),
        version=OPSET,
    )


def _finish(model: ir.Model, spec: EngineSpec) -> EngineSpec:
    """Attach the specification; returns the spec of what the model really reads."""
    function: Any = ir.from_proto(paged_attention_function(spec.kv_cache_dtype))
    function.opset_imports[""] = model.opset_imports[""]
    model.functions[function.identifier()] = function
    model.opset_imports[OP_DOMAIN] = OPSET
    unify_norm_types(model.graph)
    model.graph.sort()
    for index, node in enumerate(node for node in model.graph if node.op_type == OP_TYPE):
        node.overload, node.name = function.overload, f"/layers.{index}/{OP_TYPE}"
    positions = next(each for each in model.graph.inputs if each.name == POSITION_IDS)
    if not positions.uses():
        model.graph.inputs.remove(positions)
        spec = dataclasses.replace(spec, reads_position_ids=False)
    declared = {tensor.name: tensor for tensor in spec.tensors()}
    for value in (*model.graph.inputs, *model.graph.outputs):
        tensor = declared[str(value.name)]
        value.shape = ir.Shape(tensor.dims)
        if value.name == LOGITS and value.dtype is not None:
            found = DType.from_onnx(value.dtype.value)
            spec = dataclasses.replace(spec, logits_dtype=found)
    return spec
