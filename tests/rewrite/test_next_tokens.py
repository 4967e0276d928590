"""`--greedy-in-engine`: the engine's own choice is the runtime's, ties and broken rows included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from next_tokens_model import VOCAB, broken_rows, make_model, tied_rows
from rewrite_support import Paged, rewrite_file

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.tensors import NO_NEXT_TOKEN
from paged_trt.runtime.sampler import greedy, row_error
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy


def choose(logits: np.ndarray) -> list[int]:
    dtype = DType.FLOAT16 if logits.dtype == np.float16 else DType.FLOAT32
    session = onnxruntime.InferenceSession(
        make_model(dtype).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: list[int] = session.run(None, {"logits": logits})[0].tolist()
    return found


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_choices_are_those_of_the_runtime(dtype: Any) -> None:
    rows = tied_rows().astype(dtype)
    assert choose(rows) == greedy(rows)


def test_a_row_without_a_largest_logit_gets_no_token() -> None:
    values, expected = broken_rows()
    rows = values.astype(np.float16)
    found = choose(rows)
    assert found == expected
    assert found[0] == NO_NEXT_TOKEN
    assert greedy(rows) == expected
    assert row_error(found[3], 3, VOCAB) is None
    for row, what in ((0, "NaN"), (1, "nothing above minus infinity")):
        assert f"no largest value ({what})" in str(row_error(found[row], row, VOCAB))


@pytest.mark.parametrize("dialect", list(Dialect), ids=lambda each: each.value)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32], ids=lambda each: each.value)
def test_models_whose_tokens_come_in_twos(tmp_path: Path, dialect: Dialect, dtype: DType) -> None:
    """Each two neighbours of the vocabulary have one row of the head: the even id wins."""
    write_toy(tmp_path / "dense", dialect, dtype=dtype)
    model = load_model(tmp_path / "dense" / "model.onnx")
    head = model.graph.initializers["lm_head.weight"]
    assert head.const_value is not None
    weight = head.const_value.numpy().copy()
    axis = weight.shape.index(512)
    weight = np.repeat(weight.take(range(0, 512, 2), axis), 2, axis)
    head.const_value = ir.tensor(weight, name=head.name)
    (tmp_path / "twos").mkdir()
    save_model(model, tmp_path / "twos")
    options = {"greedy_in_engine": True, "dtype": "float16"}
    spec = rewrite_file(tmp_path / "twos", tmp_path / "paged", **options)
    paged = Paged(tmp_path / "paged", spec)
    outputs = [each.name for each in paged.run.get_outputs()]
    assert outputs[:3] == ["logits", "next_tokens", "key_pool_out.0"]
    run, tokens = paged.run.run, []

    def without_tokens(names: None, feeds: dict[str, Any]) -> list[Any]:
        logits, chosen, *pools = run(names, feeds)
        tokens.append((chosen, logits))
        return [logits, *pools]

    class Spy:
        run = staticmethod(without_tokens)

    paged.run = Spy()
    ids = np.random.default_rng(1).integers(0, 512, 400)
    paged.step({0: ids[:5], 1: ids[5:134], 2: ids[134:135]})
    paged.step({0: ids[5:6], 1: ids[200:201], 2: ids[300:301]}, padding=1)
    for chosen, logits in tokens:
        assert chosen.tolist() == greedy(logits)
        assert (chosen % 2 == 0).all()


def test_logits_of_all_tokens_are_refused(tmp_path: Path) -> None:
    write_toy(tmp_path, "gqa")
    facts = survey(load_model(tmp_path / "model.onnx"))
    config = BuildConfig(
        max_batch_size=1,
        max_input_len=8,
        max_kv_cache_capacity=128,
        logits="all",
        greedy_in_engine=True,
    )
    with pytest.raises(ConfigError, match=r"--logits last`, or without `--greedy-in-engine"):
        resolve(config, facts)
