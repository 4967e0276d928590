"""`export_huggingface`: the file holds PagedAttention nodes and gives the model's own logits."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rewrite_support import Paged, session

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.huggingface import _spec, export_huggingface
from paged_trt.builder.huggingface_attention import _refuse_options
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.errors import ConfigError, UnsupportedError

sys.path.insert(0, str(Path(__file__).parent))
from zoo import make_model

needs_export = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torch() -> Any:
    for name in ("transformers", "onnxscript"):
        pytest.importorskip(name, reason=f"{name} is not installed: `paged-trt[export]` brings it")
    return pytest.importorskip("torch", reason="torch is not installed")


def tokens_of(length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 500, length)


@needs_export
@pytest.mark.parametrize("family", ["gemma2", "qwen3", "gpt2"])
def test_gives_the_logits_of_the_model(torch: Any, tmp_path: Path, family: str) -> None:
    model = make_model(family, dtype="float16")
    before = model.config._attn_implementation
    file = export_huggingface(model, tmp_path, max_batch_size=2, max_kv_cache_capacity=300)
    assert model.config._attn_implementation == before
    loaded = load_model(file)
    spec = resolve(
        BuildConfig(max_batch_size=2, max_input_len=290, max_kv_cache_capacity=300, logits="all"),
        survey(loaded),
    )
    (tmp_path / "built").mkdir()
    save_model(rewrite(loaded, facts=survey(loaded), spec=spec), tmp_path / "built")
    paged = Paged(tmp_path / "built", spec)
    sequences = {0: tokens_of(140), 1: tokens_of(3)}
    first = paged.step({i: tokens[:-1] for i, tokens in sequences.items()})
    second = paged.step({i: tokens[-1:] for i, tokens in sequences.items()})
    reference = model.float()
    for i, tokens in sequences.items():
        with torch.no_grad():
            expected = reference(torch.from_numpy(tokens)[None]).logits[0].numpy()
        actual = np.concatenate([first[i], second[i]])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=0.01 * np.abs(expected).max())


@needs_export
def test_the_file_runs_as_it_is(torch: Any, tmp_path: Path) -> None:
    file = export_huggingface(make_model("llama", dtype="float16"), tmp_path)
    assert "key_pool.0" in {each.name for each in session(file).get_inputs()}


@needs_export
def test_window_and_softcap_reach_the_nodes(torch: Any, tmp_path: Path) -> None:
    file = export_huggingface(make_model("gemma2", dtype="float16"), tmp_path)
    layers = survey(load_model(file)).layers
    assert [layer.window for layer in layers] == [100, -1]
    assert {layer.softcap for layer in layers} == {3.0}


@needs_export
def test_alibi_is_refused(torch: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="0 of 2 layers of BloomForCausalLM"):
        export_huggingface(make_model("bloom", dtype="float16"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_export
def test_float32_is_refused(torch: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float16 or bfloat16, got float32"):
        export_huggingface(make_model("llama", dtype="float32"), tmp_path)


@needs_export
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["chunked_attention"] * 2}, "`chunked_attention`"),
        ({"layer_types": ["sliding_attention"] * 2}, "leaves to a mask"),
        ({"sliding_window": 100}, "leaves to a mask"),
        ({"num_kv_shared_layers": 1}, "last 1 layers read the cache"),
    ],
)
def test_layers_that_say_less_than_they_do(
    torch: Any, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    model = make_model("llama", dtype="float16")
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedError, match=words):
        export_huggingface(model, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_mask": 1}, "`head_mask`"),
        ({"dropout": 0.1}, "`dropout`"),
        ({"is_causal": False}, "`is_causal`"),
    ],
)
def test_what_is_said_to_attention_and_is_not_known(options: dict[str, Any], words: str) -> None:
    class Module:
        is_causal = True

    with pytest.raises(UnsupportedError, match=f"layer 0 hands {words}"):
        _refuse_options(Module(), "layer 0", options)


@pytest.mark.parametrize(
    ("dtype", "capacity", "words"),
    [("float64", 128, "float16 or bfloat16, got float64"), ("float16", 0, "max_kv_cache_capacity")],
)
def test_limits_and_types_are_checked(dtype: str, capacity: int, words: str) -> None:
    model = types.SimpleNamespace(dtype=f"torch.{dtype}")
    with pytest.raises(ConfigError, match=words):
        _spec(model, [], max_batch_size=1, max_kv_cache_capacity=capacity)


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UnsupportedError, match=r'pip install "paged-trt\[export\]"'):
        export_huggingface(object(), tmp_path)
