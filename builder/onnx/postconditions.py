"""What holds after a rewrite: the model is exactly what the spec says.

The checks read the finished model and share no code with what made it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from paged_trt.builder.onnx.graph import node_name, value_name
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import OnnxRewriteError, SpecMismatchError
from paged_trt.plugins.fields import (
    FLOAT_ATTRIBUTES,
    INT_ATTRIBUTES,
    OP_DOMAIN,
    OP_TYPE,
    STRING_ATTRIBUTES,
    OperatorSpec,
)
from paged_trt.plugins.reference import INPUT_NAMES
from paged_trt.plugins.tensors import EngineSpec, TensorSpec, key_pool_name, value_pool_name

_WHERE: Final = "rewritten model"
_RUNTIME_DOMAIN: Final = "com.microsoft"
_REMEDY: Final = "this is a bug of the rewrite: report it with the model"


def require_paged(model: ir.Model, spec: EngineSpec) -> None:
    """Check a rewritten model against its spec.

    Raises:
        SpecMismatchError: a node, an attribute or an engine tensor differs from the spec.
        OnnxRewriteError: the graph is not valid ONNX.
    """
    tensors = spec.tensors()
    _check_table("inputs", model.graph.inputs, [t for t in tensors if t.role.is_input])
    _check_table("outputs", model.graph.outputs, [t for t in tensors if not t.role.is_input])
    nodes = [node for node in model.graph if node.op_type == OP_TYPE]
    if len(nodes) != len(spec.layers):
        raise _mismatch(f"number of {OP_TYPE} nodes", len(spec.layers), len(nodes))
    for index, node in enumerate(nodes):
        _check_node(model, node, index, spec)
    try:
        with _runtime_operators_renamed(model):
            CheckerPass()(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise OnnxRewriteError(
            model.graph.name or "model", f"the rewritten graph is invalid ({error})", _REMEDY
        ) from error


@contextlib.contextmanager
def _runtime_operators_renamed(model: ir.Model) -> Iterator[None]:
    """Moves onnxruntime's own operators out of the standard domain, where the checker objects.

    onnxruntime-genai writes SimplifiedLayerNormalization without a domain, and onnxruntime and
    TensorRT read it so.
    """
    version = model.opset_imports[""]
    hidden = [
        node
        for node in model.graph
        if node.domain == "" and not onnx.defs.has(node.op_type, max_inclusive_version=version)
    ]
    had_domain = _RUNTIME_DOMAIN in model.opset_imports
    for node in hidden:
        node.domain = _RUNTIME_DOMAIN
    model.opset_imports.setdefault(_RUNTIME_DOMAIN, 1)
    try:
        yield
    finally:
        for node in hidden:
            node.domain = ""
        if not had_domain:
            del model.opset_imports[_RUNTIME_DOMAIN]


def _mismatch(field: str, left: object, right: object) -> SpecMismatchError:
    return SpecMismatchError(field, left, right, where=_WHERE, remedy=_REMEDY)


def _check_table(kind: str, values: Sequence[ir.Value], tensors: list[TensorSpec]) -> None:
    names, expected = [value.name for value in values], [tensor.name for tensor in tensors]
    if names != expected:
        raise _mismatch(kind, expected, names)
    for value, tensor in zip(values, tensors, strict=True):
        dims = tuple(
            dim if isinstance(dim, int) else dim.value for dim in value.shape or ir.Shape([])
        )
        dtype = DType.from_onnx(0 if value.dtype is None else value.dtype.value)
        if dims != tensor.dims:
            raise _mismatch(f"dims of {tensor.name}", tensor.dims, dims)
        if dtype is not tensor.dtype:
            raise _mismatch(f"type of {tensor.name}", tensor.dtype.value, dtype.value)


def _check_node(model: ir.Model, node: ir.Node, index: int, spec: EngineSpec) -> None:
    operator = OperatorSpec(pool=spec.pool, attention=spec.layers[index])
    names = {*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES, *STRING_ATTRIBUTES}
    if set(node.attributes) != names:
        raise _mismatch(f"attributes of {node.name}", sorted(names), sorted(node.attributes))
    numbers = {name: node.attributes[name].value for name in (*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES)}
    operator.require_equal(OperatorSpec.from_fields(numbers, where=_WHERE), where=_WHERE)
    for name in STRING_ATTRIBUTES:
        if node.attributes[name].value != operator.to_attributes()[name]:
            raise _mismatch(name, operator.to_attributes()[name], node.attributes[name].value)
    if node.op_identifier() not in model.functions or node.domain != OP_DOMAIN:
        raise _mismatch("function", node.op_identifier(), list(model.functions))
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != len(INPUT_NAMES):
        raise _mismatch(f"inputs of {node.name}", len(INPUT_NAMES), len(inputs))
    pools = [key_pool_name(index), value_pool_name(index)]
    for pool, name, output in zip(inputs[3:5], pools, node.outputs[1:], strict=True):
        if pool.name != name:
            raise _mismatch(f"pool of {node.name}", name, value_name(pool))
        readers = [node_name(reader) for reader, _ in pool.uses()]
        if readers != [node_name(node)]:
            raise _mismatch(f"readers of {name}", [node_name(node)], readers)
        if not output.is_graph_output() or output.uses():
            raise _mismatch(f"readers of {value_name(output)}", "the engine output", "others")
