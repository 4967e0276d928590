"""The rewritten model is what its spec says, and a rewrite that is not is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rewrite_variants as variants
import safetensors.numpy
from rewrite_support import DEFAULTS, Paged, rewrite_file

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.facts import Dialect, ModelFacts
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.postconditions import require_paged
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, OnnxRewriteError, SpecMismatchError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.scripts.example_models.toy import write_toy

DIALECTS = ["attention23-past", "attention24-concat", "gqa", "gqa-split"]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for dialect in DIALECTS:
        write_toy(folder / dialect, dialect)
    return folder


def scales_file(folder: Path) -> Path:
    ones = np.full((2, 2), 0.05, np.float32)
    path = folder / "scales.safetensors"
    safetensors.numpy.save_file({"kv_scales.0": ones, "kv_scales.1": ones}, path)
    return path


def rewritten(folder: Path, **config: Any) -> tuple[ir.Model, EngineSpec]:
    model = load_model(folder / "model.onnx")
    facts = survey(model)
    spec = resolve(BuildConfig(**{**DEFAULTS, **config}), facts)
    return rewrite(model, facts=facts, spec=spec), spec


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8", "int8"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_engine_tensors(toys: Path, tmp_path: Path, dialect: str, dtype: str) -> None:
    config: dict[str, Any] = {"kv_cache_dtype": dtype}
    if DType(dtype).is_quantised:
        config["kv_scales"] = scales_file(tmp_path)
    spec = rewrite_file(toys / dialect, tmp_path, **config)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    found = []
    for info in (*proto.graph.input, *proto.graph.output):
        tensor = info.type.tensor_type
        dims = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        found.append((info.name, DType.from_onnx(tensor.elem_type), dims))
    assert found == [(each.name, each.dtype, each.dims) for each in spec.tensors()]
    nodes = [node for node in proto.graph.node if node.op_type == "PagedAttention"]
    assert {(node.domain, node.overload) for node in nodes} == {("paged_trt", dtype)}
    assert [(f.domain, f.name, f.overload) for f in proto.functions] == [
        ("paged_trt", "PagedAttention", dtype)
    ]
    assert all(node.name for node in proto.graph.node)
    assert all(all(node.input) for node in nodes)


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_quantised_pool_runs(toys: Path, tmp_path: Path, dtype: str) -> None:
    spec = rewrite_file(
        toys / "gqa", tmp_path, kv_cache_dtype=dtype, kv_scales=scales_file(tmp_path)
    )
    model = load_model(tmp_path / "model.onnx")
    assert [each.name for each in model.graph.inputs if "scales" in str(each.name)] == [
        "kv_scales.0",
        "kv_scales.1",
    ]
    assert spec.kv_cache_dtype is DType(dtype)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_rewritten_model_is_rewritten_again(toys: Path, tmp_path: Path, dialect: str) -> None:
    first = rewrite_file(toys / dialect, tmp_path / "first", logits="all")
    facts = survey(load_model(tmp_path / "first" / "model.onnx"))
    assert facts.dialect is Dialect.PAGED_ATTENTION
    assert facts.layers == first.layers
    second = rewrite_file(
        tmp_path / "first", tmp_path / "second", retained_pages=9, max_batch_size=2
    )
    assert second.pool != first.pool
    tokens = np.arange(140)
    last = [
        Paged(tmp_path / name, spec).step({0: tokens, 1: tokens[:3]})[0]
        for name, spec in (("first", first), ("second", second))
    ]
    np.testing.assert_allclose(last[1], last[0][-1], rtol=0, atol=0.15)


def test_model_of_last_logits_is_rewritten_again(toys: Path, tmp_path: Path) -> None:
    rewrite_file(toys / "gqa", tmp_path / "first")
    rewrite_file(tmp_path / "first", tmp_path / "second")
    with pytest.raises(ConfigError, match="--logits last"):
        rewrite_file(tmp_path / "first", tmp_path / "third", logits="all")


def paged_node(model: ir.Model) -> ir.Node:
    return variants.attention_nodes(model)[1]


def set_shape(kind: str, name: str, dims: list[object]) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        values = getattr(model.graph, kind)
        next(each for each in values if each.name == name).shape = ir.Shape(dims)

    return change


def second_reader(model: ir.Model) -> None:
    pool = next(each for each in model.graph.inputs if each.name == "key_pool.1")
    variants.add(model, "Identity", [pool])


def swapped_inputs(model: ir.Model) -> None:
    inputs = list(model.graph.inputs)
    model.graph.inputs.clear()
    model.graph.inputs.extend([inputs[1], inputs[0], *inputs[2:]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (variants.set_attributes(num_pages=24), "`num_pages` must be 23, found 24"),
        (variants.set_attributes(window=5), "`window` must be -1, found 5"),
        (variants.set_attributes(softmax_scale=0.25), "softmax_scale"),
        (variants.set_attributes(plugin_namespace="other"), "plugin_namespace"),
        (variants.set_attributes(extra=1), "attributes of"),
        (lambda model: paged_node(model).attributes.pop("softcap"), "attributes of"),
        (lambda model: setattr(paged_node(model), "overload", "int8"), "function"),
        (lambda model: setattr(paged_node(model), "op_type", "Other"), "number of"),
        (lambda model: paged_node(model).replace_input_with(9, None), "inputs of"),
        (set_shape("inputs", "key_pool.0", [24, 2, 128, 64]), "dims of key_pool.0"),
        (set_shape("outputs", "value_pool_out.1", [24, 2, 128, 64]), "dims of value_pool_out.1"),
        (set_shape("inputs", "past_lens", ["batch"]), "dims of past_lens"),
        (
            lambda model: setattr(model.graph.inputs[0], "dtype", ir.DataType.INT32),
            "type of input_ids",
        ),
        (second_reader, "readers of key_pool.1"),
        (swapped_inputs, "inputs"),
    ],
)
def test_postconditions(toys: Path, change: Callable[[ir.Model], None], words: str) -> None:
    model, spec = rewritten(toys / "gqa")
    require_paged(model, spec)
    change(model)
    with pytest.raises(SpecMismatchError, match=words):
        require_paged(model, spec)


def test_invalid_graph(toys: Path) -> None:
    model, spec = rewritten(toys / "gqa")
    next(node for node in model.graph if node.op_type == "Gather").op_type = "NoSuchOperator"
    model.graph.node(0).domain = "nowhere"
    with pytest.raises(OnnxRewriteError, match="invalid"):
        require_paged(model, spec)


@pytest.mark.parametrize("field", ["layers", "vocab_size", "reads_position_ids"])
def test_spec_of_other_facts(toys: Path, field: str) -> None:
    model = load_model(toys / "gqa" / "model.onnx")
    facts = survey(model)
    spec = resolve(BuildConfig(**DEFAULTS), facts)
    other: dict[str, Any] = {
        "layers": facts.layers[:1],
        "vocab_size": 7,
        "reads_position_ids": not facts.reads_position_ids,
    }
    wrong = ModelFacts(**{**vars(facts), field: other[field]})
    with pytest.raises(SpecMismatchError, match=field):
        rewrite(model, facts=wrong, spec=spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (variants.set_attributes(num_q_heads=8), "the attributes say"),
        (variants.set_attributes(head_dim=128), "the attributes say"),
        (variants.set_attributes(rope=3), "`rope` is 3"),
        (variants.set_attributes(extra=3), "`extra` of PagedAttention is unknown"),
        (variants.set_attributes(plugin_version="2"), "`plugin_version` is '2'"),
        (lambda model: paged_node(model).attributes.pop("softmax_scale"), "is missing"),
        (lambda model: paged_node(model).replace_input_with(10, None), "10 inputs"),
        (
            lambda model: paged_node(model).replace_input_with(
                9, variants.constant(model, "s", np.full((2, 2), 2, np.float32))
            ),
            "kv_scales",
        ),
    ],
)
def test_paged_nodes_are_checked(
    toys: Path, change: Callable[[ir.Model], None], words: str
) -> None:
    model, _ = rewritten(toys / "gqa")
    change(model)
    with pytest.raises(OnnxRewriteError, match=words):
        survey(model)


def test_names_of_engine_tensors_are_freed(toys: Path, tmp_path: Path) -> None:
    model = load_model(toys / "gqa" / "model.onnx")
    model.graph.node(8).outputs[0].name = "page_table"
    next(n for n in model.graph if n.op_type == "Sigmoid").outputs[0].name = "key_pool.0"
    facts = survey(model)
    spec = resolve(BuildConfig(**DEFAULTS), facts)
    save_model(rewrite(model, facts=facts, spec=spec), tmp_path)
    Paged(tmp_path, spec).step({0: np.arange(5)})


def test_weight_over_the_range_of_float16(tmp_path: Path) -> None:
    write_toy(tmp_path / "dense", "gqa", dtype=DType.FLOAT32)
    model = load_model(tmp_path / "dense" / "model.onnx")
    weight = model.graph.initializers["lm_head.weight"]
    array = weight.const_value.numpy().copy()
    array[3, 4] = 1e5
    weight.const_value = ir.tensor(array, name="lm_head.weight")
    (tmp_path / "big").mkdir()
    save_model(model, tmp_path / "big")
    with pytest.raises(ConfigError, match=r"`lm_head.weight` holds 100000.*--dtype bfloat16"):
        rewrite_file(tmp_path / "big", tmp_path / "paged", dtype="float16")
    rewrite_file(tmp_path / "big", tmp_path / "paged", dtype="bfloat16")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_converted_types_are_consistent(tmp_path: Path, dialect: str) -> None:
    """Positions and tables of PagedAttention stay float32; weights do not."""
    write_toy(tmp_path / "dense", dialect, dtype=DType.FLOAT32)
    spec = rewrite_file(tmp_path / "dense", tmp_path / "paged", dtype="bfloat16")
    model = load_model(tmp_path / "paged" / "model.onnx")
    types = {name: each.const_value.dtype for name, each in model.graph.initializers.items()}
    floats = {name for name, dtype in types.items() if dtype is ir.DataType.FLOAT}
    # Next to a norm's float32 numbers its weight may stay float32; a matrix may not.
    large = {name for name in floats if model.graph.initializers[name].const_value.size > 128}
    assert not any(name.endswith("weight") for name in large)
    assert spec.logits_dtype is DType.BFLOAT16
    for node in variants.attention_nodes(model):
        assert {value.const_value.dtype for value in node.inputs[8:]} == {ir.DataType.FLOAT}
    if dialect == "attention24-concat":
        assert any("inv_freq" in name for name in floats)
    size = (tmp_path / "paged" / "model.onnx.data").stat().st_size
    assert size < 0.8 * (tmp_path / "dense" / "model.onnx.data").stat().st_size
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
