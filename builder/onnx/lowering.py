"""PagedAttention nodes: their specs, and their lowering for parsers that know GQA only.

The parser of RTX 1.4 to 1.6 hands no custom node to a plugin, but a `GroupQueryAttention`
node it does. Just before the parse each PagedAttention node becomes one, and its eleven
inputs are packed into the slots that reach the plugin (T token rows, N sequence rows, Hq and
Hkv heads, D and Dv elements of a head):

    slot 0, 1, 2    query, key, value as `[1, T, heads * dim]`, key and value of one width
    slot 3, 4       the pools
    slot 5          `[past_lens | query_start_offsets]`, int32 `[2N+1]`
    slot 6          a constant; this shape input exists to satisfy the parser
    slot 7, 8       page_table, rope_cos_sin: they pass only with `do_rotary` = 1
    slot 11         `[kv_scales | sinks]`, float32 `[2*Hkv + Hq]`

The parser drops other slots with a mere warning. A wrong node can end in a double free, so
the pattern is written here once. Inputs and outputs of the model do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.errors import BuildError, SpecMismatchError
from paged_trt.plugins.fields import (
    FLOAT_ATTRIBUTES,
    INT_ATTRIBUTES,
    OP_DOMAIN,
    OP_TYPE,
    OP_VERSION,
    OperatorSpec,
)
from paged_trt.plugins.operands import Operand
from paged_trt.plugins.tensors import EngineSpec, Role, key_pool_name, value_pool_name

GQA_DOMAIN: Final = "com.microsoft"
GQA_TYPE: Final = "GroupQueryAttention"
_SINK_SLOT: Final = 11


def paged_nodes(model: ir.Model) -> list[ir.Node]:
    """The PagedAttention nodes in graph order."""
    return [node for node in model.graph if (node.domain, node.op_type) == (OP_DOMAIN, OP_TYPE)]


def node_operators(model: ir.Model, spec: EngineSpec) -> dict[str, OperatorSpec]:
    """Spec of each PagedAttention node by node name, checked against the engine's.

    Raises:
        BuildError: there is no such node, or names are missing or not unique.
        SpecMismatchError: a node's attributes or its pool differ from `spec`.
    """
    _check_pool_dims(model, spec)
    nodes = paged_nodes(model)
    names = [node.name for node in nodes]
    if not nodes or None in names or len({*names}) != len(names):
        raise BuildError(
            f"the {OP_TYPE} nodes must have unique names, found {len(nodes)} nodes named {names}; "
            "make the model with `paged-trt build`"
        )
    if len(nodes) != len(spec.layers):
        raise SpecMismatchError("num_layers", len(spec.layers), len(nodes), where="model.onnx")
    layer_of_pools = {
        (key_pool_name(index), value_pool_name(index)): index for index in range(len(spec.layers))
    }
    operators = {}
    for node in nodes:
        key_pool, value_pool = (
            str(value.name if value else None) for value in node.inputs[Operand.KEY_POOL :][:2]
        )
        pools = (key_pool, value_pool)
        where = f"node `{node.name}` in model.onnx"
        index = layer_of_pools.pop(pools, None)
        if index is None:
            raise SpecMismatchError("pools", "those of one layer", pools, where=where)
        _require_plugin_attributes(node, where)
        found = OperatorSpec.from_fields(_numbers(node), where=where)
        OperatorSpec(pool=spec.pool, attention=spec.layers[index]).require_equal(found, where=where)
        operators[str(node.name)] = found
    return operators


def _require_plugin_attributes(node: ir.Node, where: str) -> None:
    for name, want in (("plugin_namespace", OP_DOMAIN), ("plugin_version", OP_VERSION)):
        attribute = node.attributes.get(name)
        found = None if attribute is None else attribute.as_string()
        if found != want:
            raise SpecMismatchError(name, want, found, where=where)


def _check_pool_dims(model: ir.Model, spec: EngineSpec) -> None:
    """Compare the declared dims of the pools, which TensorRT does not read for outputs."""
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for tensor in spec.tensors():
        if tensor.role not in (Role.POOL_INPUT, Role.POOL_OUTPUT):
            continue
        value = values.get(tensor.name)
        shape = value.shape if value is not None else None
        found = None if shape is None else tuple(shape)
        if found != tensor.dims:
            where = f"model.onnx, tensor `{tensor.name}`"
            raise SpecMismatchError("pool_shape", tensor.dims, found, where=where)


def lower_to_gqa(model: ir.Model, operators: Mapping[str, OperatorSpec]) -> None:
    """Replace each PagedAttention node, in place, by a GroupQueryAttention node of its name.

    Args:
        model: a paged model; its function is removed with its last caller.
        operators: result of `node_operators`.
    """
    model.graph.opset_imports[GQA_DOMAIN] = 1
    total = _initializer(model.graph, "gqa.total_sequence_length", np.array(1, np.int32))
    for node in paged_nodes(model):
        _lower_node(model.graph, node, operators[str(node.name)].attention, total)
    for identifier in [key for key in model.functions if key[:2] == (OP_DOMAIN, OP_TYPE)]:
        del model.functions[identifier]
    model.graph.opset_imports.pop(OP_DOMAIN, None)


def _lower_node(graph: ir.Graph, node: ir.Node, attention: AttentionSpec, total: ir.Value) -> None:
    emit = _Emitter(graph, str(node.name))
    operands = [node.inputs[operand] for operand in Operand]
    width = max(attention.head_dim, attention.value_head_dim) * attention.num_kv_heads
    query, key, value = (
        emit.flat_heads(operands[operand], name, heads * dim, to_width)
        for operand, name, heads, dim, to_width in (
            (Operand.QUERY, "query", attention.num_q_heads, attention.head_dim, None),
            (Operand.KEY, "key", attention.num_kv_heads, attention.head_dim, width),
            (Operand.VALUE, "value", attention.num_kv_heads, attention.value_head_dim, width),
        )
    )
    lens = (operands[Operand.PAST_LENS], operands[Operand.QUERY_START_OFFSETS])
    scales = emit.reshape(operands[Operand.KV_SCALES], "kv_scales", [-1])
    sources = {
        0: query,
        1: key,
        2: value,
        3: operands[Operand.KEY_POOL],
        4: operands[Operand.VALUE_POOL],
        5: emit.concat(lens, "lens"),
        6: total,
        7: operands[Operand.PAGE_TABLE],
        8: operands[Operand.ROPE_COS_SIN],
        _SINK_SLOT: emit.concat((scales, operands[Operand.SINKS]), "heads"),
    }
    attributes = {
        "num_heads": attention.num_q_heads,
        "kv_num_heads": attention.num_kv_heads,
        "do_rotary": 1,
        "scale": attention.softmax_scale,
    }
    inputs = [sources.get(slot) for slot in range(_SINK_SLOT + 1)]
    fused = ir.node(GQA_TYPE, inputs, attributes, domain=GQA_DOMAIN, num_outputs=3, name=node.name)
    packed, key_pool, value_pool = fused.outputs
    packed.name = f"{node.name}.packed_output"
    emit.nodes.append(fused)
    dims = [-1, attention.num_q_heads, attention.value_head_dim]
    output = emit.reshape(packed, "output", dims)
    ir.convenience.replace_nodes_and_values(
        graph,
        node,
        [node],
        emit.nodes,
        list(node.outputs),
        [output, key_pool, value_pool],
    )


class _Emitter:
    """Collects new nodes whose names begin with the name of the node that they replace."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.nodes: list[ir.Node] = []
        self._graph = graph
        self._prefix = prefix

    def flat_heads(
        self, source: ir.Value | None, name: str, width: int, to_width: int | None
    ) -> ir.Value:
        """`[T, heads, dim]` as `[1, T, heads * dim]`, with zero columns up to `to_width`."""
        flat = self.reshape(source, name, [1, -1, width])
        if to_width is None or to_width == width:
            return flat
        pads = np.array([0, 0, 0, 0, 0, to_width - width], np.int64)
        return self._add("Pad", [flat, self._constant(f"{name}.pads", pads)], f"{name}.padded")

    def reshape(self, source: ir.Value | None, name: str, dims: Sequence[int]) -> ir.Value:
        """Reshape to constant dims, of which one may be -1."""
        shape = self._constant(f"{name}.dims", np.array(dims, np.int64))
        return self._add("Reshape", [source, shape], f"{name}.reshaped")

    def concat(self, sources: Sequence[ir.Value | None], name: str) -> ir.Value:
        """Concatenation of vectors."""
        return self._add("Concat", sources, name, {"axis": 0})

    def _constant(self, name: str, array: npt.NDArray[np.int64]) -> ir.Value:
        return _initializer(self._graph, f"{self._prefix}.{name}", array)

    def _add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: dict[str, int] | None = None,
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"{self._prefix}.{name}")
        node.outputs[0].name = f"{self._prefix}.{name}"
        self.nodes.append(node)
        return node.outputs[0]


def _initializer(
    graph: ir.Graph, name: str, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]
) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _numbers(node: ir.Node) -> dict[str, int | float]:
    numbers: dict[str, int | float] = {}
    for name in INT_ATTRIBUTES:
        if (attribute := node.attributes.get(name)) is not None:
            numbers[name] = attribute.as_int()
    for name in FLOAT_ATTRIBUTES:
        if (attribute := node.attributes.get(name)) is not None:
            numbers[name] = attribute.as_float()
    return numbers
