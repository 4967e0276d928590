"""`--layer-outputs`: a rewritten model gives what its attention gives, whatever its dialect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rewrite_support import rewrite_file

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.tensors import EngineSpec, Role
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy


def step_of(spec: EngineSpec) -> StepInputs:
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, 130)
    return StepInputs(
        input_ids=ids,
        position_ids=np.arange(130),
        page_table=np.array([[1, 4]], np.int32),
        query_start_offsets=np.array([0, 130], np.int32),
        past_lens=np.zeros(1, np.int32),
    )


@pytest.mark.parametrize("dialect", list(Dialect), ids=lambda each: each.value)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32], ids=lambda each: each.value)
def test_outputs_are_what_each_layer_gives(tmp_path: Path, dialect: Dialect, dtype: DType) -> None:
    write_toy(tmp_path / "dense", dialect, dtype=dtype)
    attended, logits = [], []
    for with_outputs in (False, True):
        folder = tmp_path / str(with_outputs)
        spec = rewrite_file(tmp_path / "dense", folder, dtype="float16", layer_outputs=with_outputs)
        names = [each.name for each in spec.tensors() if each.role is Role.LAYER_OUTPUT]
        assert names == (["attention.0", "attention.1"] if with_outputs else [])
        executor = ReferenceExecutor(folder / "model.onnx", spec, keeps_layers=not with_outputs)
        logits.append(executor.step(step_of(spec)))
        attended.append(executor.read_layer_outputs())
        executor.close()
    assert [each.shape for each in attended[1]] == [
        (130, layer.num_q_heads, layer.value_head_dim) for layer in spec.layers
    ]
    # The very values that are taken out of a model without such outputs, and they change nothing.
    for one, other in zip(*attended, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(*logits)
    assert np.abs(attended[1][1] - attended[1][0]).max() > 0
    assert spec.layer_output_bytes() == spec.max_token_rows * 2 * 2 * attended[1][0][0].size
