"""`paged-trt calibrate`: scales against the dense model's own cache, files, reports, refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from paged_trt.builder.config import BuildConfig
from paged_trt.builder.pipeline import BuildRequest, plan_build
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, ExecutionError
from paged_trt.runtime import calibration
from paged_trt.runtime.calibration import HeadMaxima, scales_of, silent_heads
from paged_trt.runtime.decoders import open_decoder
from paged_trt.runtime.dense import greedy
from paged_trt.scripts import calibrate as command
from paged_trt.scripts.calibration import calibrate, split_prompts
from paged_trt.scripts.calibration_prompts import BUILT_IN
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.toy import write_toy

PROMPTS = ((1, 2, 3), tuple(range(5, 140)), (9,), (4, 5, 6, 7), (8, 8, 8))
NEW_TOKENS = 4


@pytest.fixture(scope="module", params=["attention23-past", "gqa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("toy") / "model"
    write_toy(folder, request.param)
    return folder / "model.onnx"


def dense_maxima(model: Path, prompts: Any) -> Any:
    """Largest magnitudes in the cache of the un-rewritten model, `[2, Hkv]` of each layer."""
    decoder: Any = open_decoder(model)
    found: dict[str, Any] = {}
    for prompt in prompts:
        greedy(decoder, np.asarray(prompt), NEW_TOKENS)
        for name, cache in decoder._caches.items():
            # Rows behind the sequence are no tokens of it.
            tokens = np.abs(cache[:, :, : decoder._past_len].astype(np.float32))
            found[name] = np.maximum(found.get(name, 0), tokens.max(axis=(0, 2, 3)))
    names = sorted(found)
    return [np.stack([found[key], found[value]])
            for key, value in zip(names[::2], names[1::2], strict=True)]  # fmt: skip


def test_scales_are_the_largest_of_the_dense_cache(model: Path) -> None:
    found = calibrate(model, PROMPTS, DType.FLOAT8, dtype=None, num_new_tokens=NEW_TOKENS)
    seen, held_out = split_prompts(PROMPTS)
    assert (len(seen), len(held_out), found.num_prompts) == (4, 1, 4)
    expected = dense_maxima(model, seen)
    assert len(found.scales) == len(expected) == 2
    for index, maxima in enumerate(expected):
        # Two runtimes of one model round a key differently now and then.
        np.testing.assert_allclose(found.scales[f"kv_scales.{index}"] * 448, maxima, rtol=2e-3)
    assert found.maxima.num_tokens == sum(len(each) + NEW_TOKENS - 1 for each in seen)


@pytest.mark.parametrize("kv", ["float8", "int8"])
def test_the_file_is_what_a_build_takes(
    kv: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scales.safetensors"
    path.write_bytes(b"an older one")
    words = [f"--input-ids={','.join(map(str, prompt))}" for prompt in PROMPTS]
    options = ["--kv-cache-dtype", kv, "--new-tokens", "4", "--json"]
    assert main(["calibrate", str(model), "-o", str(path), *options, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv_cache_dtype"] == kv
    assert report["baseline_dtype"] == "float16"
    assert report["prompts"] == 4
    assert 0 < report["max_logit_difference"] < report["held_out"][0]["limit"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name]
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata()["kv_cache_dtype"] == kv
    config = BuildConfig(
        max_batch_size=1,
        max_input_len=32,
        max_kv_cache_capacity=64,
        kv_cache_dtype=kv,
        kv_scales=path,
    )
    plan = plan_build(BuildRequest(model=model, target=None, config=config))
    assert plan.spec.kv_cache_dtype is DType(kv)
    other = {"float8": "int8", "int8": "float8"}[kv]
    wrong = dataclasses.replace(config, kv_cache_dtype=other)
    message = f"holds scales of a {kv} KV cache and this one is {other}.*--kv-cache-dtype {other}"
    with pytest.raises(ConfigError, match=message):
        plan_build(BuildRequest(model=model, target=None, config=wrong))


def test_the_held_out_prompts_do_not_make_the_scales(model: Path) -> None:
    first = calibrate(model, PROMPTS, DType.INT8, dtype=None, num_new_tokens=1)
    others = (*PROMPTS[:3], (77, 78, 79, 80, 81), PROMPTS[4])
    second = calibrate(model, others, DType.INT8, dtype=None, num_new_tokens=1)
    for name, scales in first.scales.items():
        np.testing.assert_array_equal(scales, second.scales[name])


def test_scales_too_small_are_seen_in_the_report(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is worth something: saturating most keys and values moves the logits."""
    good = calibrate(model, PROMPTS, DType.INT8, dtype=None, num_new_tokens=1)
    monkeypatch.setitem(calibration.LARGEST, DType.INT8, 127.0 * 50)
    bad = calibrate(model, PROMPTS, DType.INT8, dtype=None, num_new_tokens=1)
    assert bad.results[0].max_difference > 5 * good.results[0].max_difference


def test_text_prompts_and_the_built_in_set(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "BUILT_IN", BUILT_IN[:5])
    path = tmp_path / "scales.safetensors"
    short = ["--new-tokens", "1", "--max-prompt-len", "8"]
    assert main(["calibrate", str(model), "-o", str(path), *short]) == 0
    out = capsys.readouterr().out
    assert "held-out prompts" in out
    assert "from 4 prompts, 32 tokens" in out
    lines = tmp_path / "prompts.txt"
    lines.write_text("One.\n\n  Two two.\n", encoding="utf-8")
    assert main(["calibrate", str(model), "-o", str(path), "--prompts", str(lines), *short]) == 0
    assert "from 1 prompts" in capsys.readouterr().out
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input-ids", "1,2"], "two or more"),
        (["--input-ids", "1,2", "--prompts", "x"], "exclude each other"),
        (["--prompts", "no-such-file"], "no file of prompts"),
        (["--input-ids", "1", "--input-ids", "999"], "999"),
        (["--tokenizer", "."], "tokenizer.json"),
        (["--input-ids", "1", "--input-ids", "2", "--new-tokens", "3000"], "positions"),
    ],
)
def test_what_cannot_work_is_refused_and_writes_nothing(
    words: list[str], message: str, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "scales.safetensors"
    assert main(["calibrate", str(model), "-o", str(path), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_json_where_the_report_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", str(tmp_path / "none.onnx"), "-o", str(tmp_path / "scales"), "--json"]
    assert main([*words, "--input-ids", "1", "--input-ids", "2"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "PTRT-C001"


def test_no_folder_for_the_file_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "no-model.onnx", "-o", "/no/such/folder/x.safetensors"]) == 2
    assert "no directory" in capsys.readouterr().err


def test_a_silent_head_gets_a_positive_scale_and_a_note() -> None:
    maxima = HeadMaxima(layers=(np.array([[0.0, 2.0], [1e-44, 4.0]], np.float32),), num_tokens=1)
    scales = scales_of(maxima, DType.INT8)["kv_scales.0"]
    assert (scales > 0).all()
    assert scales[0, 1] == np.float32(2.0 / 127)
    assert silent_heads(maxima) == ["layer 0 key head 0"]
    with pytest.raises(ConfigError, match="needs no scales"):
        scales_of(maxima, DType.BFLOAT16)


def test_an_overflowing_model_is_named() -> None:
    pool = np.zeros((1, 2, 128, 16), np.float16)
    pool[0, 1, 3] = np.inf
    with pytest.raises(ExecutionError, match=r"`key_pool.0` holds inf in head 1"):
        calibration._head_maxima(pool, "key_pool.0")


def test_few_prompts_hold_out_the_last() -> None:
    assert split_prompts([(1,), (2,)]) == ([(1,)], [(2,)])
    assert split_prompts([(1,)]) == ([], [(1,)])
    seen, held_out = split_prompts([(index,) for index in range(9)])
    assert held_out == [(3,), (7,)]
    assert len(seen) == 7
