"""onnxruntime, as far as proofs need it: imported late, quiet, one thread, nothing optimised."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from paged_trt.builder.onnx.graph import Array, value_name
from paged_trt.plugins.errors import PackageMissingError


class EvaluationError(Exception):
    """onnxruntime cannot run the part of a graph that computes a value."""


class Evaluator:
    """Computes one value of a part of a graph.

    Args:
        nodes: the part, sorted.
        leaves: values that are fed; `given` is one of them or None, and float32.
        constants: initializers that the part reads.
        result: the value to compute.
        model: where opset and format versions come from.
        given: a leaf whose own type does not matter.

    Raises:
        EvaluationError: onnxruntime refuses the part.
        PackageMissingError: onnxruntime is not installed.
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        leaves: Sequence[ir.Value],
        constants: Sequence[ir.Value],
        *,
        result: ir.Value,
        model: ir.Model,
        given: ir.Value | None,
    ) -> None:
        self.leaves = leaves
        runtime = _onnxruntime()
        try:
            graph = onnx.helper.make_graph(
                [_runnable(ir.to_proto(node)) for node in nodes],
                "probe",
                [_value_info(leaf, is_given=leaf is given) for leaf in leaves],
                [onnx.helper.make_empty_tensor_value_info(value_name(result))],
                [_tensor_proto(constant) for constant in constants],
            )
            if result in leaves or result in constants:
                # An output needs a node that produces it.
                graph.node.append(
                    onnx.helper.make_node("Identity", [value_name(result)], ["probe_output"])
                )
                graph.output[0].name = "probe_output"
            self._session = runtime.InferenceSession(
                _model_proto(graph, model).SerializeToString(),
                _session_options(),
                providers=["CPUExecutionProvider"],
            )
        # A damaged node fails in onnx-ir or in onnxruntime, each with errors of its own.
        except Exception as error:
            raise EvaluationError(str(error)) from error

    def run(self, feeds: Mapping[str, Array]) -> Array:
        """The value's array.

        Raises:
            EvaluationError: a node fails.
        """
        options = _onnxruntime().RunOptions()
        options.log_severity_level = 4
        try:
            (array,) = self._session.run(None, dict(feeds), options)
        except Exception as error:
            raise EvaluationError(str(error)) from error
        return np.asarray(array)


def _model_proto(graph: onnx.GraphProto, model: ir.Model) -> onnx.ModelProto:
    opsets = [
        onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()
    ]
    proto = onnx.helper.make_model(graph, opset_imports=opsets)
    proto.ir_version = model.ir_version
    return proto


def _value_info(leaf: ir.Value, *, is_given: bool) -> onnx.ValueInfoProto:
    dtype = ir.DataType.FLOAT if is_given else leaf.dtype or ir.DataType.INT64
    # Nodes in the model see shapes that stand in no value_info here: any will do.
    return onnx.helper.make_tensor_value_info(value_name(leaf), dtype.value, None)


def _runnable(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node in float32 where it says bfloat16, which onnxruntime's CPU operators refuse."""
    for found in node.attribute:
        if found.name in {"to", "dtype"} and found.i == onnx.TensorProto.BFLOAT16:
            found.i = onnx.TensorProto.FLOAT
        if found.HasField("t") and found.t.data_type == onnx.TensorProto.BFLOAT16:
            array = onnx.numpy_helper.to_array(found.t).astype(np.float32)
            found.t.CopyFrom(onnx.numpy_helper.from_array(array, found.t.name))
    return node


def _tensor_proto(constant: ir.Value) -> onnx.TensorProto:
    if constant.const_value is None:
        raise EvaluationError(f"`{value_name(constant)}` has no data")
    array = np.asarray(constant.const_value.numpy())
    if constant.const_value.dtype is ir.DataType.BFLOAT16:
        array = array.astype(np.float32)
    return onnx.numpy_helper.from_array(array, value_name(constant))


@functools.cache
def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise PackageMissingError(
            "proving a model's masks needs onnxruntime, which is not installed; run "
            '`pip install "paged-trt[compare]"`'
        ) from None
    return onnxruntime


def _session_options() -> Any:
    options = _onnxruntime().SessionOptions()
    options.graph_optimization_level = _onnxruntime().GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    # Failures are part of the search and come back as exceptions.
    options.log_severity_level = 4
    return options
