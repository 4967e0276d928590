"""Inputs and outputs of a dense model, and what attention nodes say about open cache dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import onnx

from paged_trt.plugins.dtypes import DType

FLOAT_TYPES: Final = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_PAST_AXIS, _SIZE_AXIS = 2, 3


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model.

    Attributes:
        name: its name.
        dtype: element type; None where the project does not know it.
        dims: sizes; None where open.
        is_window: a cache of fixed length that its node keeps the latest tokens in.
        is_fixed: a cache of the sequence's whole length, which TensorScatter writes into.
    """

    name: str
    dtype: DType | None
    dims: tuple[int | None, ...]
    is_window: bool = False
    is_fixed: bool = False

    @property
    def is_float(self) -> bool:
        """Whether it holds activations."""
        return self.dtype in FLOAT_TYPES


def complete_caches(graph: onnx.GraphProto, caches: Sequence[Port]) -> list[Port]:
    """`caches`, `[batch, heads, past, size]`, with what the nodes that read them say of them.

    onnxruntime-genai leaves the size open, and gives layers with a window a cache of that
    many tokens, which the node wants to have from the start.
    """
    fixed = {node.input[0] for node in graph.node if node.op_type == "TensorScatter"}
    known = {**dict(_concat_caches(graph)), **dict(_group_query_caches(graph))}
    return [
        port
        if port.name not in known and port.name not in fixed
        else dataclasses.replace(port, is_fixed=True)
        if port.name in fixed
        else dataclasses.replace(
            port,
            is_window=known[port.name][0] is not None,
            dims=(
                *port.dims[:_PAST_AXIS],
                known[port.name][0] or port.dims[_PAST_AXIS],
                port.dims[_SIZE_AXIS] or known[port.name][1],
            ),
        )
        for port in caches
    ]


def length_roles(graph: onnx.GraphProto) -> dict[str, str]:
    """Inputs that hold a length for each sequence: the past, or past and new tokens."""
    roles = {}
    for node in graph.node:
        if node.op_type == "TensorScatter" and len(node.input) > 2:
            roles[node.input[2]] = "past_lens"
        if node.op_type == "Attention" and len(node.input) > 6:
            roles[node.input[6]] = "total_lens"
    return roles


def _group_query_caches(
    graph: onnx.GraphProto,
) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    """Cache input, tokens of its window, size of its heads; None where not known."""
    widths = _last_dims(graph)
    for node in graph.node:
        if node.op_type != "GroupQueryAttention":
            continue
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        heads = numbers.get("num_heads", 0)
        if not node.input[1]:
            heads += 2 * numbers.get("kv_num_heads", 0)
        width = widths.get(node.input[0], 0)
        size = width // heads if heads and width else None
        window = numbers.get("local_window_size") if numbers.get("sliding_window_cache") else None
        for name in node.input[3:5]:
            yield name, (window, size)


def _concat_caches(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[None, int | None]]]:
    """Caches that a Concat extends: new tokens have heads of the same size."""
    widths = _last_dims(graph)
    for node in graph.node:
        if node.op_type == "Concat" and len(node.input) == 2:
            yield node.input[0], (None, widths.get(node.input[1]) or None)


def _last_dims(graph: onnx.GraphProto) -> dict[str, int]:
    return {
        value.name: value.type.tensor_type.shape.dim[-1].dim_value
        for value in graph.value_info
        if value.type.tensor_type.shape.dim
    }
