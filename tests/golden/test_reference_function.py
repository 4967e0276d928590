"""The reference function as a piece of ONNX: checker, shapes, inliner, overloads, Attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.compose
import onnx.helper
import onnx.inliner
import onnx.shape_inference
import onnx_ir
import pytest
from golden.reference_cases import (
    KV_CACHE_DTYPES,
    OUTPUT_ROUNDING,
    RAGGED,
    Array,
    Case,
    assert_same_bytes,
    from_ort_value,
    make_inputs,
    make_model,
    make_session,
    node_attributes,
    run_model,
    to_ort_value,
)

from paged_trt.plugins import reference
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError

each_kv = pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)


@each_kv
def test_model_passes_the_checker_and_strict_shape_inference(kv: DType) -> None:
    model = make_model(Case(**RAGGED, kv=kv))
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


@each_kv
def test_output_types_follow_from_the_function(kv: DType) -> None:
    model = make_model(Case(**RAGGED, kv=kv))
    for output in model.graph.output:
        output.type.Clear()
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    types = [value.type.tensor_type.elem_type for value in inferred.graph.output]
    assert types == [DType.FLOAT16.onnx, kv.onnx, kv.onnx]


@each_kv
def test_inlined_model_gives_the_same_numbers(kv: DType) -> None:
    case = Case(**RAGGED, kv=kv, rope=2, softcap=1.5, window=100)
    model = make_model(case)
    inlined = onnx.inliner.inline_local_functions(model)
    assert not inlined.functions
    assert {node.domain for node in inlined.graph.node} == {""}
    onnx.checker.check_model(inlined, full_check=True)
    inputs = make_inputs(case)
    for left, right in zip(run_model(model, inputs), run_model(inlined, inputs), strict=True):
        assert_same_bytes(left, right)


@each_kv
def test_model_survives_onnx_ir(kv: DType) -> None:
    case = Case(**RAGGED, kv=kv)
    model = make_model(case)
    returned = onnx_ir.to_proto(onnx_ir.from_proto(model))
    assert [function.overload for function in returned.functions] == [kv.value]
    assert returned.graph.node[0].overload == kv.value
    inputs = make_inputs(case)
    for left, right in zip(run_model(model, inputs), run_model(returned, inputs), strict=True):
        assert_same_bytes(left, right)


def test_one_model_may_hold_several_overloads() -> None:
    """A layer with a float16 pool beside one with an int8 pool, each with its function."""
    models = [make_model(Case(**RAGGED, kv=kv)) for kv in (DType.FLOAT16, DType.INT8)]
    graphs = []
    for index, model in enumerate(models):
        prefixed = onnx.compose.add_prefix(model, f"layer{index}_", rename_functions=False)
        graphs.append(prefixed.graph)
    merged = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node for graph in graphs for node in graph.node],
            "layers",
            [value for graph in graphs for value in graph.input],
            [value for graph in graphs for value in graph.output],
        ),
        functions=[function for model in models for function in model.functions],
        opset_imports=models[0].opset_import,
        ir_version=models[0].ir_version,
    )
    onnx.checker.check_model(merged, full_check=True)
    types = [value.type for value in make_session(merged).get_outputs()]
    assert types[1::3] == ["tensor(float16)", "tensor(int8)"]


@each_kv
def test_pools_may_be_updated_in_place(kv: DType) -> None:
    """With a pool input and its output at one address nothing else changes."""
    case = Case(**RAGGED, kv=kv)
    model, inputs = make_model(case), make_inputs(case)
    expected = run_model(model, inputs)
    session = make_session(model)
    values = {name: to_ort_value(array.copy()) for name, array in inputs.items()}
    binding = session.io_binding()
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, values[value.name])
    for pool in ("key_pool", "value_pool"):
        binding.bind_ortvalue_output(f"{pool}_out", values[pool])
    binding.bind_output("output")
    session.run_with_iobinding(binding)
    output = next(value for value in binding.get_outputs() if value.shape()[0] == 134)
    assert_same_bytes(from_ort_value(output), expected[0])
    assert_same_bytes(from_ort_value(values["key_pool"]), expected[1])
    assert_same_bytes(from_ort_value(values["value_pool"]), expected[2])


def test_signature_is_that_of_the_contract() -> None:
    function = reference.paged_attention_function(DType.FLOAT16)
    assert (function.domain, function.name) == ("paged_trt", "PagedAttention")
    assert tuple(function.input) == reference.INPUT_NAMES
    assert tuple(function.output) == reference.OUTPUT_NAMES
    defaults = {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in function.attribute_proto
    }
    assert defaults == {
        "window": -1,
        "rope": 0,
        "rotary_dim": 0,
        "softcap": 0.0,
        "plugin_version": b"1",
        "plugin_namespace": b"paged_trt",
    }
    assert {*function.attribute, *defaults} == set(node_attributes(Case(**RAGGED)))


def test_defaults_are_neutral() -> None:
    case = Case(**RAGGED)
    explicit, implicit = make_model(case), make_model(case)
    kept = [a for a in implicit.graph.node[0].attribute if a.name == "softmax_scale"]
    del implicit.graph.node[0].attribute[:]
    implicit.graph.node[0].attribute.extend(kept)
    inputs = make_inputs(case)
    for left, right in zip(run_model(explicit, inputs), run_model(implicit, inputs), strict=True):
        assert_same_bytes(left, right)


def test_function_is_a_copy() -> None:
    reference.paged_attention_function(DType.INT8).node.pop()
    changed = reference.paged_attention_function(DType.INT8)
    changed.ClearField("node")
    assert reference.paged_attention_function(DType.INT8).node


def test_a_type_without_a_pool_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"float32; choose one of bfloat16, float16"):
        reference.paged_attention_function(DType.FLOAT32)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_agrees_with_onnx_attention(opset: int, softcap: float) -> None:
    """One causal prefill, for which the standard has an operator."""
    case = Case(lengths=[140], pasts=[0], group=3, softcap=softcap)
    inputs = make_inputs(case)
    output = run_model(make_model(case), inputs)[0].astype(np.float32)
    expected = _onnx_attention(case, inputs, opset)
    rounding = OUTPUT_ROUNDING[DType.FLOAT16]
    np.testing.assert_allclose(output, expected, rtol=rounding, atol=2.0**-19)


def _onnx_attention(case: Case, inputs: dict[str, Array], opset: int) -> Array:
    """ai.onnx Attention in float32 on `[1, heads, T, dim]`, as `[T, heads, dim]`."""
    names = ("query", "key", "value")
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, None, None, None])
        for name in (*names, "output")
    ]
    attributes: dict[str, Any] = {"scale": case.settings.softmax_scale, "softcap": case.softcap}
    node = onnx.helper.make_node("Attention", names, ["output"], is_causal=1, **attributes)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "attention", values[:3], values[3:]),
        opset_imports=[onnx.helper.make_opsetid("", opset)],
        ir_version=11,
    )
    feeds = {name: inputs[name].astype(np.float32).swapaxes(0, 1)[None] for name in names}
    output: Array = make_session(model).run(None, feeds)[0][0].swapaxes(0, 1)
    return output
