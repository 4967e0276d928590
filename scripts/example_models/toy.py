"""A random two-layer Llama that is small enough for unit tests, with tokenizer and configs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import numpy as np

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.example_models.config import Dialect, LlamaConfig
from paged_trt.scripts.example_models.graph import FloatArray
from paged_trt.scripts.example_models.llama import write_llama
from paged_trt.scripts.example_models.tokenizer_files import (
    byte_alphabet,
    write_configs,
    write_tokenizer,
)
from paged_trt.scripts.files import require_new_folder

BOS_TOKEN, EOS_TOKEN = "<s>", "</s>"
TOY = LlamaConfig(
    hidden_size=128,
    intermediate_size=320,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=512,
    max_positions=2048,
    bos_token_id=256,
    eos_token_id=257,
)


def write_toy(
    path: Path,
    dialect: Dialect | str,
    *,
    seed: int = 0,
    dtype: DType = DType.FLOAT16,
    **overrides: Any,
) -> LlamaConfig:
    """Writes a folder of `model.onnx`, its data, `tokenizer.json` and the two configs.

    Ids 0 to 255 are bytes, then come bos and eos, and then tokens that no text encodes to.
    Greedy decoding never yields eos, because its row of the head is zero.

    Args:
        path: the folder; it is made.
        dialect: how the graph is spelt.
        seed: of the weights.
        dtype: type of weights, activations and cache.
        **overrides: fields of `LlamaConfig` that differ from `TOY`.

    Returns:
        The configuration that was written.

    Raises:
        ConfigError: an override names no field, or the fields do not fit together.
    """
    unknown = set(overrides) - {field.name for field in dataclasses.fields(LlamaConfig)}
    if unknown:
        raise ConfigError(f"`{min(unknown)}` is no field of a Llama; see `LlamaConfig`")
    config = dataclasses.replace(TOY, **overrides)
    if config.vocab_size < TOY.vocab_size // 2 + 2:
        raise ConfigError(f"`vocab_size` is {config.vocab_size}; pass at least 258")
    path.mkdir(parents=True, exist_ok=True)
    weights = toy_weights(config, seed=seed)
    write_llama(path / "model.onnx", config, weights, dialect=Dialect(dialect), dtype=dtype)
    tokens = [*byte_alphabet(), BOS_TOKEN, EOS_TOKEN]
    tokens += [f"<unused_{index}>" for index in range(len(tokens), config.vocab_size)]
    special = [BOS_TOKEN, EOS_TOKEN]
    write_tokenizer(path / "tokenizer.json", tokens, [], special=special, individual_digits=False)
    named = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    write_configs(path, config, tokens=named, chat_template=None)
    return config


def toy_weights(config: LlamaConfig, *, seed: int = 0) -> dict[str, FloatArray]:
    """Random float32 weights by Hugging Face name.

    The scales are chosen so that a wrong token, position or cache entry changes the output,
    and that rounding to float16 does not.
    """
    generator = np.random.default_rng(seed)
    weights: dict[str, FloatArray] = {}
    for name, shape in config.weight_shapes().items():
        array = generator.standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            weights[name] = 1 + array / 10
        elif name == "model.embed_tokens.weight":
            weights[name] = array
        elif name == "lm_head.weight":
            weights[name] = array * _head_scale(array.shape, generator)
        else:
            # Scores of standard deviation 2 attend sharply; the rest keeps unit variance.
            gain = 1.4 if "q_proj" in name or "k_proj" in name else 1.0
            weights[name] = array * np.float32(gain / np.sqrt(shape[1]))
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    weights[head][config.eos_token_id] = 0
    return weights


def _head_scale(shape: tuple[int, ...], generator: np.random.Generator) -> FloatArray:
    """Spread-out norms of the rows, which keep the two largest logits apart."""
    spread = generator.standard_normal((shape[0], 1), np.float32)
    return np.asarray(np.exp(spread / 2) * 8 / np.sqrt(shape[1]), np.float32)


@click.command()
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option(
    "--dialect",
    type=click.Choice([each.value for each in Dialect]),
    default=Dialect.ATTENTION23_PAST.value,
    show_default=True,
    help="How the ONNX file spells attention.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights.")
def main(out_dir: Path, dialect: str, seed: int) -> None:
    """Write a random two-layer Llama as ONNX with tokenizer and configs into OUT_DIR.

    \b
    Example:
      python -m paged_trt.scripts.example_models.toy toy
    """
    require_new_folder(out_dir)
    write_toy(out_dir, dialect, seed=seed)
    click.echo(f"wrote {out_dir}")


if __name__ == "__main__":
    end(run_command(main))
