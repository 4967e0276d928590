"""The rewrite: a dense decoder becomes a paged one.

    requires   the facts of a survey of this very model, and a spec resolved from them
    call       the batch axis becomes 1 and the token axis holds the packed tokens of all
               sequences. Attention becomes PagedAttention on pools; every other node works token
               by token and stays. Inputs and outputs become those of the tensor table.
    ensures    see `postconditions`

The model is changed in place, and weights stay where they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from paged_trt.builder.onnx.dtype_convert import convert_dtype
from paged_trt.builder.onnx.facts import IndexKind, IndexValue, ModelFacts
from paged_trt.builder.onnx.graph import Emitter, node_name, replace_uses, value_name
from paged_trt.builder.onnx.layer import replace_layer
from paged_trt.builder.onnx.logits import gather_last_tokens
from paged_trt.builder.onnx.next_tokens import emit_next_tokens
from paged_trt.builder.onnx.norm_types import unify_norm_types
from paged_trt.builder.onnx.postconditions import require_paged
from paged_trt.plugins.errors import OnnxRewriteError, SpecMismatchError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE
from paged_trt.plugins.reference import OPSET, paged_attention_function
from paged_trt.plugins.tensors import (
    INPUT_IDS,
    LOGITS,
    NEXT_TOKENS,
    NUM_TOKENS,
    POSITION_IDS,
    QUERY_START_OFFSETS,
    EngineSpec,
    LogitsMode,
    TensorSpec,
)

MINIMUM_IR_VERSION = 10
"""First version of the file format in which a function has an overload."""
MINIMUM_OPSET = 23
"""Opset of PagedAttention's reference function, which the model has to share."""


def rewrite(model: ir.Model, *, facts: ModelFacts, spec: EngineSpec) -> ir.Model:
    """Turn `model` into the paged model of `spec`.

    Args:
        model: the surveyed model; it is changed and returned. Load it again for another spec.
        facts: the survey of this very object.
        spec: what `resolve` made of the facts.

    Raises:
        OnnxRewriteError: something in the graph still reads what a paged step does not have.
        SpecMismatchError: spec and facts differ, or the result is not what the spec says.
        ConfigError: a weight does not fit the type that the spec asks for.
    """
    _require_fit(facts, spec)
    _require_raisable_opset(model)
    graph = model.graph
    inputs = {tensor.name: _engine_input(graph, tensor) for tensor in _inputs(spec)}
    _name_nodes(graph)
    unify_norm_types(graph)
    logits = _required(facts.logits)
    outputs: dict[str, ir.Value] = {}
    for found in facts.index_values:
        _replace_index_value(graph, found, inputs)
    for index, layer in enumerate(facts.matches):
        outputs |= replace_layer(graph, layer, index=index, inputs=inputs, spec=spec)
    if not facts.has_batch_axis:
        _drop_batch_axis(graph, inputs[INPUT_IDS])
    if spec.logits_mode is LogitsMode.LAST and not facts.last_tokens_only:
        logits = gather_last_tokens(
            graph, logits, inputs[QUERY_START_OFFSETS], has_batch_axis=facts.has_batch_axis
        )
    elif not facts.has_batch_axis:
        emit = Emitter(graph, "/paged_trt/logits")
        logits = emit.op("Unsqueeze", [logits, emit.integers([0])], LOGITS, dtype=logits.dtype)
    outputs[LOGITS] = logits
    _set_outputs(graph, outputs, spec)
    RemoveUnusedNodesPass()(model)
    _set_inputs(graph, inputs)
    graph.sort()
    if facts.activation_dtype is not spec.activation_dtype:
        convert_dtype(model, source=facts.activation_dtype, target=spec.activation_dtype)
    if spec.greedy_in_engine:
        _add_next_tokens(graph, spec)
    _finish(model, spec)
    require_paged(model, spec)
    return model


def _require_fit(facts: ModelFacts, spec: EngineSpec) -> None:
    for field in ("layers", "vocab_size", "reads_position_ids"):
        left, right = getattr(facts, field), getattr(spec, field)
        if left != right:
            raise SpecMismatchError(
                field, left, right, where="rewrite", remedy="resolve the spec from these facts"
            )


def _require_raisable_opset(model: ir.Model) -> None:
    # From 18 to MINIMUM_OPSET, GroupNormalization alone took on another meaning (in 21).
    for node in model.graph:
        if model.opset_imports.get("", 0) < 21 and node.op_type == "GroupNormalization":
            raise OnnxRewriteError(
                node_name(node),
                f"GroupNormalization of opset {model.opset_imports['']} means something else in "
                f"opset {MINIMUM_OPSET}",
                f"export with `opset_version={MINIMUM_OPSET}`",
            )


def _required(value: ir.Value | None) -> ir.Value:
    if value is None:
        raise SpecMismatchError(
            "logits", "a value of the model", None, where="rewrite", remedy="survey the model"
        )
    return value


def _inputs(spec: EngineSpec) -> list[TensorSpec]:
    return [tensor for tensor in spec.tensors() if tensor.role.is_input]


def _engine_input(graph: ir.Graph, tensor: TensorSpec) -> ir.Value:
    """The engine's input: one of the model's own, if it has it, with the table's dims."""
    own = next((each for each in graph.inputs if each.name == tensor.name), None)
    value = own or ir.Value(name=tensor.name)
    _declare(value, tensor)
    return value


def _declare(value: ir.Value, tensor: TensorSpec) -> None:
    value.name = tensor.name
    value.type = ir.TensorType(ir.DataType(tensor.dtype.onnx))
    value.shape = ir.Shape(tensor.dims)


def _name_nodes(graph: ir.Graph) -> None:
    # A node's name becomes the name of its layer, and of what this pass adds for it.
    seen: set[str | None] = set()
    for index, node in enumerate(graph):
        if not node.name or node.name in seen:
            node.name = f"{node.name or '/paged_trt/' + node.op_type}_{index}"
        seen.add(node.name)


def _replace_index_value(graph: ir.Graph, found: IndexValue, inputs: dict[str, ir.Value]) -> None:
    emit = Emitter(graph, f"/paged_trt/index/{value_name(found.value)}")
    array = np.asarray(found.array)
    dtype = ir.DataType.from_numpy(array.dtype)
    if found.kind is IndexKind.CONSTANT:
        new = emit.constant(array, "constant")
    elif found.kind is IndexKind.NUM_TOKENS:
        new = emit.op("Shape", [inputs[INPUT_IDS]], "num_tokens", {"start": 1, "end": 2})
        new = emit.op("Reshape", [new, emit.integers(array.shape)], "reshape")
        new = emit.op("Cast", [new], "cast", {"to": dtype}, dtype=dtype)
    else:
        shape = [1] * array.ndim
        shape[found.token_axis] = -1
        new = emit.op("Reshape", [inputs[POSITION_IDS], emit.integers(shape)], "reshape")
        new = emit.op("Cast", [new], "cast", {"to": dtype}, dtype=dtype)
    replace_uses(found.value, new)


def _drop_batch_axis(graph: ir.Graph, input_ids: ir.Value) -> None:
    """Let a model of `[num_tokens]` ids read the engine's `[1, num_tokens]`."""
    readers = list(input_ids.uses())
    emit = Emitter(graph, "/paged_trt/input_ids")
    flat = emit.op("Squeeze", [input_ids, emit.integers([0])], "Squeeze", dtype=input_ids.dtype)
    for node, index in readers:
        node.replace_input_with(index, flat)


def _set_outputs(graph: ir.Graph, outputs: dict[str, ir.Value], spec: EngineSpec) -> None:
    graph.outputs.clear()
    for tensor in spec.tensors():
        if not tensor.role.is_input and tensor.name != NEXT_TOKENS:
            value = outputs[tensor.name]
            _declare(value, tensor)
            graph.outputs.append(value)


def _add_next_tokens(graph: ir.Graph, spec: EngineSpec) -> None:
    """Choose among the very logits that the engine gives, so after their type is settled."""
    names = [tensor.name for tensor in spec.tensors() if not tensor.role.is_input]
    logits = graph.outputs[names.index(LOGITS)]
    tokens = emit_next_tokens(
        graph, logits, vocab_size=spec.vocab_size, dtype=ir.DataType(spec.logits_dtype.onnx)
    )
    index = names.index(NEXT_TOKENS)
    _declare(tokens, next(tensor for tensor in spec.tensors() if tensor.name == NEXT_TOKENS))
    graph.outputs.insert(index, tokens)
    graph.sort()


def _set_inputs(graph: ir.Graph, inputs: dict[str, ir.Value]) -> None:
    for graph_input in list(graph.inputs):
        if graph_input in inputs.values() or graph_input.is_initializer():
            continue
        for node, _ in graph_input.uses():
            raise OnnxRewriteError(
                node_name(node),
                f"it still reads `{value_name(graph_input)}`, which a paged step does not have",
                "export a model that reads it in attention only",
            )
    graph.inputs.clear()
    graph.inputs.extend(inputs.values())


def _finish(model: ir.Model, spec: EngineSpec) -> None:
    model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
    model.opset_imports[""] = max(model.opset_imports.get("", 0), MINIMUM_OPSET)
    model.opset_imports[OP_DOMAIN] = OPSET
    model.functions.clear()
    function: Any = ir.from_proto(paged_attention_function(spec.kv_cache_dtype))
    # One opset serves the model and its functions; the body uses nothing that changed since.
    function.opset_imports[""] = model.opset_imports[""]
    model.functions[function.identifier()] = function
    _free_engine_names(model.graph)
    declared = {*model.graph.inputs, *model.graph.outputs}
    for node in model.graph:
        for output in node.outputs:
            if output not in declared:
                # Shapes of the dense model; onnxruntime and TensorRT infer the paged ones.
                output.shape = None
                output.type = None
    _declare_operands(model.graph, spec)
    RemoveUnusedOpsetsPass()(model)


def _free_engine_names(graph: ir.Graph) -> None:
    """Rename values of the dense model that are called like an engine tensor or another value."""
    taken = {value.name for value in (*graph.inputs, *graph.outputs)}
    initializers = list(graph.initializers.values())
    results = [output for node in graph for output in node.outputs if output.name]
    for index, value in enumerate((*initializers, *results)):
        if value.is_graph_output() or value.is_graph_input():
            continue
        if value.name in taken:
            value.name = f"{value.name}/dense_{index}"
        taken.add(value.name)


def _declare_operands(graph: ir.Graph, spec: EngineSpec) -> None:
    """Write type and shape of query, key and value, which a later survey checks."""
    nodes = [node for node in graph if node.op_type == OP_TYPE]
    for node, layer in zip(nodes, spec.layers, strict=True):
        dims = (
            (layer.num_q_heads, layer.head_dim),
            (layer.num_kv_heads, layer.head_dim),
            (layer.num_kv_heads, layer.value_head_dim),
        )
        for value, (heads, size) in zip(node.inputs[:3], dims, strict=True):
            if value is not None:
                value.type = ir.TensorType(ir.DataType(spec.activation_dtype.onnx))
                value.shape = ir.Shape([NUM_TOKENS, heads, size])
