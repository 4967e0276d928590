"""What onnxruntime-genai writes: each gives the numbers of a dense model of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_variants as variants
import runtime_variants as runtime
from rewrite_support import Dense, Paged, rewrite_file

from paged_trt.builder.onnx import multi_head, runtime_paged
from paged_trt.builder.onnx.facts import Dialect
from paged_trt.builder.onnx.graph import NodeSchema
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.scripts.example_models.toy import write_toy

TOLERANCE = 0.15
Write = Callable[..., Path]


def nothing(model: ir.Model) -> None:
    pass


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_changed(dialect: str, *changes: variants.Change) -> Path:
        source = tmp_path / f"toy-{dialect}"
        if not source.exists():
            source.mkdir()
            write_toy(source, dialect)
        model = load_model(source / "model.onnx")
        for change in changes:
            change(model)
        folder = tmp_path / "-".join(change.__name__ for change in changes)
        folder.mkdir()
        save_model(model, folder)
        return folder

    return write_changed


CASES: dict[str, tuple[str, variants.Change, list[variants.Change]]] = {
    "paged": ("gqa", nothing, [runtime.paged]),
    "paged_head_norms": ("gqa", runtime.norm_nodes, [runtime.norm_inputs, runtime.paged]),
    "paged_slots": ("gqa", nothing, [runtime.paged_slots]),
    "paged_window": ("gqa", runtime.window, [runtime.window, runtime.paged]),
    "head_norms": ("gqa", runtime.norm_nodes, [runtime.norm_inputs]),
    "windowed_cache": ("gqa", runtime.window, [runtime.windowed_cache]),
    "open_head_size": ("gqa", nothing, [runtime.open_head_size]),
    "scatter_cache": ("attention23-past", nothing, [variants.scatter_cache]),
    "scatter_cache_of_the_caller": (
        "attention23-past",
        nothing,
        [variants.scatter_cache_of_the_caller],
    ),
    "scatter_positions": ("attention23-past", nothing, [variants.scatter_positions]),
    "scatter_window": (
        "attention23-past",
        variants.left_window,
        [variants.scatter_cache, variants.left_window],
    ),
    "multi_head": ("attention23-concat", nothing, [runtime.multi_head]),
}


@pytest.mark.parametrize("mode", ["last", "all"])
@pytest.mark.parametrize("name", CASES)
def test_gives_the_dense_logits(write: Write, tmp_path: Path, name: str, mode: str) -> None:
    dialect, dense_change, changes = CASES[name]
    dense_folder = write(dialect, dense_change)
    source = dense_folder if changes == [dense_change] else write(dialect, *changes)
    spec = rewrite_file(source, tmp_path / "paged-model", logits=mode)
    paged = Paged(tmp_path / "paged-model", spec)
    generator = np.random.default_rng(0)
    sequences = {i: generator.integers(0, 512, n) for i, n in enumerate((141, 130, 3))}
    steps = [
        paged.step({i: s[:-2] for i, s in sequences.items()}),
        paged.step({i: s[-2:-1] for i, s in sequences.items()}, padding=1),
        paged.step({i: s[-1:] for i, s in sequences.items()}),
    ]
    dense = Dense.load(dense_folder)
    for i, tokens in sequences.items():
        expected = dense.logits(tokens, [len(tokens) - 2, 1, 1])
        if mode == "last":
            actual, expected = np.stack([step[i] for step in steps]), expected[-3:]
        else:
            actual = np.concatenate([step[i] for step in steps])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_head_norms_change_the_result(write: Write) -> None:
    tokens = np.arange(20)
    plain, normed = (Dense.load(write("gqa", each)) for each in (nothing, runtime.norm_nodes))
    difference = plain.logits(tokens, [20]) - normed.logits(tokens, [20])
    assert np.abs(difference).max() > 4 * TOLERANCE


def refused(model: ir.Model) -> str:
    with pytest.raises(OnnxRewriteError) as caught:
        survey(model)
    assert not str(caught.value).endswith(".")
    return str(caught.value)


@pytest.fixture
def paged_model(write: Write) -> ir.Model:
    return load_model(write("gqa", runtime.paged) / "model.onnx")


@pytest.fixture
def multi_head_model(write: Write) -> ir.Model:
    return load_model(write("attention23-concat", runtime.multi_head) / "model.onnx")


def nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain == "com.microsoft" and
            node.op_type in {"PagedAttention", "MultiHeadAttention"}]  # fmt: skip


def test_paged_facts(paged_model: ir.Model) -> None:
    facts = survey(paged_model)
    assert facts.dialect is Dialect.RUNTIME_PAGED_ATTENTION
    assert not facts.has_batch_axis
    assert not facts.reads_position_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", 0),
        ("rotary_offset", 8),
        ("v_head_size", 32),
        ("kv_cache_layout", "LATENT"),
        ("k_quant_type", "PER_TENSOR"),
        ("v_cache_dtype", "int4"),
        ("unheard_of", 1),
    ],
)
def test_paged_attribute(paged_model: ir.Model, name: str, value: object) -> None:
    for node in nodes(paged_model):
        node.attributes.add(ir.convenience.convert_attributes({name: value})[0])
    assert f"`{name}`" in refused(paged_model)


@pytest.mark.parametrize("name", runtime_paged.SCHEMA.refused_inputs)
def test_paged_input(paged_model: ir.Model, name: str) -> None:
    extra = variants.constant(paged_model, "extra", np.ones(4, np.float32))
    index = runtime_paged.SCHEMA.inputs.index(name)
    variants.set_input(nodes(paged_model)[0], index, extra)
    assert f"`{name}`" in refused(paged_model)


def test_slots_that_the_model_computes(paged_model: ir.Model) -> None:
    slots = variants.constant(paged_model, "fixed_slots", np.ones(4, np.int32))
    variants.set_input(nodes(paged_model)[0], 10, slots)
    message = refused(paged_model)
    assert "`slot_mapping` (`fixed_slots`) is computed" in message
    assert "as a graph input" in message


def test_paged_lengths_outside_attention(paged_model: ir.Model) -> None:
    offsets = variants.value_named(paged_model, "cumulative_sequence_lengths")
    rows = variants.add(paged_model, "Cast", [offsets], {"to": ir.DataType.INT64})
    head = paged_model.graph.outputs[0].producer()
    gathered = variants.add(paged_model, "Gather", [head.inputs[0], rows], {"axis": 0})
    variants.set_input(head, 0, gathered)
    paged_model.graph.sort()
    message = refused(paged_model)
    assert "cumulative_sequence_lengths" in message
    assert "outside attention" in message


def test_paged_cache_of_other_heads(paged_model: ir.Model) -> None:
    cache = nodes(paged_model)[1].inputs[4]
    cache.shape = ir.Shape(["num_blocks", "block_size", 4, 64])
    assert "4 heads of 64 elements" in refused(paged_model)


def test_one_head_norm_without_the_other(write: Write) -> None:
    model = load_model(write("gqa", runtime.norm_inputs) / "model.onnx")
    variants.set_input(variants.attention_nodes(model)[0], 15, None)
    assert "k_norm_weight" in refused(model)


def test_open_head_size_that_nothing_tells(write: Write) -> None:
    model = load_model(write("gqa", runtime.open_head_size) / "model.onnx")
    query = variants.attention_nodes(model)[0].inputs[0]
    query.shape = ir.Shape(["b", "s", "width"])
    assert "size of its heads is not known" in refused(model)


@pytest.mark.parametrize("name", multi_head.SCHEMA.refused_inputs)
def test_multi_head_input(multi_head_model: ir.Model, name: str) -> None:
    extra = variants.constant(multi_head_model, "extra", np.ones(4, np.float16))
    index = multi_head.SCHEMA.inputs.index(name)
    variants.set_input(nodes(multi_head_model)[0], index, extra)
    assert f"`{name}`" in refused(multi_head_model)


def test_multi_head_causal_after_concat(multi_head_model: ir.Model) -> None:
    for node in nodes(multi_head_model):
        node.attributes.add(ir.AttrInt64("unidirectional", 1))
    assert "counts positions from the first key" in refused(multi_head_model)


def test_multi_head_without_mask(multi_head_model: ir.Model) -> None:
    variants.set_input(nodes(multi_head_model)[0], 5, None)
    assert "no `attention_bias`" in refused(multi_head_model)


def test_multi_head_packed(multi_head_model: ir.Model) -> None:
    variants.set_input(nodes(multi_head_model)[0], 2, None)
    assert "packed" in refused(multi_head_model)


@pytest.fixture
def scatter_model(write: Write) -> ir.Model:
    return load_model(write("attention23-past", variants.scatter_cache) / "model.onnx")


def scatters(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "TensorScatter"]


def test_circular_cache(scatter_model: ir.Model) -> None:
    scatters(scatter_model)[1].attributes.add(ir.AttrString("mode", "circular"))
    assert "`mode` is 'circular'" in refused(scatter_model)


def test_cache_written_along_its_heads(scatter_model: ir.Model) -> None:
    scatters(scatter_model)[0].attributes.add(ir.AttrInt64("axis", 1))
    assert "third axis" in refused(scatter_model)


def test_cache_written_at_the_start(scatter_model: ir.Model) -> None:
    variants.set_input(scatters(scatter_model)[0], 2, None)
    assert "writes at the start" in refused(scatter_model)


def test_keys_and_values_written_at_different_places(scatter_model: ir.Model) -> None:
    other = variants._length_input(scatter_model, "other_indices")
    variants.set_input(scatters(scatter_model)[0], 2, other)
    assert "`other_indices`" in refused(scatter_model)


def test_valid_length_that_leaves_tokens_out(scatter_model: ir.Model) -> None:
    indices = variants.value_named(scatter_model, "write_indices")
    for node in variants.attention_nodes(scatter_model):
        variants.set_input(node, 6, variants.add(scatter_model, "Identity", [indices]))
    scatter_model.graph.sort()
    assert "`nonpad_kv_seqlen` is [0] with 1 new tokens" in refused(scatter_model)


def test_mask_over_a_cache_of_fixed_length(scatter_model: ir.Model) -> None:
    mask = variants.constant(scatter_model, "mask", np.zeros((1, 1, 1, 16), bool))
    variants.set_input(variants.attention_nodes(scatter_model)[0], 3, mask)
    assert "mask over a cache of fixed length" in refused(scatter_model)


def test_scattered_cache_that_is_not_causal(scatter_model: ir.Model) -> None:
    variants.set_attributes(is_causal=0)(scatter_model)
    assert "`is_causal` is 0" in refused(scatter_model)


@pytest.mark.parametrize("schema", [runtime_paged.SCHEMA, multi_head.SCHEMA])
def test_attributes_and_inputs_are_all_listed(schema: NodeSchema) -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    name = "PagedAttention" if schema is runtime_paged.SCHEMA else "MultiHeadAttention"
    found = next(each for each in state.get_all_operator_schema() if each.name == name)
    # Head norms have one epsilon here; GroupQueryAttention shares the list.
    assert set(found.attributes) <= schema.handled | schema.neutral.keys()
    assert [each.name for each in found.inputs] == list(schema.inputs)
    assert [each.name for each in found.outputs] == list(schema.outputs)
