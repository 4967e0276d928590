"""No attribute, input or output of an attention operator is dropped: each one is accounted for.

A name that a dialect reads changes the result of the rewritten model, or has to fit the shapes and
is refused where it does not; a name that it does not read is refused at every value that would
change something. The names are those of the dialects' schemas, which other tests compare with the
operators' own: a name that is added and not tested fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_variants as variants
import runtime_variants as runtime
from rewrite_support import Paged, rewrite_file

from paged_trt.builder.onnx import attention, group_query, multi_head, paged, runtime_paged
from paged_trt.builder.onnx.graph import NodeSchema
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.scripts.example_models.toy import write_toy

SCHEMAS: Final[dict[str, NodeSchema]] = {
    "Attention": attention.SCHEMA,
    "GroupQueryAttention": group_query.SCHEMA,
    "MultiHeadAttention": multi_head.SCHEMA,
    "PagedAttention of onnxruntime": runtime_paged.SCHEMA,
    "PagedAttention": paged.SCHEMA,
}
DIFFERENCE = 0.3
"""Of logits of about 30: two roundings to float16 above the tolerance of equal models."""
TOKENS = np.random.default_rng(5).integers(0, 512, 140)
Change = Callable[[ir.Model], None]


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    names = {"Attention", "GroupQueryAttention", "MultiHeadAttention", "PagedAttention"}
    return [node for node in model.graph if node.op_type in names]


def put(**attributes: Any) -> Change:
    def change(model: ir.Model) -> None:
        for node in attention_nodes(model):
            found = ir.convenience.convert_attributes(attributes)
            node.attributes.update({each.name: each for each in found})

    return change


def both(*changes: Change) -> Change:
    def change(model: ir.Model) -> None:
        for each in changes:
            each(model)

    return change


def no_change(model: ir.Model) -> None:
    pass


def rotate_back(name: str) -> Change:
    """Another rope table of the same shape."""

    def change(model: ir.Model) -> None:
        for node in attention_nodes(model):
            index = schema_of(node).inputs.index(name)
            array = node.inputs[index].const_value.numpy()
            flat = variants.constant(model, f"{name}/{node.name}", array[::-1].copy())
            variants.set_input(node, index, flat)

    return change


def scaled_norm(part: int) -> Change:
    def change(model: ir.Model) -> None:
        for node in attention_nodes(model):
            index = schema_of(node).inputs.index(("q_norm_weight", "k_norm_weight")[part])
            array = node.inputs[index].const_value.numpy() * np.float16(2)
            name = f"norm/{part}/{node.name}"
            variants.set_input(node, index, variants.constant(model, name, array))

    return change


def sinks(model: ir.Model) -> None:
    for node in attention_nodes(model):
        index = schema_of(node).inputs.index(
            "head_sink" if "head_sink" in schema_of(node).inputs else "sinks"
        )
        dtype = np.float32 if node.domain == "paged_trt" else np.float16
        array = np.array([0.5, 9.0, -1.0, 8.0], dtype)
        variants.set_input(node, index, variants.constant(model, f"sinks/{node.name}", array))


def schema_of(node: ir.Node) -> NodeSchema:
    is_ours = node.domain == "paged_trt"
    name = node.op_type
    if name == "PagedAttention" and not is_ours:
        name += " of onnxruntime"
    return SCHEMAS[name]


NORMED = runtime.norm_inputs
CAUSAL = variants.causal_without_mask
RUNTIME: Final[dict[str, tuple[Change, Change]]] = {
    "scale": (no_change, put(scale=0.6)),
    "softcap": (no_change, put(softcap=0.5)),
    "local_window_size": (no_change, put(local_window_size=5)),
    "do_rotary": (no_change, put(do_rotary=0)),
    "rotary_interleaved": (no_change, put(rotary_interleaved=1)),
    "qk_norm_epsilon": (NORMED, both(NORMED, put(qk_norm_epsilon=9.0))),
    "q_norm_epsilon": (NORMED, both(NORMED, put(q_norm_epsilon=9.0))),
    "k_norm_epsilon": (NORMED, both(NORMED, put(k_norm_epsilon=9.0))),
    "cos_cache": (no_change, rotate_back("cos_cache")),
    "sin_cache": (no_change, rotate_back("sin_cache")),
    "head_sink": (no_change, sinks),
    "q_norm_weight": (NORMED, both(NORMED, scaled_norm(0))),
    "k_norm_weight": (NORMED, both(NORMED, scaled_norm(1))),
}
CHANGES: Final[dict[str, dict[str, tuple[Change, Change]]]] = {
    "Attention": {
        "scale": (no_change, put(scale=0.6)),
        "softcap": (no_change, put(softcap=0.5)),
        "left_window_size": (CAUSAL, both(variants.left_window, put(left_window_size=4))),
    },
    "GroupQueryAttention": RUNTIME,
    "PagedAttention of onnxruntime": {
        **{
            name: (both(before, runtime.paged), both(after, runtime.paged))
            for name, (before, after) in RUNTIME.items()
        },
        "head_sink": (runtime.paged, both(runtime.paged, sinks)),
    },
    "MultiHeadAttention": {"scale": (no_change, put(scale=0.6))},
    "PagedAttention": {
        "softmax_scale": (no_change, put(softmax_scale=0.6)),
        "softcap": (no_change, put(softcap=0.5)),
        "window": (no_change, put(window=5)),
        "rope": (no_change, put(rope=2)),
        "sinks": (no_change, sinks),
    },
}
"""By operator and name: a model, and one that differs in what that name says."""
REFUSED: Final[dict[str, dict[str, Change]]] = {
    "Attention": {
        "is_causal": both(variants.drop_mask, put(is_causal=0)),
        "right_window_size": both(variants.right_window, put(right_window_size=3)),
        "q_num_heads": both(variants.three_dimensional, put(q_num_heads=3)),
        "kv_num_heads": both(variants.three_dimensional, put(kv_num_heads=4)),
    },
    "GroupQueryAttention": {"num_heads": put(num_heads=3), "kv_num_heads": put(kv_num_heads=4)},
    "PagedAttention of onnxruntime": {
        "num_heads": both(runtime.paged, put(num_heads=3)),
        "kv_num_heads": both(runtime.paged, put(kv_num_heads=4)),
    },
    "MultiHeadAttention": {
        "num_heads": put(num_heads=3),
        "unidirectional": put(unidirectional=1),
    },
    "PagedAttention": {
        name: put(**{name: value})
        for name, value in {
            "num_q_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 32,
            "value_head_dim": 32,
            "rotary_dim": 32,
        }.items()
    },
}
"""By operator and name: a value that the shapes, or the rest of the node, contradict."""
OTHER_INPUTS: Final[dict[str, set[str]]] = {
    # Query, key and value, caches, and what test_masks, test_refusals and test_runtime_dialects
    # show to be proved or refused: masks, lengths, positions, slots.
    "Attention": {"Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"},
    "GroupQueryAttention": {
        *("query", "key", "value", "past_key", "past_value"),
        *("seqlens_k", "total_sequence_length", "position_ids"),
    },
    "MultiHeadAttention": {"query", "key", "value", "attention_bias", "past_key", "past_value"},
    "PagedAttention of onnxruntime": {
        *("query", "key", "value", "key_cache", "value_cache"),
        *("cumulative_sequence_length", "past_seqlens", "block_table"),
        *("slot_mapping", "attention_metadata"),
    },
    "PagedAttention": {
        *("query", "key", "value", "key_pool", "value_pool"),
        *("page_table", "query_start_offsets", "past_lens", "rope_cos_sin", "kv_scales"),
    },
}
"""Inputs that are data of the step, by operator."""
SET_BY_THE_ENGINE: Final = {"num_pages", "max_pages_per_seq", "max_batch_size"}
DIALECT_OF: Final = {"Attention": "attention23-past", "MultiHeadAttention": "attention23-concat"}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for dialect in ("attention23-past", "attention23-concat", "gqa"):
        write_toy(folder / dialect, dialect)
    rewrite_file(folder / "gqa", folder / "PagedAttention", logits="all")
    return folder


def load(toys: Path, operator: str) -> ir.Model:
    own = toys / operator
    model = load_model((own if own.is_dir() else toys / DIALECT_OF.get(operator, "gqa")) /
                       "model.onnx")  # fmt: skip
    if operator == "MultiHeadAttention":
        runtime.multi_head(model)
    return model


def logits_of(model: ir.Model, folder: Path) -> np.ndarray:
    (folder / "dense").mkdir(parents=True)
    model.graph.sort()
    save_model(model, folder / "dense")
    spec = rewrite_file(folder / "dense", folder / "paged", logits="all")
    return Paged(folder / "paged", spec).step({0: TOKENS})[0]


def cases(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(operator, name, id=f"{operator}-{name}")
        for operator, names in table.items()
        for name in names
    ]


@pytest.mark.parametrize(("operator", "name"), cases(CHANGES))
def test_it_changes_the_result(toys: Path, tmp_path: Path, operator: str, name: str) -> None:
    found = []
    for index, change in enumerate(CHANGES[operator][name]):
        model = load(toys, operator)
        change(model)
        assert {schema_of(node) is SCHEMAS[operator] for node in attention_nodes(model)} == {True}
        found.append(logits_of(model, tmp_path / str(index)))
    assert np.isfinite(found[0]).all()
    assert np.isfinite(found[1]).all()
    assert np.abs(found[0] - found[1]).max() > DIFFERENCE


@pytest.mark.parametrize(("operator", "name"), cases(REFUSED))
def test_it_has_to_fit(toys: Path, operator: str, name: str) -> None:
    survey(load(toys, operator))
    model = load(toys, operator)
    REFUSED[operator][name](model)
    model.graph.sort()
    with pytest.raises(OnnxRewriteError):
        survey(model)


@pytest.mark.parametrize("operator", SCHEMAS)
def test_every_attribute_that_is_read_is_tested(operator: str) -> None:
    tested = CHANGES[operator].keys() | REFUSED[operator].keys()
    missing = SCHEMAS[operator].handled - tested
    assert missing == (SET_BY_THE_ENGINE if operator == "PagedAttention" else set())


@pytest.mark.parametrize("operator", SCHEMAS)
def test_every_input_is_accounted_for(operator: str) -> None:
    schema = SCHEMAS[operator]
    tested = CHANGES[operator].keys() | schema.refused_inputs.keys() | OTHER_INPUTS[operator]
    assert set(schema.inputs) - tested == set()


def test_what_belongs_to_the_engine_is_set_again(toys: Path, tmp_path: Path) -> None:
    model = load(toys, "PagedAttention")
    before = logits_of(model, tmp_path / "before")
    model = load(toys, "PagedAttention")
    put(num_pages=77, max_pages_per_seq=2, max_batch_size=9)(model)
    np.testing.assert_array_equal(logits_of(model, tmp_path / "after"), before)
    rewritten = load_model(tmp_path / "after" / "paged" / "model.onnx")
    for node in attention_nodes(rewritten):
        assert node.attributes["num_pages"].value != 77


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        pytest.param(operator, name, id=f"{operator}-{name}")
        for operator, schema in SCHEMAS.items()
        for name, allowed in schema.neutral.items()
        if allowed is not None
    ],
)
def test_a_value_that_would_be_dropped_is_refused(toys: Path, operator: str, name: str) -> None:
    allowed = SCHEMAS[operator].neutral[name]
    is_text = any(isinstance(value, str) for value in allowed)  # type: ignore[union-attr]
    model = load(toys, operator)
    if operator == "PagedAttention of onnxruntime":
        runtime.paged(model)
    put(**{name: "SOMETHING" if is_text else 99})(model)
    with pytest.raises(OnnxRewriteError, match=f"`{name}` is"):
        survey(model)


@pytest.mark.parametrize(
    ("operator", "kind", "name"),
    [
        pytest.param(operator, kind, name, id=f"{operator}-{name}")
        for operator, schema in SCHEMAS.items()
        for kind, names in (("input", schema.refused_inputs), ("output", schema.refused_outputs))
        for name in names
    ],
)
def test_an_input_or_output_that_would_be_dropped_is_refused(
    toys: Path, operator: str, kind: str, name: str
) -> None:
    model = load(toys, operator)
    if operator == "PagedAttention of onnxruntime":
        runtime.paged(model)
    node = attention_nodes(model)[0]
    if kind == "input":
        extra = variants.constant(model, "extra", np.ones(4, np.float32))
        variants.set_input(node, SCHEMAS[operator].inputs.index(name), extra)
    else:
        node.resize_outputs(len(SCHEMAS[operator].outputs))
        value = node.outputs[SCHEMAS[operator].outputs.index(name)]
        value.name = "extra_output"
        model.graph.outputs.append(value)
    with pytest.raises(OnnxRewriteError, match=f"`{name}`"):
        survey(model)


@pytest.mark.parametrize("operator", SCHEMAS)
def test_an_attribute_that_nobody_knows_is_refused(toys: Path, operator: str) -> None:
    model = load(toys, operator)
    if operator == "PagedAttention of onnxruntime":
        runtime.paged(model)
    put(added_tomorrow=1)(model)
    with pytest.raises(OnnxRewriteError, match=r"`added_tomorrow` of .* is unknown"):
        survey(model)
