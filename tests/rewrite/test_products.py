"""Float16 products that are summed in float32 give the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from paged_trt.builder.onnx.products import sum_in_float32
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import TOY, write_toy


def gemm_model(element: int, dtype: Any) -> onnx.ModelProto:
    weight = np.linspace(-1, 1, 24).reshape(4, 6).astype(dtype)
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["g"], name="gemm", alpha=0.5),
        helper.make_node("Transpose", ["w"], ["t"], name="transpose"),
        helper.make_node("MatMul", ["g", "t"], ["y"], name="matmul"),
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", element, ["n", 4])],
        [helper.make_tensor_value_info("y", element, ["n", 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(weight[0], "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto, x: Any) -> Any:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


def test_products_keep_their_names_and_values() -> None:
    proto = gemm_model(TensorProto.FLOAT16, np.float16)
    model = ir.from_proto(proto)
    assert sum_in_float32(model) == 2
    widened = ir.to_proto(model)
    onnx.checker.check_model(widened, full_check=True)
    assert [value.name for value in widened.graph.output] == ["y"]
    assert len({node.name for node in widened.graph.node}) == len(widened.graph.node) == 10
    x = np.array([[1, -2, 0.5, 3], [0.25, 4, -1, 1]], np.float16)
    first, second = run(proto, x), run(widened, x)
    assert second.dtype == np.float16
    np.testing.assert_allclose(first.astype(float), second.astype(float), rtol=2**-9, atol=2**-9)


def test_other_types_are_left_alone() -> None:
    proto = gemm_model(TensorProto.FLOAT, np.float32)
    model = ir.from_proto(proto)
    assert sum_in_float32(model) == 0
    assert len(list(model.graph)) == len(proto.graph.node)


@pytest.mark.parametrize("dialect", ["attention23-past", "gqa"])
def test_every_product_of_a_decoder_is_found(dialect: str, tmp_path: Path) -> None:
    write_toy(tmp_path, Dialect(dialect))
    model = ir.load(tmp_path / "model.onnx")
    products = sum(node.op_type == "MatMul" for node in model.graph)
    assert products >= 5 * TOY.num_layers + 1
    assert sum_in_float32(model) == products
