"""Converting a model's type lets go of each weight after it was read."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from rewrite_support import DEFAULTS

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.dtypes import DType
from paged_trt.scripts.example_models.toy import write_toy


@pytest.mark.parametrize(
    ("source", "target"), [(DType.FLOAT16, "bfloat16"), (DType.FLOAT32, "float16")]
)
def test_no_weight_stays_mapped(tmp_path: Path, source: DType, target: str) -> None:
    write_toy(tmp_path / "dense", "attention23-past", dtype=source)
    model = load_model(tmp_path / "dense" / "model.onnx")
    weights = [
        value.const_value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    facts = survey(model)
    spec = resolve(BuildConfig(**DEFAULTS, dtype=target), facts)
    rewrite(model, facts=facts, spec=spec)
    (tmp_path / "paged").mkdir()
    save_model(model, tmp_path / "paged")
    assert len(weights) > 10
    assert [weight.name for weight in weights if weight.raw is not None] == []
