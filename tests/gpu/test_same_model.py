"""A plan against the same model on the reference executor, layer by layer."""

from __future__ import annotations

import pytest
from gpu.engines import ToyEngine

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.manifest import MODEL_FILE
from paged_trt.runtime.engine import open_plan
from paged_trt.runtime.same_model_check import NO_ATTENTION, check_same_model
from paged_trt.runtime.scenarios import make_scenarios, random_prompts

pytestmark = pytest.mark.gpu

TOYS = [
    ToyEngine(),
    ToyEngine(activation=DType.BFLOAT16),
    ToyEngine(kv=DType.FLOAT8),
    ToyEngine(kv=DType.INT8),
    ToyEngine(logits="all"),
    ToyEngine(layer_outputs=True),
    ToyEngine(layer_outputs=True, activation=DType.BFLOAT16, kv=DType.INT8),
]


@pytest.mark.parametrize("toy", TOYS, ids=str)
def test_every_layer_stores_what_the_reference_stores(toy: ToyEngine) -> None:
    executor = open_plan(toy.folder)
    prompts = random_prompts(toy.spec, (1, 127, 129, 300), seed=2)
    scenarios = make_scenarios(toy.spec, prompts, num_new_tokens=4)
    try:
        report = check_same_model(
            executor, toy.folder, scenarios, model=toy.folder / MODEL_FILE, seed=0, layers=True
        )
    finally:
        executor.close()
    assert report.passed, (report.first, report.tensors)
    assert report.missing == (() if toy.layer_outputs else (NO_ATTENTION,))
    attended = {each.name for each in report.tensors if each.name.startswith("attention")}
    assert attended == ({"attention.0", "attention.1"} if toy.layer_outputs else set())
    assert {each.name for each in report.tensors} >= {"key.0", "value.1", "logits"}
