"""Nothing is dropped: what PagedAttention cannot do is refused by the name of the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_variants as variants
from quantised_weights import quantise_weights
from rewrite_support import DEFAULTS

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx import attention, group_query, paged
from paged_trt.builder.onnx.graph import NodeSchema
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

Load = Callable[[str], ir.Model]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("toys")
    for dialect in Dialect:
        write_toy(folder / dialect.value, dialect)
    return lambda name: load_model(folder / name / "model.onnx")


def refused(model: ir.Model) -> str:
    model.graph.sort()
    before = [(node.name, [value and value.name for value in node.inputs]) for node in model.graph]
    with pytest.raises(OnnxRewriteError) as caught:
        survey(model)
    after = [(node.name, [value and value.name for value in node.inputs]) for node in model.graph]
    assert before == after
    assert caught.value.node
    assert not str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize(
    ("dialect", "name", "value"),
    [
        ("attention23-past", "qk_matmul_output_mode_of_the_future", 1),
        ("attention23-past", "softmax_precision", 10),
        ("attention23-past", "softmax_precision", 16),
        ("attention23-concat", "is_causal", 1),
        ("attention23-concat", "left_window_size", 4),
        ("attention23-concat", "right_window_size", 0),
        ("gqa", "smooth_softmax", 1),
        ("gqa", "causal", 0),
        ("gqa", "kv_cache_bit_width", 8),
        ("gqa", "k_quant_type", "PER_TENSOR"),
        ("gqa", "v_quant_type", "PER_CHANNEL"),
        ("gqa", "local_window_size", 0),
        ("gqa", "num_heads", 3),
        ("gqa", "kv_num_heads", 4),
        ("gqa", "num_heads", 8),
        ("gqa", "unheard_of", 1),
    ],
)
def test_attribute(load: Load, dialect: str, name: str, value: object) -> None:
    model = load(dialect)
    variants.set_attributes(**{name: value})(model)
    message = refused(model)
    causes = {"num_heads": "head", "local_window_size": "window"}
    words = [name, causes.get(name, name)]
    if dialect.endswith("concat"):
        words = ["Concat(past, new)"]
    assert any(word in message for word in words)


@pytest.mark.parametrize("name", group_query.SCHEMA.refused_inputs)
def test_group_query_input(load: Load, name: str) -> None:
    model = load("gqa")
    extra = variants.constant(model, "extra", np.ones(4, np.float16))
    for node in variants.attention_nodes(model):
        variants.set_input(node, group_query.SCHEMA.inputs.index(name), extra)
    assert f"`{name}`" in refused(model)


@pytest.mark.parametrize("schema", [attention.SCHEMA, group_query.SCHEMA])
def test_output(load: Load, schema: NodeSchema) -> None:
    model = load("gqa" if schema is group_query.SCHEMA else "attention23-past")
    node = variants.attention_nodes(model)[0]
    node.resize_outputs(4)
    node.outputs[3].name = "scores"
    model.graph.outputs.append(node.outputs[3])
    assert schema.outputs[3] in refused(model)


def test_right_window_that_shows_later_keys(load: Load) -> None:
    model = load("attention23-past")
    variants.right_window(model)
    variants.set_attributes(right_window_size=1)(model)
    assert "`right_window_size` is 1" in refused(model)


def test_nonpad_kv_seqlen(load: Load) -> None:
    model = load("attention24-concat")
    lengths = variants.constant(model, "lengths", np.ones(1, np.int64))
    variants.set_input(variants.attention_nodes(model)[1], 6, lengths)
    assert "nonpad_kv_seqlen" in refused(model)


def test_input_of_the_future(load: Load) -> None:
    model = load("gqa")
    extra = variants.constant(model, "extra", np.ones(4, np.float16))
    variants.set_input(variants.attention_nodes(model)[0], 17, extra)
    assert "input 17" in refused(model)


def test_present_without_past(load: Load) -> None:
    model = load("attention23-past")
    for node in variants.attention_nodes(model):
        variants.set_input(node, 4, None)
        variants.set_input(node, 5, None)
    assert "`present_key` and no `past_key`" in refused(model)


def test_attention_without_cache(load: Load) -> None:
    model = load("attention23-concat")
    node = variants.attention_nodes(model)[0]
    for index in (1, 2):
        repeated = node.inputs[index]
        while repeated.producer().op_type != "Concat":
            repeated = repeated.producer().inputs[0]
        variants.set_input(node, index, repeated.producer().inputs[1])
    message = refused(model)
    assert "no KV cache" in message
    assert "use_cache=True" in message


def test_cache_cut_to_a_window(load: Load) -> None:
    model = load("attention23-concat")
    cache = variants.value_named(model, "past_key_values.1.key")
    ((joined, _),) = [use for use in cache.uses() if use[0].op_type == "Concat"]
    start, end, axis = (
        variants.constant(model, f"window_{i}", np.array([number], np.int64))
        for i, number in enumerate((-99, 2**62, 2))
    )
    variants.set_input(joined, 0, variants.add(model, "Slice", [cache, start, end, axis]))
    message = refused(model)
    assert f"Concat `{joined.name}`, whose first input `variant_Slice" in message
    assert "`DynamicCache()` of transformers without a configuration" in message


def test_no_mask(load: Load) -> None:
    model = load("attention23-past")
    variants.drop_mask(model)
    assert "no mask" in refused(model)


def test_tiled_heads_are_no_repeated_heads(load: Load) -> None:
    model = load("attention23-concat")
    node = variants.attention_nodes(model)[0]
    present = node.inputs[1]
    while present.producer().op_type != "Concat":
        present = present.producer().inputs[0]
    times = variants.constant(model, "times", np.array([1, 2, 1, 1], np.int64))
    variants.set_input(node, 1, variants.add(model, "Tile", [present, times]))
    assert "repeat each head in place" in refused(model)


@pytest.mark.parametrize(
    ("change", "attributes", "words"),
    [
        (variants.three_dimensional_concat, {"kv_num_heads": 4}, "makes 2 heads, and the node"),
        (variants.three_dimensional_repeated, {"kv_num_heads": 2}, "makes 4 heads, and the node"),
        (variants.three_dimensional_repeated, {"kv_num_heads": 0}, "`kv_num_heads` is 0"),
        (variants.three_dimensional_concat, {"q_num_heads": 8}, "8 heads of 64 need 512"),
    ],
)
def test_heads_of_three_dimensional_operands(
    load: Load, change: variants.Change, attributes: dict[str, int], words: str
) -> None:
    model = load("attention23-concat")
    change(model)
    variants.set_attributes(**attributes)(model)
    assert words in refused(model)


@pytest.mark.parametrize("dialect", ["attention23-past", "gqa"])
def test_shared_cache(load: Load, dialect: str) -> None:
    model = load(dialect)
    first, second = variants.attention_nodes(model)
    index = 4 if dialect == "attention23-past" else 3
    variants.set_input(second, index, first.inputs[index])
    message = refused(model)
    assert "past_key_values.0.key" in message
    assert first.name in message
    assert second.name in message


@pytest.mark.parametrize("heads", [4, "heads"])
@pytest.mark.parametrize("dialect", ["attention23-past", "gqa"])
def test_heads_of_the_value_cache(load: Load, dialect: str, heads: object) -> None:
    model = load(dialect)
    cache = variants.value_named(model, "past_key_values.1.value")
    cache.shape = ir.Shape(["batch", heads, "past", 64])
    assert "past_key_values.1.value" in refused(model)


def test_cache_of_the_layer_before(load: Load) -> None:
    model = load("attention23-concat")
    first, second = variants.attention_nodes(model)
    variants.set_input(second, 1, first.inputs[1])
    assert "share a cache" in refused(model)


@pytest.mark.parametrize("index", [5, 6])
def test_group_query_lengths(load: Load, index: int) -> None:
    model = load("gqa")
    node = variants.attention_nodes(model)[0]
    one = variants.constant(model, "one", np.array(1, np.int32))
    variants.set_input(node, index, variants.add(model, "Add", [node.inputs[index], one]))
    message = refused(model)
    assert group_query.SCHEMA.inputs[index] in message
    assert "1 new tokens after 0 past ones" in message


def test_group_query_lengths_that_depend_on_data(load: Load) -> None:
    model = load("gqa")
    node = variants.attention_nodes(model)[0]
    ids = variants.value_named(model, "input_ids")
    largest = variants.add(model, "ReduceMax", [ids], {"keepdims": 0})
    total = variants.add(model, "Cast", [largest], {"to": ir.DataType.INT32})
    variants.set_input(node, 6, total)
    assert "total_sequence_length" in refused(model)


def test_rope_table_that_is_computed(load: Load) -> None:
    model = load("gqa")
    node = variants.attention_nodes(model)[0]
    variants.set_input(node, 7, variants.add(model, "Neg", [node.inputs[7]]))
    assert "cos_cache" in refused(model)


def test_positions_that_do_not_count_tokens(load: Load) -> None:
    model = load("gqa")
    variants.group_query_positions(model)
    one = variants.constant(model, "one", np.array(1, np.int64))
    shifted = variants.add(model, "Add", [variants.value_named(model, "position_ids"), one])
    for node in variants.attention_nodes(model):
        variants.set_input(node, 9, shifted)
    assert "position_ids" in refused(model)


def test_cache_length_outside_attention(load: Load) -> None:
    model = load("attention23-concat")
    total = variants.value_named(model, "/model/Add/output_0")
    scale = variants.add(model, "Cast", [total], {"to": ir.DataType.FLOAT16})
    head = model.graph.outputs[0].producer()
    scaled = variants.add(model, "Mul", [head.inputs[0], scale])
    variants.set_input(head, 0, scaled)
    message = refused(model)
    assert "outside attention" in message
    assert scaled.producer().name in message


def test_present_read_outside_attention(load: Load) -> None:
    model = load("attention23-past")
    present = variants.attention_nodes(model)[0].outputs[1]
    mean = variants.add(model, "ReduceMean", [present], {"keepdims": 0})
    head = model.graph.outputs[0].producer()
    variants.set_input(head, 0, variants.add(model, "Mul", [head.inputs[0], mean]))
    assert "outside attention" in refused(model)


def test_largest_position_of_a_step(load: Load) -> None:
    model = load("attention23-concat")
    largest = variants.add(
        model, "ReduceMax", [variants.value_named(model, "position_ids")], {"keepdims": 0}
    )
    scale = variants.add(model, "Cast", [largest], {"to": ir.DataType.FLOAT16})
    head = model.graph.outputs[0].producer()
    variants.set_input(head, 0, variants.add(model, "Mul", [head.inputs[0], scale]))
    assert "works along the tokens" in refused(model)


def test_convolution_along_the_tokens(load: Load) -> None:
    model = load("attention23-past")
    head = model.graph.outputs[0].producer()
    kernel = variants.constant(model, "kernel", np.ones((128, 1, 3), np.float16))
    mixed = variants.add(model, "Conv", [head.inputs[0], kernel])
    variants.set_input(head, 0, mixed)
    assert "Conv works along the tokens" in refused(model)


def test_attention_in_primitive_nodes(load: Load) -> None:
    model = load("attention23-past")
    head = model.graph.outputs[0].producer()
    hidden = head.inputs[0]
    turned = variants.add(model, "Transpose", [hidden], {"perm": [0, 2, 1]})
    weights = variants.add(model, "Softmax", [variants.add(model, "MatMul", [hidden, turned])])
    variants.set_input(head, 0, variants.add(model, "MatMul", [weights, hidden]))
    assert "spelt out" in refused(model)


def test_presents_behind_an_identity(load: Load) -> None:
    model = load("gqa")
    for index, output in list(enumerate(model.graph.outputs))[1:]:
        model.graph.outputs[index] = variants.add(model, "Identity", [output])
    assert len(survey(model).layers) == 2


def test_opset_that_cannot_be_raised(load: Load) -> None:
    model = load("gqa")
    facts = survey(model)
    model.opset_imports[""] = 20
    next(node for node in model.graph if node.op_type == "Sigmoid").op_type = "GroupNormalization"
    spec = resolve(BuildConfig(**DEFAULTS), facts)
    with pytest.raises(OnnxRewriteError, match="GroupNormalization of opset 20"):
        rewrite(model, facts=facts, spec=spec)


def test_unknown_graph_input(load: Load) -> None:
    model = load("gqa")
    state = ir.Value(
        name="past_conv.0", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape([1, 128])
    )
    model.graph.inputs.append(state)
    head = model.graph.outputs[0].producer()
    variants.set_input(head, 0, variants.add(model, "Add", [head.inputs[0], state]))
    assert "past_conv.0" in refused(model)


def test_second_output(load: Load) -> None:
    model = load("gqa")
    model.graph.outputs.append(model.graph.outputs[0].producer().inputs[0])
    assert "one output, the logits" in refused(model)


@pytest.mark.parametrize("dtype", [ir.DataType.INT32, ir.DataType.FLOAT])
def test_type_of_ids(load: Load, dtype: ir.DataType) -> None:
    model = load("gqa")
    variants.value_named(model, "input_ids").dtype = dtype
    assert "INT64" in refused(model)


@pytest.mark.parametrize("dialect", ["gqa", "attention23-concat"])
def test_logits_of_one_token(load: Load, dialect: str) -> None:
    model = load(dialect)
    head = model.graph.outputs[0].producer()
    start, end, axis = (
        variants.constant(model, f"last_{i}", np.array([number], np.int64))
        for i, number in enumerate((-1, 2**62, 1))
    )
    last = variants.add(model, "Slice", [head.inputs[0], start, end, axis])
    variants.set_input(head, 0, last)
    model.graph.outputs[0].shape = ir.Shape(["batch_size", 1, 512])
    message = refused(model)
    assert "its shape is [batch_size,1,512], not [batch, tokens, vocabulary]" in message
    assert "logits of all tokens (without `logits_to_keep`)" in message


@pytest.mark.parametrize("shape", [[2, "sequence"], [1, 8], ["batch", 1]])
@pytest.mark.parametrize("dialect", ["gqa", "attention23-concat"])
def test_fixed_number_of_tokens(load: Load, dialect: str, shape: list[object]) -> None:
    model = load(dialect)
    variants.value_named(model, "input_ids").shape = ir.Shape(shape)
    message = refused(model)
    assert f"its shape is [{', '.join(map(str, shape))}], and a step holds any" in message
    assert "dynamic_shapes" in message


def test_batch_fixed_at_one(load: Load) -> None:
    model = load("gqa")
    variants.value_named(model, "input_ids").shape = ir.Shape([1, "sequence"])
    assert len(survey(model).layers) == 2


def test_no_attention_node(load: Load) -> None:
    model = load("attention23-past")
    for node in variants.attention_nodes(model):
        node.op_type = "Softmax"
    message = refused(model)
    assert "no attention node" in message
    assert "torch.onnx.export(model, ..., dynamo=True, opset_version=23)" in message


@pytest.mark.parametrize("op_type", ["DecoderMaskedMultiHeadAttention", "Attention"])
def test_not_yet(load: Load, op_type: str) -> None:
    model = load("gqa")
    for node in variants.attention_nodes(model):
        node.op_type = op_type
    message = refused(model)
    assert f"com.microsoft::{op_type}" in message
    assert "is not supported" in message


@pytest.mark.parametrize(
    ("op_type", "reason"),
    [
        ("AttentionPlugin", "Edge-LLM, whose file is not a whole model: its runtime looks up"),
        ("TRT_Attention", ", with a KV cache of its own"),
    ],
)
def test_attention_of_another_plugin(load: Load, op_type: str, reason: str) -> None:
    model = load("gqa")
    for node in variants.attention_nodes(model):
        node.domain, node.op_type = "trt_edgellm", op_type
    message = refused(model)
    assert f"trt_edgellm::{op_type} is an operator of TensorRT" in message
    assert reason in message
    assert "export_huggingface" in message


def test_weights_that_only_onnxruntime_reads(load: Load) -> None:
    model = load("gqa")
    head = model.graph.outputs[0].producer()
    head.domain, head.op_type = "com.microsoft", "MatMulNBits"
    message = refused(model)
    assert "com.microsoft::MatMulNBits" in message
    assert "use_qdq=true" in message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("uint8", "it dequantises UINT8 codes"),
        ("uint4-blocks", "it dequantises UINT4 codes"),
        ("int8-shifted", "are not all 0, and TensorRT takes no others"),
    ],
)
def test_quantised_weights_that_tensorrt_does_not_read(
    tmp_path: Path, kind: str, reason: str
) -> None:
    write_toy(tmp_path / "plain", "gqa")
    quantise_weights(tmp_path / "plain" / "model.onnx", tmp_path / "model.onnx", kind=kind)
    message = refused(load_model(tmp_path / "model.onnx"))
    assert reason in message
    assert "is_symmetric=true" in message


def test_mixed_dialects(load: Load) -> None:
    model = load("gqa")
    node = variants.attention_nodes(model)[0]
    node.op_type, node.domain = "Attention", ""
    assert "mixes" in refused(model)


@pytest.mark.parametrize("schema", [attention.SCHEMA, group_query.SCHEMA, paged.SCHEMA])
def test_every_name_of_an_operator_is_listed_once(schema: NodeSchema) -> None:
    assert not schema.handled & schema.neutral.keys()
    assert set(schema.refused_inputs) <= set(schema.inputs)
    assert set(schema.refused_outputs) <= set(schema.outputs)


def test_attributes_and_inputs_of_attention_are_all_listed() -> None:
    import onnx

    for version in (23, 24, 25):
        schema = onnx.defs.get_schema("Attention", version, "")
        known = attention.SCHEMA.handled | attention.SCHEMA.neutral.keys()
        assert set(schema.attributes) <= known
        names = [each.name for each in schema.inputs]
        assert list(attention.SCHEMA.inputs[: len(names)]) == names
        assert [each.name for each in schema.outputs] == list(attention.SCHEMA.outputs)


def test_attributes_and_inputs_of_group_query_attention_are_all_listed() -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    schema = next(
        each for each in runtime.get_all_operator_schema() if each.name == "GroupQueryAttention"
    )
    known = group_query.SCHEMA.handled | group_query.SCHEMA.neutral.keys()
    assert set(schema.attributes) <= known
    assert [each.name for each in schema.inputs] == list(group_query.SCHEMA.inputs)
    assert [each.name for each in schema.outputs] == list(group_query.SCHEMA.outputs)
