"""A mask is accepted when it was evaluated and equals PagedAttention's, and only then."""

from __future__ import annotations

import builtins
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import rewrite_variants as variants

from paged_trt.builder.onnx import evaluator
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.mask import LONG_LENGTHS
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import OnnxRewriteError, UnsupportedError
from paged_trt.scripts.example_models.toy import write_toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    write_toy(folder, "attention23-past")
    return folder


def load(folder: Path) -> ir.Model:
    return load_model(folder / "model.onnx")


def scalar(model: ir.Model, number: int) -> ir.Value:
    name = f"number_{len(model.graph.initializers)}"
    return variants.constant(model, name, np.array(number, np.int64))


def grid(model: ir.Model) -> tuple[ir.Value, ir.Value]:
    """Query positions `[1, 1, new, 1]` and key positions `[1, 1, 1, total]`."""
    return (
        variants.value_named(model, "/model/mask/Unsqueeze/output_0"),
        variants.value_named(model, "/model/mask/Unsqueeze_1/output_0"),
    )


def use(model: ir.Model, mask: ir.Value) -> None:
    for node in variants.attention_nodes(model):
        variants.set_input(node, 3, mask)
    model.graph.sort()


def and_with(model: ir.Model, condition: ir.Value) -> None:
    mask = variants.attention_nodes(model)[0].inputs[3]
    use(model, variants.add(model, "And", [mask, condition]))


def refused(model: ir.Model) -> str:
    with pytest.raises(OnnxRewriteError) as caught:
        survey(model)
    return str(caught.value)


@pytest.mark.parametrize("query", [0, 9, 130, 316, 512, 1023, 4095, 65535, 1048575])
def test_one_entry_hidden(folder: Path, query: int) -> None:
    model = load(folder)
    rows, keys = grid(model)
    row = variants.add(model, "Equal", [rows, scalar(model, query)])
    key = variants.add(model, "Equal", [keys, scalar(model, query // 2)])
    entry = variants.add(model, "And", [row, key])
    and_with(model, variants.add(model, "Not", [entry]))
    message = refused(model)
    # The longest row tells the window: an entry hidden there looks like a shorter one at first.
    assert "hides key" in message or query == LONG_LENGTHS[0] - 1
    assert f"the query at {query}" in message


def test_one_entry_shown(folder: Path) -> None:
    model = load(folder)
    rows, keys = grid(model)
    row = variants.add(model, "Equal", [rows, scalar(model, 2)])
    key = variants.add(model, "Equal", [keys, scalar(model, 4)])
    mask = variants.attention_nodes(model)[0].inputs[3]
    use(model, variants.add(model, "Or", [mask, variants.add(model, "And", [row, key])]))
    assert "shows key 4 to the query at 2" in refused(model)


def test_chunked_attention(folder: Path) -> None:
    model = load(folder)
    rows, keys = grid(model)
    size = scalar(model, 64)
    chunks = [variants.add(model, "Div", [each, size]) for each in (rows, keys)]
    and_with(model, variants.add(model, "Equal", chunks))
    assert "neither causal nor causal with one window" in refused(model)


def test_bidirectional_mask(folder: Path) -> None:
    model = load(folder)
    use(model, variants.value_named(model, "/model/mask/padding/Unsqueeze/output_0"))
    assert "shows key 1 to the query at 0" in refused(model)


def test_padding_mask_with_causal_attribute(folder: Path) -> None:
    model = load(folder)
    use(model, variants.value_named(model, "/model/mask/padding/Unsqueeze/output_0"))
    variants.set_attributes(is_causal=1)(model)
    assert {layer.window for layer in survey(model).layers} == {-1}


@pytest.mark.parametrize("hidden", [-3.0, 1.0, np.nan])
def test_bias(folder: Path, hidden: float) -> None:
    model = load(folder)
    variants.additive_mask(hidden)(model)
    assert "a bias, such as ALiBi or a learned one" in refused(model)


def test_mask_from_data(folder: Path) -> None:
    model = load(folder)
    ids = variants.value_named(model, "input_ids")
    known = variants.add(model, "Greater", [ids, scalar(model, -1)])
    axes = variants.constant(model, "axes", np.array([1, 3], np.int64))
    and_with(model, variants.add(model, "Unsqueeze", [known, axes]))
    assert "depends on more than" in refused(model)


@pytest.mark.parametrize("size", [2048, 512, 64])
def test_mask_cut_from_a_table(folder: Path, size: int) -> None:
    """Where the table ends, the proof ends too."""
    model = load(folder)
    table = variants.constant(model, "table", np.tril(np.ones((size, size), bool))[None, None])
    starts, ends = (
        variants.value_named(model, name)
        for name in ("/model/Shape_1/output_0", "/model/Add/output_0")
    )
    axis = [variants.constant(model, f"axis_{i}", np.array([i], np.int64)) for i in (2, 3)]
    zero = variants.constant(model, "zero", np.array([0], np.int64))
    rows = variants.add(model, "Slice", [table, starts, ends, axis[0]])
    use(model, variants.add(model, "Slice", [rows, zero, ends, axis[1]]))
    limits = {limit.name: limit.positions for limit in survey(model).position_limits}
    assert size in limits.values()
    assert LONG_LENGTHS[0] not in limits.values()


def test_proof_says_how_far_it_reaches(folder: Path) -> None:
    limits = [limit.positions for limit in survey(load(folder)).position_limits]
    assert LONG_LENGTHS[0] in limits


@pytest.mark.parametrize("dialect", ["attention23-past", "attention24-concat"])
def test_bfloat16_model(tmp_path: Path, dialect: str) -> None:
    """onnxruntime's CPU operators refuse bfloat16: the proof runs in float32."""
    write_toy(tmp_path, dialect, dtype=DType.BFLOAT16, window=700)
    model = load(tmp_path)
    mask = variants.attention_nodes(model)[0].inputs[3]
    numbers = [
        variants.constant(model, name, np.array(number, ml_dtypes.bfloat16))
        for name, number in (("visible", 0.0), ("hidden", -3.3e38))
    ]
    use(model, variants.add(model, "Where", [mask, *numbers]))
    facts = survey(model)
    assert facts.activation_dtype is DType.BFLOAT16
    assert {layer.window for layer in facts.layers} == {700}


def test_without_onnxruntime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *args: object, **kwargs: object) -> object:
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    evaluator._onnxruntime.cache_clear()
    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(UnsupportedError, match=r'pip install "paged-trt\[compare\]"'):
        survey(load(folder))
    evaluator._onnxruntime.cache_clear()
