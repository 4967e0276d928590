"""`paged-trt build` of whole models with the TensorRT that is installed, and their tokens.

The plan is built without a GPU and does not run here: what its model computes is compared on
the reference executor, with the un-rewritten model in onnxruntime.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from engine.test_build import TIMEOUT_S, tensorrt_is_missing
from quantised_weights import quantise_weights
from rewrite_support import session as onnx_session

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.manifest import EngineManifest, read_manifest
from paged_trt.runtime.compare import CompareOptions, compare_engine
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.session import Session
from paged_trt.scripts.example_models.toy import TOY, write_toy

pytestmark = pytest.mark.skipif(tensorrt_is_missing(), reason="TensorRT is not installed")
LIMITS = ("--max-batch-size=3", "--max-input-len=200", "--max-kv-cache-capacity=256")


def build(model: Path, target: Path, *options: str) -> EngineManifest:
    # A child: TensorRT's parser may end its process.
    arguments = ("build", str(model), "-o", str(target), *LIMITS, *options)
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return read_manifest(target)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda each: each.value)
def test_tokens_of_an_engine_that_chooses(tmp_path: Path, dtype: DType) -> None:
    write_toy(tmp_path, "gqa", dtype=dtype)
    manifest = build(tmp_path / "model.onnx", tmp_path / "engine", "--greedy-in-engine")
    results = [each for each in manifest.engine.tensors if each.name in {"logits", "next_tokens"}]
    assert [(each.name, each.dtype, each.dims) for each in results] == [
        ("logits", dtype, (-1, TOY.vocab_size)),
        ("next_tokens", DType.INT64, (-1,)),
    ]
    executor = load_engine(tmp_path / "engine", "reference")
    prompts = [np.random.default_rng(n).integers(0, TOY.vocab_size, n) for n in (1, 127, 128, 129)]
    with Session(executor) as session:
        with_logits = session.generate(prompts, 8, keep_logits=True)
        assert [each.tokens for each in session.generate(prompts, 8)] == [
            each.tokens for each in with_logits
        ]
    # What needs logits finds them: the engine has both.
    options = CompareOptions(executor="reference", num_new_tokens=4)
    if dtype is DType.FLOAT16:
        assert compare_engine(tmp_path / "model.onnx", tmp_path / "engine", options).passed


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda each: each.value)
def test_an_engine_gives_what_its_layers_attend_to(tmp_path: Path, dtype: DType) -> None:
    write_toy(tmp_path, "attention23-past", dtype=dtype)
    manifest = build(tmp_path / "model.onnx", tmp_path / "engine", "--layer-outputs")
    assert [
        (each.name, each.dtype, each.dims)
        for each in manifest.engine.tensors
        if each.name.startswith("attention")
    ] == [(f"attention.{i}", dtype, (-1, TOY.num_heads, TOY.head_dim)) for i in range(2)]
    if dtype is DType.FLOAT16:
        options = CompareOptions(executor="reference", num_new_tokens=2, layers=True)
        report = compare_engine(tmp_path / "model.onnx", tmp_path / "engine", options)
        assert report.passed
        assert report.same_model is not None
        assert "attention.1" in {each.name for each in report.same_model.tensors}


@pytest.mark.parametrize("kind", ["int8", "int8-zeros", "int8-blocks", "int4-blocks"])
@pytest.mark.parametrize("activation", ["float16", "float32"])
def test_quantised_weights(tmp_path: Path, kind: str, activation: str) -> None:
    write_toy(tmp_path / "plain", "attention23-past", dtype=DType(activation))
    source = tmp_path / "model.onnx"
    weights = quantise_weights(tmp_path / "plain" / "model.onnx", source, kind=kind)
    assert len(weights) == 15
    manifest = build(source, tmp_path / "engine", "--dtype=float16")
    assert manifest.spec.activation_dtype is DType.FLOAT16
    # Stored as they were: the data of the engine is smaller than that of the plain model.
    sizes = [sum(f.stat().st_size for f in folder.glob("model.onnx*"))
             for folder in (tmp_path / "engine", tmp_path / "plain")]  # fmt: skip
    assert sizes[0] < sizes[1]
    assert quantised_types(tmp_path / "engine" / "model.onnx") == weights
    options = CompareOptions(executor="reference", num_new_tokens=8)
    report = compare_engine(source, tmp_path / "engine", options)
    assert report.passed, report
    assert is_changed(tmp_path / "plain" / "model.onnx", source)


def quantised_types(path: Path) -> dict[str, str]:
    graph = ir.load(path).graph
    names = {n.inputs[0].name for n in graph if n.op_type == "DequantizeLinear"}
    return {str(name): graph.initializers[str(name)].dtype.name for name in names}


def is_changed(plain: Path, quantised: Path) -> bool:
    """Whether quantisation shows in the logits: the comparison is not one of equal models."""
    feeds: dict[str, Any] = {}
    for each in onnx_session(plain).get_inputs():
        if len(each.shape) == 4:
            dtype = np.float16 if "float16" in each.type else np.float32
            feeds[each.name] = np.zeros((1, each.shape[1], 0, each.shape[3]), dtype)
        else:
            feeds[each.name] = np.arange(4)[None] if each.name != "attention_mask" else None
    feeds = {k: np.ones((1, 4), np.int64) if v is None else v for k, v in feeds.items()}
    one, two = (onnx_session(path).run(["logits"], feeds)[0] for path in (plain, quantised))
    return bool(np.abs(one.astype(np.float32) - two.astype(np.float32)).max() > 0.01)
