"""Only attention sees several tokens: every other node that does is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_variants as variants
from rewrite_support import Dense, Paged, rewrite_file

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.errors import OnnxRewriteError
from paged_trt.scripts.example_models.toy import write_toy

Make = Callable[[ir.Model, ir.Value], ir.Value]
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for dialect in ("attention23-past", "gqa"):
        write_toy(folder / dialect, dialect)
    return folder


def integers(model: ir.Model, *numbers: int) -> ir.Value:
    name = f"integers_{len(model.graph.initializers)}"
    return variants.constant(model, name, np.array(numbers, np.int64))


def halves(model: ir.Model, array: np.ndarray) -> ir.Value:
    name = f"halves_{len(model.graph.initializers)}"
    return variants.constant(model, name, array.astype(np.float16))


def op(op_type: str, *operands: tuple[int, ...], **attributes: object) -> Make:
    """A node that reads the hidden states, then constants."""

    def make(model: ir.Model, hidden: ir.Value) -> ir.Value:
        inputs = [hidden, *(integers(model, *numbers) for numbers in operands)]
        return variants.add(model, op_type, inputs, attributes)

    return make


def first_of(op_type: str, count: int, *operands: tuple[int, ...], **attributes: object) -> Make:
    """The first result of a node that has several."""
    single = op(op_type, *operands, **attributes)

    def make(model: ir.Model, hidden: ir.Value) -> ir.Value:
        result = single(model, hidden)
        node = result.producer()
        node.resize_outputs(count)
        for index, output in enumerate(node.outputs[1:]):
            output.name = f"{node.name}_rest_{index}"
        return result

    return make


def turned(make: Make) -> Make:
    """The same on `[1, 128, tokens]`."""

    def result(model: ir.Model, hidden: ir.Value) -> ir.Value:
        return make(model, variants.add(model, "Transpose", [hidden], {"perm": [0, 2, 1]}))

    return result


def norm(model: ir.Model, hidden: ir.Value) -> ir.Value:
    scale = halves(model, np.ones(128))
    return variants.add(model, "RMSNormalization", [hidden, scale], {"axis": 1})


def instance_norm(model: ir.Model, hidden: ir.Value) -> ir.Value:
    operands = [hidden, halves(model, np.ones(128)), halves(model, np.zeros(128))]
    return variants.add(model, "InstanceNormalization", operands)


def products(model: ir.Model, hidden: ir.Value) -> ir.Value:
    keys = variants.add(model, "Transpose", [hidden], {"perm": [0, 2, 1]})
    return variants.add(model, "MatMul", [hidden, variants.add(model, "MatMul", [keys, hidden])])


def pairwise(model: ir.Model, hidden: ir.Value) -> ir.Value:
    row = variants.add(model, "Unsqueeze", [hidden, integers(model, 1)])
    column = variants.add(model, "Unsqueeze", [hidden, integers(model, 2)])
    return variants.add(model, "ReduceMax", [variants.add(model, "Add", [row, column])])


def num_tokens(model: ir.Model, hidden: ir.Value) -> ir.Value:
    count = variants.add(model, "Shape", [variants.value_named(model, "input_ids")], {"start": 1})
    count = variants.add(model, "Cast", [count], {"to": ir.DataType.FLOAT16})
    return variants.add(model, "Mul", [hidden, count])


def place_in_the_step(model: ir.Model, hidden: ir.Value) -> ir.Value:
    shape = variants.add(model, "Shape", [variants.value_named(model, "input_ids")], {"start": 1})
    bounds = (0, 1)
    start, step = (
        variants.constant(model, f"bound_{number}", np.array(number)) for number in bounds
    )
    places = variants.add(model, "Range", [start, variants.add(model, "Squeeze", [shape]), step])
    places = variants.add(model, "Cast", [places], {"to": ir.DataType.FLOAT16})
    places = variants.add(model, "Unsqueeze", [places, integers(model, 0, 2)])
    return variants.add(model, "Add", [hidden, places])


def first_id(model: ir.Model, hidden: ir.Value) -> ir.Value:
    ids = variants.value_named(model, "input_ids")
    first = variants.add(model, "Gather", [ids, integers(model, 0)], {"axis": 1})
    first = variants.add(model, "Cast", [first], {"to": ir.DataType.FLOAT16})
    return variants.add(model, "Add", [hidden, variants.add(model, "Unsqueeze", [
        first, integers(model, 2)])])  # fmt: skip


def rotary_without_positions(model: ir.Model, hidden: ir.Value) -> ir.Value:
    table = halves(model, np.ones((1, 2, 32)))
    attributes = {"num_heads": 2}
    return variants.add(model, "RotaryEmbedding", [hidden, table, table], attributes)


def branch(model: ir.Model, hidden: ir.Value) -> ir.Value:
    bodies = {}
    for name in ("then_branch", "else_branch"):
        mean = ir.Node("", "ReduceMean", [hidden], name=f"{name}_mean")
        bodies[name] = ir.Graph([], [mean.outputs[0]], nodes=[mean], name=name)
    return variants.add(model, "If", [variants.constant(model, "always", np.array(True))], bodies)


MIXES: dict[str, Make] = {
    "ReduceMean": op("ReduceMean", (1,)),
    "ReduceMax from the end": op("ReduceMax", (-2,)),
    "ReduceSum of all": op("ReduceSum"),
    "ArgMax": op("ArgMax", axis=1),
    "Softmax": op("Softmax", axis=1),
    "LogSoftmax": turned(op("LogSoftmax")),
    "TopK": first_of("TopK", 2, (1,), axis=1),
    "CumSum": op("CumSum", (1,)),
    "Gather of the first": op("Gather", (0,), axis=1),
    "Gather of the last": op("Gather", (-1,), axis=-2),
    "Slice of the first": op("Slice", (0,), (1,), (1,)),
    "Slice backwards": op("Slice", (-1,), (-(2**60),), (1,), (-1,)),
    "Slice without axes": op("Slice", (0, 0), (1, 1)),
    "Pad": op("Pad", (0, 1, 0, 0, -1, 0)),
    "Tile": op("Tile", (1, 2, 1)),
    "Split": first_of("Split", 2, axis=1, num_outputs=2),
    "Squeeze": op("Squeeze", (1,)),
    "Reshape": turned(op("Reshape", (1, -1, 128))),
    "Reshape of two tokens to one": op("Reshape", (1, -1, 256)),
    "Flatten": turned(op("Flatten", axis=1)),
    "Einsum": op("Einsum", equation="bth->bh"),
    "ReverseSequence": op("ReverseSequence", (1,), batch_axis=0, time_axis=1),
    "Transpose": op("Transpose", perm=[1, 0, 2]),
    "DynamicQuantizeLinear": first_of("DynamicQuantizeLinear", 3),
    "RMSNormalization": norm,
    "InstanceNormalization": turned(instance_norm),
    "MatMul": products,
    "Add": pairwise,
    "Mul": num_tokens,
    "Add of places": place_in_the_step,
    "Gather of ids": first_id,
    "RotaryEmbedding": rotary_without_positions,
    "If": branch,
}


@pytest.mark.parametrize("dialect", ["attention23-past", "gqa"])
@pytest.mark.parametrize("name", MIXES)
def test_a_node_that_mixes_tokens_is_refused(toys: Path, dialect: str, name: str) -> None:
    model = load_model(toys / dialect / "model.onnx")
    hidden = variants.hidden(model)
    mixed = MIXES[name](model, hidden)
    result = variants.add(model, "Add", [hidden, mixed])
    variants.replace_hidden(model, mixed if name == "Transpose" else result)
    model.graph.sort()
    with pytest.raises(OnnxRewriteError) as caught:
        survey(model)
    if name != "Transpose":
        assert name.split(" of ")[0].split()[0] in str(caught.value)
    assert "token" in str(caught.value)
    assert not str(caught.value).endswith(".")


def test_a_malformed_node_is_refused_by_name(toys: Path) -> None:
    model = load_model(toys / "gqa" / "model.onnx")
    turned_back = op("Transpose", perm=[0, 5, 9])(model, variants.hidden(model))
    variants.replace_hidden(model, turned_back)
    model.graph.sort()
    with pytest.raises(OnnxRewriteError, match="Transpose is malformed"):
        survey(model)


def per_head_norm(model: ir.Model, hidden: ir.Value) -> ir.Value:
    """As onnxruntime-genai writes it: heads of all tokens in one axis."""
    heads = variants.add(model, "Reshape", [hidden, integers(model, 0, -1, 64)])
    scale = halves(model, np.full(64, 1.5))
    normed = variants.add(model, "SimplifiedLayerNormalization", [heads, scale], {"axis": -1})
    return variants.add(model, "Reshape", [normed, integers(model, 0, -1, 128)])


def experts(model: ir.Model, hidden: ir.Value) -> ir.Value:
    """Gate, the best two of eight experts, and a sum over them."""
    generator = np.random.default_rng(0)
    gate = variants.add(
        model, "MatMul", [hidden, halves(model, generator.standard_normal((128, 8)))]
    )
    probabilities = variants.add(model, "Softmax", [gate], {"axis": -1})
    best = first_of("TopK", 2, (2,))(model, probabilities)
    total = variants.add(model, "ReduceSum", [best, integers(model, -1)], {"keepdims": 1})
    return variants.add(model, "Mul", [hidden, total])


def turned_and_back(model: ir.Model, hidden: ir.Value) -> ir.Value:
    columns = variants.add(model, "Transpose", [hidden], {"perm": [2, 0, 1]})
    halved = variants.add(model, "Slice", [columns, *(integers(model, n) for n in (0, 64, 0))])
    doubled = variants.add(model, "Concat", [halved, halved], {"axis": 0})
    return variants.add(model, "Transpose", [doubled], {"perm": [1, 2, 0]})


def rows_without_batch(model: ir.Model, hidden: ir.Value) -> ir.Value:
    rows = variants.add(model, "Reshape", [hidden, integers(model, -1, 128)])
    weight = halves(model, np.eye(128) * 0.5)
    product = variants.add(model, "Gemm", [rows, weight], {"transB": 1})
    length = variants.add(model, "Shape", [variants.value_named(model, "input_ids")])
    target = variants.add(model, "Concat", [length, integers(model, 128)], {"axis": 0})
    return variants.add(model, "Reshape", [product, target])


APART: dict[str, Make] = {
    "per_head_norm": per_head_norm,
    "experts": experts,
    "turned_and_back": turned_and_back,
    "rows_without_batch": rows_without_batch,
}


@pytest.mark.parametrize("dialect", ["attention23-past", "gqa"])
@pytest.mark.parametrize("name", APART)
def test_a_node_that_keeps_tokens_apart_stays(
    toys: Path, tmp_path: Path, dialect: str, name: str
) -> None:
    model = load_model(toys / dialect / "model.onnx")
    variants.replace_hidden(model, APART[name](model, variants.hidden(model)))
    model.graph.sort()
    (tmp_path / "dense").mkdir()
    save_model(model, tmp_path / "dense")
    spec = rewrite_file(tmp_path / "dense", tmp_path / "paged", logits="all")
    generator = np.random.default_rng(0)
    sequences = {i: generator.integers(0, 512, n) for i, n in enumerate((9, 5))}
    found = Paged(tmp_path / "paged", spec).step(sequences)
    dense = Dense.load(tmp_path / "dense")
    for i, tokens in sequences.items():
        expected = dense.logits(tokens, [len(tokens)])
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=TOLERANCE)
