"""Spellings that other exporters use: each gives the numbers of its dense model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rewrite_variants as variants
from rewrite_support import Dense, Paged, rewrite_file

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.attention import FULL_WINDOW, Rope
from paged_trt.scripts.example_models.toy import write_toy

TOLERANCE = 0.15
CASES = {
    "causal_attribute": ("attention23-past", variants.causal_without_mask),
    "causal_attribute_and_mask": ("attention23-past", variants.set_attributes(is_causal=1)),
    "left_window": ("attention23-past", variants.left_window),
    "right_window": ("attention23-past", variants.right_window),
    "three_dimensional": ("attention23-past", variants.three_dimensional),
    "three_dimensional_concat": ("attention23-concat", variants.three_dimensional_concat),
    "three_dimensional_repeated": ("attention24-concat", variants.three_dimensional_repeated),
    "default_scale": ("attention23-past", variants.no_scale),
    "additive_infinity": ("attention23-concat", variants.additive_mask(-np.inf)),
    "additive_minimum": ("attention23-concat", variants.additive_mask(-65504.0)),
    "mask_cut_to_the_keys": ("attention24-concat", variants.mask_cut_to_the_keys),
    "positions_from_length": ("attention23-concat", variants.positions_from_past_length),
    "positions_from_mask": ("attention24-concat", variants.positions_from_attention_mask),
    "sinks": ("gqa", variants.head_sinks),
    "sinks_split": ("gqa-split", variants.head_sinks),
    "interleaved": ("gqa", variants.set_attributes(rotary_interleaved=1)),
    "partial_rotary": ("gqa", variants.partial_rotary),
    "position_ids": ("gqa", variants.group_query_positions),
    "zero_scale": ("gqa", variants.set_attributes(scale=0.0)),
    "window_and_softcap": ("gqa", variants.set_attributes(local_window_size=9, softcap=2.0)),
    "layers_that_differ": ("gqa", variants.layers_that_differ),
    "layers_that_differ_split": ("gqa-split", variants.layers_that_differ),
    "scaled_logits": ("gqa", variants.scaled_logits),
}


def write_variant(folder: Path, dialect: str, change: variants.Change) -> None:
    write_toy(folder / "toy", dialect)
    model = load_model(folder / "toy" / "model.onnx")
    change(model)
    (folder / "dense").mkdir()
    save_model(model, folder / "dense")


@pytest.mark.parametrize("mode", ["last", "all"])
@pytest.mark.parametrize("name", CASES)
def test_variant_gives_the_dense_logits(tmp_path: Path, name: str, mode: str) -> None:
    write_variant(tmp_path, *CASES[name])
    spec = rewrite_file(tmp_path / "dense", tmp_path / "paged", logits=mode)
    paged = Paged(tmp_path / "paged", spec)
    generator = np.random.default_rng(0)
    sequences = {i: generator.integers(0, 512, n) for i, n in enumerate((141, 130, 3))}
    steps = [
        paged.step({i: s[:-2] for i, s in sequences.items()}),
        paged.step({i: s[-2:-1] for i, s in sequences.items()}, padding=1),
        paged.step({i: s[-1:] for i, s in sequences.items()}),
    ]
    dense = Dense.load(tmp_path / "dense")
    for i, tokens in sequences.items():
        expected = dense.logits(tokens, [len(tokens) - 2, 1, 1])
        if mode == "last":
            actual, expected = np.stack([step[i] for step in steps]), expected[-3:]
        else:
            actual = np.concatenate([step[i] for step in steps])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_attributes_reach_the_spec(tmp_path: Path) -> None:
    write_variant(
        tmp_path,
        "gqa",
        variants.set_attributes(
            scale=0.25, softcap=7.0, local_window_size=33, rotary_interleaved=1
        ),
    )
    facts = survey(load_model(tmp_path / "dense" / "model.onnx"))
    for layer in facts.layers:
        assert (layer.softmax_scale, layer.softcap, layer.window) == (0.25, 7.0, 33)
        assert (layer.rope, layer.rotary_dim) == (Rope.INTERLEAVED, 64)


def test_layers_differ_in_the_spec(tmp_path: Path) -> None:
    write_variant(tmp_path, "gqa", variants.layers_that_differ)
    facts = survey(load_model(tmp_path / "dense" / "model.onnx"))
    assert [(layer.num_q_heads, layer.num_kv_heads, layer.head_dim) for layer in facts.layers] == [
        (4, 2, 64),
        (8, 4, 32),
    ]
    assert [(layer.window, layer.rotary_dim) for layer in facts.layers] == [
        (FULL_WINDOW, 64),
        (9, 32),
    ]


@pytest.mark.parametrize(("window", "expected"), [(None, FULL_WINDOW), (1, 1), (5000, 5000)])
@pytest.mark.parametrize("dialect", ["attention23-past", "attention24-concat"])
def test_window_is_deduced_from_the_mask(
    tmp_path: Path, dialect: str, window: int | None, expected: int
) -> None:
    write_toy(tmp_path, dialect, window=window)
    facts = survey(load_model(tmp_path / "model.onnx"))
    assert [layer.window for layer in facts.layers] == [expected] * 2
