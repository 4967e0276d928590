"""Every tensor that an ONNX model stores, wherever it hides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def model_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Dense tensors of the graph, its subgraphs and the functions: initializers and attributes."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _graph_tensors(attribute.g)
            for graph in attribute.graphs:
                yield from _graph_tensors(graph)
