"""User input: what `resolve` makes of it, and each thing that it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.facts import Dialect, ModelFacts, PositionLimit
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, KvPoolError
from paged_trt.plugins.kv import MAX_KV_CACHE_CAPACITY
from paged_trt.plugins.kv_scales import read_scales_file, require_scales
from paged_trt.plugins.tensors import LogitsMode

LAYER = AttentionSpec(
    num_q_heads=4, num_kv_heads=2, head_dim=64, value_head_dim=64, softmax_scale=0.125
)
FACTS = ModelFacts(
    dialect=Dialect.ATTENTION,
    layers=(LAYER, LAYER),
    activation_dtype=DType.FLOAT16,
    kv_cache_dtype=DType.FLOAT16,
    vocab_size=512,
    logits_dtype=DType.FLOAT16,
    reads_position_ids=True,
    position_limits=(PositionLimit(name="cos_cache", positions=4096),),
)


def config(**overrides: Any) -> BuildConfig:
    limits = {"max_batch_size": 4, "max_input_len": 200, "max_kv_cache_capacity": 300}
    return BuildConfig(**{**limits, **overrides})


def facts(**overrides: Any) -> ModelFacts:
    # Only a paged model has a cache of another type.
    cache = overrides.get("activation_dtype", FACTS.kv_cache_dtype)
    return dataclasses.replace(FACTS, **{"kv_cache_dtype": cache, **overrides})


def test_defaults() -> None:
    spec = resolve(config(), FACTS)
    assert (spec.pool.num_pages, spec.pool.max_pages_per_seq) == (12, 3)
    assert spec.layers == FACTS.layers
    assert spec.activation_dtype is spec.kv_cache_dtype is spec.logits_dtype is DType.FLOAT16
    assert spec.logits_mode is LogitsMode.LAST
    assert (spec.max_input_len, spec.max_num_tokens) == (200, 200)
    assert spec.reads_position_ids


def test_auto_keeps_the_pools_of_a_paged_model(tmp_path: Path) -> None:
    paged = facts(kv_cache_dtype=DType.INT8)
    with pytest.raises(ConfigError, match="int8 KV cache needs scales"):
        resolve(config(), paged)
    assert resolve(config(kv_scales=tmp_path / "s"), paged).kv_cache_dtype is DType.INT8
    assert resolve(config(kv_cache_dtype="float16"), paged).kv_cache_dtype is DType.FLOAT16


def test_auto_follows_a_converted_model() -> None:
    whole = facts(activation_dtype=DType.FLOAT32, kv_cache_dtype=DType.FLOAT32)
    assert resolve(config(dtype="bfloat16"), whole).kv_cache_dtype is DType.BFLOAT16


def test_page_counts() -> None:
    assert resolve(config(retained_pages=5), FACTS).pool.num_pages == 17
    assert resolve(config(kv_pool_pages=40), FACTS).pool.num_pages == 40
    with pytest.raises(KvPoolError, match="exclude each other"):
        resolve(config(retained_pages=0, kv_pool_pages=40), FACTS)
    with pytest.raises(KvPoolError, match="at least 12"):
        resolve(config(kv_pool_pages=11), FACTS)


def test_long_prompts_are_prefilled_in_chunks_on_request() -> None:
    spec = resolve(config(max_input_len=4000, max_kv_cache_capacity=4096), FACTS)
    assert spec.max_num_tokens == 4000
    assert resolve(config(max_num_tokens=64), FACTS).max_num_tokens == 64


@pytest.mark.parametrize(
    "name", ["max_batch_size", "max_input_len", "max_kv_cache_capacity", "max_num_tokens"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4", np.int64(4), 2**31])
def test_no_count(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")) as caught:
        resolve(config(**{name: value}), FACTS)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["retained_pages", "kv_pool_pages"])
@pytest.mark.parametrize("value", [-1, 2.0, True, "4"])
def test_no_page_count(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        resolve(config(**{name: value}), FACTS)


def test_prompt_over_capacity() -> None:
    with pytest.raises(ConfigError, match=r"301 .* 300"):
        resolve(config(max_input_len=301), FACTS)


def test_capacity_over_a_position_table() -> None:
    resolve(config(max_kv_cache_capacity=4096), FACTS)
    with pytest.raises(ConfigError, match=r"4097 is over the 4096 positions of `cos_cache`"):
        resolve(config(max_kv_cache_capacity=4097), FACTS)


def test_capacity_over_the_limit() -> None:
    with pytest.raises(ConfigError, match=str(MAX_KV_CACHE_CAPACITY)):
        resolve(config(max_kv_cache_capacity=MAX_KV_CACHE_CAPACITY + 1), FACTS)


def test_float32_model_needs_a_type() -> None:
    wide = facts(activation_dtype=DType.FLOAT32, logits_dtype=DType.FLOAT32)
    with pytest.raises(ConfigError, match="--dtype float16"):
        resolve(config(), wide)
    spec = resolve(config(dtype="bfloat16"), wide)
    assert spec.activation_dtype is spec.kv_cache_dtype is spec.logits_dtype is DType.BFLOAT16


def test_logits_that_are_float32_on_purpose_stay_so() -> None:
    spec = resolve(config(dtype="bfloat16"), facts(logits_dtype=DType.FLOAT32))
    assert (spec.activation_dtype, spec.logits_dtype) == (DType.BFLOAT16, DType.FLOAT32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("dtype", "int8"),
        ("dtype", 7),
        ("kv_cache_dtype", "float32"),
        ("kv_cache_dtype", None),
        ("logits", "first"),
    ],
)
def test_choices(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}` must be one of"):
        resolve(config(**{name: value}), FACTS)


def test_scales_belong_to_a_quantised_pool() -> None:
    scales = Path("scales.safetensors")
    spec = resolve(config(kv_cache_dtype="int8", kv_scales=scales), FACTS)
    assert spec.kv_cache_dtype is DType.INT8
    with pytest.raises(ConfigError, match="--kv-scales"):
        resolve(config(kv_cache_dtype=DType.FLOAT8), FACTS)
    with pytest.raises(ConfigError, match="this one is float16"):
        resolve(config(kv_scales=scales), FACTS)


def test_model_that_keeps_last_tokens() -> None:
    with pytest.raises(ConfigError, match="--logits last"):
        resolve(config(logits="all"), facts(last_tokens_only=True))


def test_no_layer() -> None:
    with pytest.raises(ConfigError, match="at least one attention layer"):
        resolve(config(), facts(layers=()))


def write_scales(path: Path, **changes: object) -> Path:
    tensors: dict[str, Any] = {
        f"kv_scales.{index}": np.full((2, 2), 0.5 + index, np.float32) for index in range(2)
    }
    tensors |= changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.numpy.save_file(kept, path)
    return path


def read(path: Path) -> list[npt.NDArray[np.float32]]:
    return list(require_scales(read_scales_file(path), FACTS.layers, where="the file").values())


def test_read_scales(tmp_path: Path) -> None:
    scales = read(write_scales(tmp_path / "s"))
    assert [each.tolist() for each in scales] == [[[0.5, 0.5]] * 2, [[1.5, 1.5]] * 2]
    assert {each.dtype for each in scales} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_scales.1": None}, "missing"),
        ({"kv_scales.2": np.ones((2, 2), np.float32)}, "unknown"),
        ({"kv_scales.01": np.ones((2, 2), np.float32)}, "unknown"),
        ({"kv_scales.1": np.ones((2, 4), np.float32)}, r"float32 \[2, 2\], found float32 \[2, 4\]"),
        ({"kv_scales.1": np.ones((2, 2), np.float64)}, "found float64"),
        ({"kv_scales.1": np.ones((2, 2), ml_dtypes.bfloat16)}, "kv_scales.1|float32"),
        ({"kv_scales.1": np.zeros((2, 2), np.float32)}, "positive and finite"),
        ({"kv_scales.1": np.full((2, 2), -1, np.float32)}, "holds -1.0"),
        ({"kv_scales.1": np.full((2, 2), np.inf, np.float32)}, "holds inf"),
        ({"kv_scales.1": np.full((2, 2), np.nan, np.float32)}, "holds nan"),
    ],
)
def test_wrong_scales(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(write_scales(tmp_path / "s", **changes))


def test_no_scales_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file of KV scales"):
        read(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="no safetensors file"):
        read(tmp_path / "junk")
