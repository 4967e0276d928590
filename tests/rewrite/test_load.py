"""A model file is not trusted: each kind of damage has a named error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.errors import ConfigError, OnnxRewriteError, PagedTrtError
from paged_trt.scripts.example_models.toy import write_toy

WEIGHT = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_toy(tmp_path / "toy", "gqa")
    return tmp_path / "toy"


def edit(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    path = folder / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def weight(proto: onnx.ModelProto) -> onnx.TensorProto:
    return next(each for each in proto.graph.initializer if each.name == WEIGHT)


def set_entry(key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        for entry in weight(proto).external_data:
            if entry.key == key:
                entry.value = value
                return
        weight(proto).external_data.add(key=key, value=value)

    return change


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../secret",
        "a/../../secret",
        "..\\secret",
        "C:\\secret",
        "\\\\host\\x",
        "",
        "a\0b",
    ],
)
def test_location_outside_the_folder(folder: Path, location: str) -> None:
    (folder.parent / "secret").write_bytes(bytes(2**20))
    path = edit(folder, set_entry("location", location))
    with pytest.raises(OnnxRewriteError, match="no path inside the model's folder"):
        load_model(path)


@pytest.mark.parametrize("target_is_folder", [False, True])
def test_link_out_of_the_folder(folder: Path, target_is_folder: bool) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / "model.onnx.data").rename(outside / "data")
    location = "link/data" if target_is_folder else "link"
    os.symlink(outside if target_is_folder else outside / "data", folder / "link")

    def change(proto: onnx.ModelProto) -> None:
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location

    with pytest.raises(OnnxRewriteError, match="link that leaves the model's folder"):
        load_model(edit(folder, change))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "-1"),
        ("offset", str(2**40)),
        ("offset", "1e3"),
        ("length", "-5"),
        ("length", str(2**50)),
        ("length", "zero"),
        ("length", "16"),
    ],
)
def test_range_of_external_data(folder: Path, key: str, value: str) -> None:
    path = edit(folder, set_entry(key, value))
    with pytest.raises(OnnxRewriteError, match=WEIGHT):
        load_model(path)


def test_renamed_data_file(folder: Path) -> None:
    (folder / "model.onnx.data").rename(folder / "llama.onnx.data")
    with pytest.raises(
        OnnxRewriteError, match=r"`llama.onnx.data` is that file.*`model.onnx.data`"
    ):
        load_model(folder / "model.onnx")


def test_missing_data_file(folder: Path) -> None:
    (folder / "model.onnx.data").unlink()
    with pytest.raises(OnnxRewriteError, match=r"is missing from .*; copy the data file beside"):
        load_model(folder / "model.onnx")


def test_truncated_data_file(folder: Path) -> None:
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(OnnxRewriteError, match=r"are outside `model\.onnx\.data`"):
        load_model(folder / "model.onnx")


def test_hard_link_to_a_data_file(folder: Path) -> None:
    os.link(folder / "model.onnx.data", folder.parent / "other")
    with pytest.raises(OnnxRewriteError, match="2 hard links"):
        load_model(folder / "model.onnx")


def test_location_that_no_file_can_have(folder: Path) -> None:
    path = edit(folder, set_entry("location", "a" * 5000))
    with pytest.raises(OnnxRewriteError, match="cannot be opened"):
        load_model(path)


def test_functions_that_unfold_without_end(folder: Path) -> None:
    def change(proto: onnx.ModelProto) -> None:
        opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("x", 1)]
        proto.opset_import.append(opsets[1])
        for level in range(40):
            inner, domain = (f"F{level - 1}", "x") if level else ("Identity", "")
            nodes = [
                onnx.helper.make_node(inner, [source], [target], domain=domain)
                for source, target in (("a", "b"), ("b", "c"))
            ]
            proto.functions.append(
                onnx.helper.make_function("x", f"F{level}", ["a"], ["c"], nodes, opsets)
            )
        node = onnx.helper.make_node("F39", ["input_ids"], ["unfolded"], domain="x")
        proto.graph.node.append(node)

    with pytest.raises(OnnxRewriteError, match=r"over the limit of 1000000"):
        load_model(edit(folder, change))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ONNX file"):
        load_model(tmp_path / "none.onnx")


@pytest.mark.parametrize("content", [b"", b"hello, world", bytes(100), b"\xff" * 64])
def test_no_onnx_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(OnnxRewriteError, match=r"model\.onnx"):
        load_model(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_truncated_file(folder: Path, share: float) -> None:
    path = folder / "model.onnx"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(OnnxRewriteError):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda proto: setattr(proto, "ir_version", 99), "IR version 99 is newer"),
        (lambda proto: setattr(proto.opset_import[0], "version", 99), "opset 99 is newer"),
        (lambda proto: setattr(proto.opset_import[0], "version", 11), "opset_version=23"),
        (lambda proto: proto.ClearField("opset_import"), "standard opset"),
        (lambda proto: proto.graph.ClearField("node"), "no nodes"),
        (lambda proto: setattr(weight(proto), "data_type", 0), "no element type"),
        (lambda proto: setattr(weight(proto), "data_type", 999), "element type 999 is unknown"),
        (lambda proto: weight(proto).dims.append(-4), "impossible"),
        (lambda proto: weight(proto).dims.append(7), "the shape needs"),
        (lambda proto: proto.graph.sparse_initializer.add(), "sparse"),
        (lambda proto: proto.graph.node[3].input.append("nowhere"), None),
        (lambda proto: proto.graph.node[3].output.__setitem__(0, "logits"), None),
    ],
)
def test_damaged_model(
    folder: Path, change: Callable[[onnx.ModelProto], None], words: str | None
) -> None:
    path = edit(folder, change)
    with pytest.raises(OnnxRewriteError, match=words):
        survey(load_model(path))


def test_damaged_bytes_never_escape_as_other_errors(folder: Path) -> None:
    path = folder / "model.onnx"
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    outcomes = set()
    for _ in range(200):
        damaged = bytearray(content)
        for position in generator.integers(0, len(content), generator.integers(1, 4)):
            damaged[position] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            survey(load_model(path))
            outcomes.add("accepted")
        except PagedTrtError as error:
            outcomes.add(type(error).__name__)
    assert "OnnxRewriteError" in outcomes
