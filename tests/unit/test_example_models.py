import dataclasses
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.example_models.config import Dialect, LlamaConfig
from paged_trt.scripts.example_models.llama import make_llama, write_llama
from paged_trt.scripts.example_models.toy import TOY, toy_weights, write_toy

Array = npt.NDArray[Any]
DIALECTS = [pytest.param(dialect, id=dialect.value) for dialect in Dialect]
# Logits of the toy reach about 40; float16 keeps 11 bits of every activation on the way.
FLOAT16_TOLERANCE = 0.15
FLOAT32_TOLERANCE = 2e-4


class DenseSession:
    """Runs a written model in onnxruntime and keeps its cache."""

    def __init__(self, folder: Path, config: LlamaConfig) -> None:
        self.session = onnxruntime.InferenceSession(
            folder / "model.onnx", providers=["CPUExecutionProvider"]
        )
        self.config = config
        self.names = [each.name for each in self.session.get_inputs()]
        types = {each.name: each.type for each in self.session.get_inputs()}
        is_half = types["past_key_values.0.key"] == "tensor(float16)"
        self.cache_dtype = np.float16 if is_half else np.float32
        self.cache: list[Array] = []
        self.mask = np.zeros((0, 0), np.int64)

    def run(self, ids: Array, *, mask: Array | None = None) -> Array:
        """Logits `[batch, seq, vocab]` of the tokens `[batch, seq]` that follow the cache."""
        batch = ids.shape[0]
        if not self.cache:
            shape = (batch, self.config.num_kv_heads, 0, self.config.head_dim)
            self.cache = [np.zeros(shape, self.cache_dtype)] * (2 * self.config.num_layers)
            self.mask = np.zeros((batch, 0), np.int64)
        past = self.mask.shape[1]
        self.mask = np.concatenate([self.mask, np.ones_like(ids) if mask is None else mask], 1)
        feeds = {
            "input_ids": ids,
            "attention_mask": self.mask,
            "position_ids": np.broadcast_to(np.arange(past, past + ids.shape[1]), ids.shape),
        }
        for index, value in enumerate(self.cache):
            part = ("key", "value")[index % 2]
            feeds[f"past_key_values.{index // 2}.{part}"] = value
        feeds = {name: np.ascontiguousarray(feeds[name]) for name in self.names}
        logits, *self.cache = self.session.run(None, feeds)
        return np.asarray(logits, np.float64)


def reference_logits(config: LlamaConfig, weights: Mapping[str, Array], ids: Array) -> Array:
    """Logits `[seq, vocab]` of one sequence `[seq]`, in float64 and by the textbook."""
    seq, heads, dim = len(ids), config.num_heads, config.head_dim
    values = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    angles = np.arange(seq)[:, None] * config.rope_theta ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * angles)[:, None]
    distance = np.arange(seq)[:, None] - np.arange(seq)
    is_hidden = (distance < 0) | (distance >= (config.window or seq))

    def norm(x: Array, name: str) -> Array:
        root = np.sqrt(np.mean(x * x, -1, keepdims=True) + config.norm_epsilon)
        return np.asarray(x / root * values[f"{name}.weight"])

    def rotate(x: Array) -> Array:
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = values["model.embed_tokens.weight"][ids]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            (h @ values[f"{prefix}.self_attn.{each}_proj.weight"].T).reshape(seq, -1, dim)
            for each in "qkv"
        )
        group = heads // config.num_kv_heads
        q, k, v = rotate(q), np.repeat(rotate(k), group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        if config.softcap is not None:
            scores = config.softcap * np.tanh(scores / config.softcap)
        scores[:, is_hidden] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(seq, -1)
        x = x + mixed @ values[f"{prefix}.self_attn.o_proj.weight"].T
        h = norm(x, f"{prefix}.post_attention_layernorm")
        gate = h @ values[f"{prefix}.mlp.gate_proj.weight"].T
        up = h @ values[f"{prefix}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ values[f"{prefix}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return np.asarray(norm(x, "model.norm") @ values[f"{head}.weight"].T)


def tokens(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape)


def all_logits(session: DenseSession, ids: Array, *, append: bool) -> Array:
    """Logits of a prefill, perhaps of an append of three tokens, and of single steps, joined."""
    start = 12 if append else 9
    parts = [session.run(ids[:, :9])]
    if append:
        parts.append(session.run(ids[:, 9:12]))
    parts += [session.run(ids[:, step : step + 1]) for step in range(start, ids.shape[1])]
    return np.concatenate(parts, 1)


def found_and_wanted(
    folder: Path, dialect: Dialect, config: LlamaConfig, *, batch: int
) -> tuple[Array, Array]:
    ids = tokens(batch, 20)
    # onnxruntime's GroupQueryAttention appends several tokens to one sequence only.
    append = batch == 1 or not dialect.is_gqa
    found = all_logits(DenseSession(folder, config), ids, append=append)
    wanted = [reference_logits(config, toy_weights(config), row) for row in ids]
    return found, np.stack(wanted)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="plain"),
        pytest.param({"tie_embeddings": True}, id="tied"),
        pytest.param({"window": 5}, id="window"),
        pytest.param({"softcap": 3.0}, id="softcap"),
        pytest.param({"num_kv_heads": 4, "head_dim": 80, "rope_theta": 1e5}, id="multi-head"),
    ],
)
def test_every_dialect_equals_the_textbook_in_float32(
    tmp_path: Path, dialect: Dialect, overrides: dict[str, Any]
) -> None:
    config = write_toy(tmp_path, dialect, dtype=DType.FLOAT32, **overrides)
    found, wanted = found_and_wanted(tmp_path, dialect, config, batch=1)
    np.testing.assert_allclose(found, wanted, atol=FLOAT32_TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_float16_stays_near_the_textbook(tmp_path: Path, dialect: Dialect) -> None:
    config = write_toy(tmp_path, dialect)
    found, wanted = found_and_wanted(tmp_path, dialect, config, batch=2)
    assert np.abs(wanted).max() > 20
    np.testing.assert_allclose(found, wanted, atol=FLOAT16_TOLERANCE, rtol=0)
