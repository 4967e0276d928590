"""The dense decoder on every dialect, on other spellings of the same interface, and on none."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import rewrite_variants as variants
from engine_dirs import write_engine_dir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.runtime.compare import CompareOptions, compare_engine
from paged_trt.runtime.decoders import UPCAST_NOTE, open_decoder
from paged_trt.runtime.dense import Generation, greedy, open_session
from paged_trt.runtime.dense_signature import load_graph, read_signature
from paged_trt.runtime.onnxruntime_session import make_session
from paged_trt.runtime.reference_model import ReferenceModel
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

PROMPT = np.random.default_rng(3).integers(0, 256, 130)
STEPS = 6
DIALECTS = [pytest.param(dialect, id=dialect.value) for dialect in Dialect]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[Dialect, Path]:
    folder = tmp_path_factory.mktemp("toys")
    for dialect in Dialect:
        write_toy(folder / dialect.value, dialect)
    return {dialect: folder / dialect.value / "model.onnx" for dialect in Dialect}


@pytest.fixture(scope="module")
def expected(toys: dict[Dialect, Path]) -> Generation:
    """Without a cache: every step runs the whole text anew."""
    decoder = open_decoder(toys[Dialect.ATTENTION23_PAST])
    text, rows = list(PROMPT), []
    for _ in range(STEPS):
        decoder.start(len(text))
        rows.append(decoder.step(np.asarray(text)).astype(np.float32))
        text.append(int(rows[-1].argmax()))
    return Generation(np.asarray(text[len(PROMPT) :]), np.stack(rows))


def assert_same(found: Generation, expected: Generation, roundings: float = 16) -> None:
    limits = roundings * 2.0**-11 * np.abs(expected.logits).max(-1)
    assert (np.abs(found.logits - expected.logits).max(-1) <= limits).all()
    assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("variant", [variants.scatter_cache, variants.scatter_cache_of_the_caller])
def test_caches_that_tensor_scatter_writes(
    toys: dict[Dialect, Path], tmp_path: Path, expected: Generation, variant: Any
) -> None:
    model = load_model(toys[Dialect.ATTENTION23_PAST])
    variant(model)
    RemoveUnusedNodesPass()(model)
    save_model(model, tmp_path)
    path = tmp_path / "model.onnx"
    assert_same(greedy(open_decoder(path), PROMPT, STEPS), expected)
    write_engine_dir(path, tmp_path / "engine")
    options = CompareOptions(executor="reference", num_new_tokens=STEPS)
    assert compare_engine(path, tmp_path / "engine", options).passed


def test_a_cache_of_fixed_length_that_is_too_short(
    toys: dict[Dialect, Path], tmp_path: Path, expected: Generation
) -> None:
    lengths = {"enough": len(PROMPT) + STEPS, "short": len(PROMPT)}
    decoders = {}
    for name, length in lengths.items():
        model = load_model(toys[Dialect.ATTENTION23_PAST])
        variants.scatter_cache(model)
        RemoveUnusedNodesPass()(model)
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.shape is not None and len(value.shape) == 4:
                value.shape = ir.Shape(["batch_size", 2, length, 64])
        (tmp_path / name).mkdir()
        save_model(model, tmp_path / name)
        decoders[name] = open_decoder(tmp_path / name / "model.onnx")
    assert_same(greedy(decoders["enough"], PROMPT, STEPS), expected)
    with pytest.raises(ConfigError, match="holds 130 tokens and a sequence has 136"):
        greedy(decoders["short"], PROMPT, STEPS)


def edit(source: Path, target: Path, change: Any) -> Path:
    """A copy of a model beside its data, changed by `change(model)`."""
    model = onnx.load(source, load_external_data=False)
    change(model)
    target = source.parent / target
    onnx.save(model, target)
    return target


@pytest.mark.parametrize("dialect", DIALECTS)
def test_cache_agrees_with_no_cache(
    dialect: Dialect, toys: dict[Dialect, Path], expected: Generation
) -> None:
    decoder = open_decoder(toys[dialect])
    assert decoder.notes == ()
    assert_same(greedy(decoder, PROMPT, STEPS), expected)


def test_decoder_forgets_between_prompts(toys: dict[Dialect, Path], expected: Generation) -> None:
    decoder = open_decoder(toys[Dialect.GQA])
    greedy(decoder, PROMPT[:7], 2)
    assert_same(greedy(decoder, PROMPT, STEPS), expected)


def test_bfloat16_runs_as_float32_and_says_so(tmp_path: Path) -> None:
    write_toy(tmp_path / "bfloat16", Dialect.ATTENTION23_CONCAT, dtype=DType.BFLOAT16)
    write_toy(tmp_path / "float16", Dialect.ATTENTION23_CONCAT)
    decoder = open_decoder(tmp_path / "bfloat16" / "model.onnx")
    assert decoder.notes == (UPCAST_NOTE,)
    found = greedy(decoder, PROMPT, 1)
    other = greedy(open_decoder(tmp_path / "float16" / "model.onnx"), PROMPT, 1)
    # The weights were rounded to bfloat16: the same model, coarsely.
    assert_same(found, other, roundings=16 * 8)


def _rename(model: onnx.ModelProto, names: dict[str, str]) -> None:
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.name = names.get(value.name, value.name)


def _caches(model: onnx.ModelProto) -> list[str]:
    values = (*model.graph.input, *model.graph.output)
    return [value.name for value in values if value.name.startswith(("past", "present"))]


def _transformers(name: str) -> str:
    """`past_key_values.0.key` as the exporter of transformers spells it."""
    name = name.replace("past_key_values.", "past_key_values.layers.")
    name = name.replace("present.", "cache.layers.")
    return f"{name}s"


def _opaque(name: str) -> str:
    return f"cache_{zlib.crc32(name.encode())}"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("spelling", [_transformers, _opaque])
def test_names_of_caches_do_not_matter(
    dialect: Dialect, spelling: Any, toys: dict[Dialect, Path], expected: Generation
) -> None:
    def change(model: onnx.ModelProto) -> None:
        _rename(model, {name: spelling(name) for name in _caches(model)})
        # The order of the outputs does not matter either where a node tells.
        outputs = list(model.graph.output)
        del model.graph.output[:]
        model.graph.output.extend(reversed(outputs))

    path = edit(toys[dialect], Path(f"{spelling.__name__}.onnx"), change)
    assert_same(greedy(open_decoder(path), PROMPT, STEPS), expected)


def test_caches_behind_another_node_pair_by_name(
    toys: dict[Dialect, Path], expected: Generation
) -> None:
    def change(model: onnx.ModelProto) -> None:
        _hide_producers(model)
        outputs = list(model.graph.output)
        del model.graph.output[:]
        model.graph.output.extend(reversed(outputs))

    path = edit(toys[Dialect.GQA], Path("hidden.onnx"), change)
    assert_same(greedy(open_decoder(path), PROMPT, STEPS), expected)


def test_caches_without_names_or_producers_pair_by_order(toys: dict[Dialect, Path]) -> None:
    def change(model: onnx.ModelProto) -> None:
        _hide_producers(model)
        _rename(model, {name: _opaque(name) for name in _caches(model)})

    path = edit(toys[Dialect.GQA], Path("order.onnx"), change)
    graph = load_graph(path).graph
    pasts = [value.name for value in graph.input if value.name.startswith("cache")]
    presents = [value.name for value in graph.output if value.name.startswith("cache")]
    signature = read_signature(load_graph(path))
    assert [(port.past, port.present) for port in signature.caches] == list(
        zip(pasts, presents, strict=True)
    )


def _hide_producers(model: onnx.ModelProto) -> None:
    presents = [name for name in _caches(model) if name.startswith("present")]
    _rename_outputs = {name: f"{name}.inner" for name in presents}
    for node in model.graph.node:
        node.output[:] = [_rename_outputs.get(name, name) for name in node.output]
    for name in presents:
        model.graph.node.append(onnx.helper.make_node("Identity", [f"{name}.inner"], [name]))


def test_batch_and_tokens_may_be_int32(toys: dict[Dialect, Path], expected: Generation) -> None:
    def change(model: onnx.ModelProto) -> None:
        _rename(model, {"input_ids": "wide_ids"})
        first = next(value for value in model.graph.input if value.name == "wide_ids")
        first.name = "input_ids"
        first.type.tensor_type.elem_type = onnx.TensorProto.INT32
        cast = onnx.helper.make_node("Cast", ["input_ids"], ["wide_ids"], to=onnx.TensorProto.INT64)
        model.graph.node.insert(0, cast)

    path = edit(toys[Dialect.GQA_SPLIT], Path("int32.onnx"), change)
    assert_same(greedy(open_decoder(path), PROMPT, STEPS), expected)


def _add_input(name: str, kind: int, shape: list[Any]) -> Any:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, shape))

    return change


def _drop_output(model: onnx.ModelProto) -> None:
    model.graph.output.remove(model.graph.output[-1])


def _fix_past(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_value = 512


def _second_result(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "scores"
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("hidden", onnx.TensorProto.FLOAT16, [1, "s", 8])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            _add_input("image", onnx.TensorProto.FLOAT, [1, 3, "h"]), "`image`", id="unknown input"
        ),
        pytest.param(
            _add_input("use_cache_branch", onnx.TensorProto.BOOL, [1]),
            "`use_cache_branch`",
            id="merged decoder",
        ),
        pytest.param(
            _add_input("mask_4d", onnx.TensorProto.FLOAT16, [1, 1, "s", "t"]),
            "`mask_4d`",
            id="float mask",
        ),
        pytest.param(_drop_output, "4 cache inputs .* and 3 cache outputs", id="lost present"),
        pytest.param(_fix_past, "one free axis", id="static cache"),
        pytest.param(_second_result, "one output of logits", id="two results"),
    ],
)
def test_unknown_interface_is_named(change: Any, message: str, toys: dict[Dialect, Path]) -> None:
    model = load_graph(toys[Dialect.GQA])
    change(model)
    with pytest.raises(UnsupportedError, match=message):
        read_signature(model)


def test_missing_file_and_no_model_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no ONNX file at"):
        open_decoder(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ConfigError, match="is no ONNX model"):
        open_decoder(tmp_path / "text.onnx")


def test_missing_weights_are_a_named_error(toys: dict[Dialect, Path], tmp_path: Path) -> None:
    lonely = tmp_path / "model.onnx"
    lonely.write_bytes(toys[Dialect.GQA].read_bytes())
    with pytest.raises(UnsupportedError, match="onnxruntime cannot run"):
        open_decoder(lonely)


@pytest.mark.parametrize("kind", ["dense", "engine"])
def test_products_with_int4_weights_are_exact(tmp_path: Path, kind: str) -> None:
    """onnxruntime would round their activations to INT8, on one side of a comparison or both."""
    generator = np.random.default_rng(0)
    weight = onnx.helper.make_tensor(
        "weight", onnx.TensorProto.INT4, [64, 32], generator.integers(-8, 8, 64 * 32)
    )
    scales = onnx.numpy_helper.from_array(
        generator.uniform(0.1, 0.2, (2, 32)).astype(np.float32), "scales"
    )
    nodes = [
        onnx.helper.make_node(
            "DequantizeLinear", ["weight", "scales"], ["full"], axis=0, block_size=32
        ),
        onnx.helper.make_node("MatMul", ["x", "full"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 64])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 32])],
        [weight, scales],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    model.ir_version = 10
    onnx.save(model, tmp_path / "model.onnx")
    session = (
        open_session(tmp_path / "model.onnx")
        if kind == "dense"
        else reference_session(tmp_path / "model.onnx")
    )
    x = generator.standard_normal((5, 64)).astype(np.float32)
    blocks = onnx.numpy_helper.to_array(scales).repeat(32, axis=0)
    expected = x @ (onnx.numpy_helper.to_array(weight).astype(np.float32) * blocks)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)


def reference_session(path: Path) -> Any:
    model = ReferenceModel(path, None)
    return make_session(onnxruntime, model)
