"""Small helpers over onnx-ir: attributes, constants, and nodes that are added to a graph."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from paged_trt.plugins.errors import OnnxRewriteError

Array = npt.NDArray[Any]

EXPORT_COMMAND: Final = (
    "export with `torch.onnx.export(model, ..., dynamo=True, opset_version=23)` on torch 2.9 or "
    'later, with `attn_implementation="sdpa"` where the model is from transformers: that writes '
    "Attention nodes; or, from transformers, with "
    "`paged_trt.builder.huggingface.export_huggingface(model, folder)`"
)


def node_name(node: ir.Node) -> str:
    """Name of a node for messages; its first output where it has none."""
    return node.name or f"{node.op_type} of {node.outputs[0].name}"


def value_name(value: ir.Value) -> str:
    """Name of a value for messages."""
    return value.name or "(value without a name)"


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """Value of an attribute, or `default` where it is absent.

    Raises:
        OnnxRewriteError: it is of another type than a default that is not None.
    """
    found = node.attributes.get(name)
    if found is None:
        return default
    if default is not None and type(found.value) is not type(default):
        raise OnnxRewriteError(
            node_name(node),
            f"attribute `{name}` is {found.value!r}, which is no {type(default).__name__}",
            "export the model again",
        )
    return found.value


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Input of a node; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant_array(value: ir.Value | None) -> Array | None:
    """The array of an initializer or Constant; None where the value is computed."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def static_dim(value: ir.Value, axis: int) -> int | None:
    """A dimension that is a number."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None


def require_static_dim(value: ir.Value, axis: int, *, node: ir.Node) -> int:
    """A dimension that has to be a number.

    Raises:
        OnnxRewriteError: it is symbolic or unknown.
    """
    dim = static_dim(value, axis)
    if dim is None:
        raise OnnxRewriteError(
            node_name(node),
            f"dimension {axis} of `{value_name(value)}` ({value.shape}) is not a number",
            "export with the numbers of heads and the head size fixed",
        )
    return dim


@dataclass(frozen=True, kw_only=True)
class NodeSchema:
    """All attributes, inputs and outputs of an operator, handled or not.

    Attributes:
        handled: attributes that the dialect reads.
        neutral: attributes that it does not read, with the values that change nothing; None
            for an attribute that only takes part when a refused input is given.
        inputs: names of all inputs, in order.
        refused_inputs: those that may not be given, with what to do instead.
        outputs: names of all outputs, in order.
        refused_outputs: those that may not be used.
    """

    handled: frozenset[str]
    neutral: Mapping[str, Container[object] | None]
    inputs: Sequence[str]
    refused_inputs: Mapping[str, str]
    outputs: Sequence[str]
    refused_outputs: Mapping[str, str] = field(default_factory=dict)

    def check(self, node: ir.Node) -> None:
        """Refuse a node that says something the dialect would drop.

        Raises:
            OnnxRewriteError: an attribute, input or output is unknown or not supported.
        """
        for name, found in node.attributes.items():
            self._check_attribute(node, name, found)
        for index, value in enumerate(node.inputs):
            if value is not None:
                self._check_slot(node, index, self.inputs, self.refused_inputs, "input")
        for index, output in enumerate(node.outputs):
            if output.uses() or output.is_graph_output():
                self._check_slot(node, index, self.outputs, self.refused_outputs, "output")

    def _check_attribute(self, node: ir.Node, name: str, found: ir.Attr) -> None:
        if found.is_ref():
            raise OnnxRewriteError(
                node_name(node), f"attribute `{name}` is a reference", "inline the functions first"
            )
        if name in self.handled:
            return
        if name not in self.neutral:
            raise OnnxRewriteError(
                node_name(node),
                f"attribute `{name}` of {node.op_type} is unknown",
                "export with an older opset, or report the model",
            )
        allowed = self.neutral[name]
        if allowed is not None and found.value not in allowed:
            raise OnnxRewriteError(
                node_name(node),
                f"attribute `{name}` is {found.value!r}, which PagedAttention does not support",
                f"export with `{name}` left out",
            )

    def _check_slot(
        self,
        node: ir.Node,
        index: int,
        names: Sequence[str],
        refused: Mapping[str, str],
        kind: str,
    ) -> None:
        if index >= len(names):
            raise OnnxRewriteError(
                node_name(node),
                f"{kind} {index} of {node.op_type} is unknown",
                "export with an older opset, or report the model",
            )
        if names[index] in refused:
            raise OnnxRewriteError(
                node_name(node),
                f"{kind} `{names[index]}` of {node.op_type} is used, which PagedAttention does "
                "not support",
                refused[names[index]],
            )


def tensor_shape(tensor: ir.TensorProtocol) -> ir.Shape:
    """Shape of a tensor as numbers."""
    return ir.Shape([int(str(dim)) for dim in tensor.shape])


class Emitter:
    """Adds nodes and initializers to a graph; the graph is sorted afterwards.

    Args:
        graph: the graph to extend.
        scope: prefix of all names.
    """

    def __init__(self, graph: ir.Graph, scope: str) -> None:
        self._graph = graph
        self._scope = scope

    def many(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        num_outputs: int,
        domain: str = "",
        overload: str = "",
    ) -> Sequence[ir.Value]:
        """A node named `<scope>/<name>`; returns its outputs."""
        full = f"{self._scope}/{name}"
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(dict(attributes or {})),
            overload=overload,
            num_outputs=num_outputs,
            name=full,
        )
        for index, output in enumerate(node.outputs):
            output.name = f"{full}/output_{index}"
        self._graph.append(node)
        return node.outputs

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any] | None = None,
        *,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """A node of the standard opset with one output."""
        output = self.many(op_type, inputs, name, attributes, num_outputs=1)[0]
        if dtype is not None:
            output.dtype = dtype
        return output

    def constant(self, array: Array, name: str) -> ir.Value:
        """An initializer named `<scope>/<name>`; one that exists is used again."""
        full = f"{self._scope}/{name}"
        if full in self._graph.initializers:
            return self._graph.initializers[full]
        tensor = ir.tensor(array, name=full)
        value = ir.Value(
            name=full,
            type=ir.TensorType(tensor.dtype),
            shape=tensor_shape(tensor),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value

    def integers(self, values: Iterable[int]) -> ir.Value:
        """An int64 vector."""
        items = list(values)
        return self.constant(np.asarray(items, np.int64), "x".join(map(str, items)))


def replace_uses(old: ir.Value, new: ir.Value) -> None:
    """Let every node that reads `old` read `new`."""
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=False)
