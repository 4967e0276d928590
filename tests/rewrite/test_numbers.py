"""Every dialect: the rewritten model gives the numbers of the dense one.

Tolerance: weights, activations and cache are float16 in both models, and only the order of
operations in attention differs. Logits spread over about +-30; float16 keeps 11 bits, so one
rounding of a logit is up to 2^-7, and two layers of such roundings stay under 0.15.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from rewrite_support import Dense, Paged, rewrite_file
from rewrite_variants import add

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.plugins.dtypes import DType
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

TOLERANCE = 0.15
HALF_TOLERANCE = 0.3
"""Against a float32 model: the toy's own float16 export is off by 0.15."""
PROMPTS = (1, 127, 128, 129, 256)
DECODE_STEPS = 4
VARIANTS = {"plain": {}, "window": {"window": 100}, "softcap": {"softcap": 3.0}}


def tokens_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, length)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dialect", list(Dialect), ids=lambda each: each.value)
def test_rewritten_model_gives_the_dense_logits(
    tmp_path: Path, dialect: Dialect, variant: str
) -> None:
    write_toy(tmp_path / "dense", dialect, **VARIANTS[variant])
    spec = rewrite_file(tmp_path / "dense", tmp_path / "paged", logits="all")
    sequences = {i: tokens_of(n + DECODE_STEPS, i) for i, n in enumerate(PROMPTS)}
    paged = Paged(tmp_path / "paged", spec)
    found: dict[int, list[np.ndarray]] = {i: [] for i in sequences}
    # The prompts come in two ragged chunks, then one token each with padding rows.
    cuts = {i: [0, max(1, n // 3), n] for i, n in enumerate(PROMPTS)}
    for part in range(2):
        chunk = {i: s[cuts[i][part] : cuts[i][part + 1]] for i, s in sequences.items()}
        for i, rows in paged.step({i: c for i, c in chunk.items() if len(c)}).items():
            found[i].append(rows)
    for step in range(DECODE_STEPS):
        tokens = {i: s[PROMPTS[i] + step :][:1] for i, s in sequences.items()}
        for i, rows in paged.step(tokens, padding=step % 2).items():
            found[i].append(rows)
    dense = Dense.load(tmp_path / "dense")
    for i, sequence in sequences.items():
        expected = dense.logits(sequence, [PROMPTS[i], *[1] * DECODE_STEPS])
        actual = np.concatenate(found[i])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
        top = np.sort(expected, axis=-1)
        clear = top[:, -1] - top[:, -2] > 2 * TOLERANCE
        assert clear.mean() > 0.8
        assert (actual.argmax(-1) == expected.argmax(-1))[clear].all()


@pytest.mark.parametrize("dialect", [Dialect.ATTENTION23_PAST, Dialect.GQA])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_last_logits_are_the_last_rows_of_all_logits(
    tmp_path: Path, dialect: Dialect, tie_embeddings: bool
) -> None:
    write_toy(tmp_path / "dense", dialect, tie_embeddings=tie_embeddings)
    results = []
    for mode in ("all", "last"):
        spec = rewrite_file(tmp_path / "dense", tmp_path / mode, logits=mode)
        paged = Paged(tmp_path / mode, spec)
        chunk = {0: tokens_of(5, 0), 1: tokens_of(1, 1), 2: tokens_of(130, 2)}
        results.append(paged.step(chunk, padding=1))
    for i, rows in results[0].items():
        np.testing.assert_allclose(results[1][i], rows[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dialect", list(Dialect), ids=lambda each: each.value)
def test_float32_model_is_converted(tmp_path: Path, dialect: Dialect) -> None:
    write_toy(tmp_path / "dense", dialect, dtype=DType.FLOAT32)
    spec = rewrite_file(tmp_path / "dense", tmp_path / "paged", logits="all", dtype="float16")
    paged = Paged(tmp_path / "paged", spec)
    tokens = tokens_of(130, 1)
    actual = np.concatenate([paged.step({0: tokens[:129]})[0], paged.step({0: tokens[129:]})[0]])
    expected = Dense.load(tmp_path / "dense").logits(tokens, [130])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=HALF_TOLERANCE)


def test_float32_logits_on_purpose_become_the_engine_type(tmp_path: Path) -> None:
    """A float32 model cannot tell a cast of its logits from its own type."""
    write_toy(tmp_path / "toy", "gqa", dtype=DType.FLOAT32)
    model = load_model(tmp_path / "toy" / "model.onnx")
    logits = model.graph.outputs[0]
    wide = add(model, "Cast", [logits], {"to": ir.DataType.FLOAT})
    wide.type, wide.shape = logits.type, logits.shape
    logits.name, wide.name = "narrow", "logits"
    model.graph.outputs[0] = wide
    (tmp_path / "dense").mkdir()
    save_model(model, tmp_path / "dense")
    spec = rewrite_file(tmp_path / "dense", tmp_path / "paged", dtype="float16")
    assert spec.logits_dtype is DType.FLOAT16
    paged = Paged(tmp_path / "paged", spec)
    assert paged.run.get_outputs()[0].type == "tensor(float16)"
    tokens = tokens_of(9, 3)
    expected = Dense.load(tmp_path / "dense").logits(tokens, [9])[-1]
    np.testing.assert_allclose(paged.step({0: tokens})[0], expected, rtol=0, atol=HALF_TOLERANCE)
