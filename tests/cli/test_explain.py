"""`paged-trt explain`: every attention node, what it becomes, or why not and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import rewrite_variants as variants

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    write_toy(tmp_path / "toy", Dialect.GQA)
    return tmp_path / "toy" / "model.onnx"


def changed(toy: Path, tmp_path: Path, change: variants.Change) -> Path:
    model = load_model(toy)
    change(model)
    (tmp_path / "changed").mkdir()
    return save_model(model, tmp_path / "changed")


def explained(capsys: pytest.CaptureFixture[str], path: Path, code: int) -> dict:
    assert main(["explain", str(path), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_model_that_can_be_rewritten(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = explained(capsys, toy, 0)
    assert report["can_be_rewritten"] is True
    assert report["dialect"] == "com.microsoft::GroupQueryAttention"
    assert [node["becomes"] for node in report["nodes"]] == ["paged_trt::PagedAttention"] * 2
    attention = report["nodes"][0]["attention"]
    assert (attention["num_q_heads"], attention["num_kv_heads"]) == (4, 2)
    assert (attention["head_dim"], attention["rope"]) == (64, "half_split")
    # 2 layers x 2 heads x (64 + 64) elements x 2 bytes.
    assert report["kv_bytes_per_token"] == 1024
    assert main(["explain", str(toy)]) == 0
    text = capsys.readouterr().out
    assert "GroupQueryAttention -> paged_trt::PagedAttention" in text
    assert "1,024" in text


def test_each_refused_node_is_named(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_the_second(model: variants.ir.Model) -> None:
        node = variants.attention_nodes(model)[1]
        node.attributes.add(variants.ir.AttrInt64("smooth_softmax", 1))

    path = changed(toy, tmp_path, refuse_the_second)
    report = explained(capsys, path, 2)
    first, second = report["nodes"]
    assert first["becomes"] == "paged_trt::PagedAttention"
    assert second["becomes"] is None
    assert "smooth_softmax" in second["problem"]["reason"]
    assert "left out" in second["problem"]["remedy"]
    assert report["problem"] == second["problem"]
    assert main(["explain", str(path)]) == 2
    text = capsys.readouterr().out
    assert "refused" in text
    assert "do this: export with `smooth_softmax` left out" in " ".join(text.split())


@pytest.mark.parametrize("can_be_rewritten", [True, False])
def test_names_in_a_model_do_nothing_to_the_terminal(
    can_be_rewritten: bool, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "[/red]\x1b]0;title\x07"

    def rename(model: ir.Model) -> None:
        model.producer_name = odd
        for node in model.graph:
            node.name = f"{node.name}{odd}"
            if node.op_type == "GroupQueryAttention" and not can_be_rewritten:
                node.attributes["smooth_softmax"] = ir.AttrInt64("smooth_softmax", 1)

    path = changed(toy, tmp_path, rename)
    assert (main(["explain", str(path)]) == 0) is can_be_rewritten
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert ascii(odd)[1:-1] in text


def test_an_operator_that_is_not_supported(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(model: variants.ir.Model) -> None:
        for node in variants.attention_nodes(model):
            node.op_type = "Attention"

    report = explained(capsys, changed(toy, tmp_path, rename), 2)
    assert {node["operator"] for node in report["nodes"]} == {"com.microsoft::Attention"}
    assert "torch.onnx.export" in report["problem"]["remedy"]


def test_a_problem_of_the_whole_model(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def second_output(model: variants.ir.Model) -> None:
        hidden = variants.add(model, "Identity", [model.graph.outputs[0]], shape=[1, "s", 512])
        hidden.dtype = variants.ir.DataType.FLOAT16
        model.graph.outputs.append(hidden)

    report = explained(capsys, changed(toy, tmp_path, second_output), 2)
    assert all(node["becomes"] for node in report["nodes"])
    assert "one output, the logits" in report["problem"]["reason"]


def test_attention_in_primitive_nodes(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spell_out(model: variants.ir.Model) -> None:
        for node in variants.attention_nodes(model):
            node.op_type, node.domain = "Softmax", ""
            node.attributes.clear()
            node.resize_inputs(1)
            node.resize_outputs(1)
        del model.graph.outputs[1:]
        variants.constant(model, "unused", np.zeros(1, np.float32))

    report = explained(capsys, changed(toy, tmp_path, spell_out), 2)
    assert report["nodes"] == []
    assert "spelt out" in report["problem"]["reason"]
    assert "opset_version=23" in report["problem"]["remedy"]


def test_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    assert main(["explain", str(tmp_path / "model.onnx")]) == 2
    assert "no ONNX model" in capsys.readouterr().err
