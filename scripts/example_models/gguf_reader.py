"""Reads a Llama from a GGUF file: configuration, tokenizer and dequantised weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from paged_trt.plugins.errors import ConfigError, PackageMissingError, UnsupportedError
from paged_trt.scripts.example_models.config import LlamaConfig
from paged_trt.scripts.example_models.graph import FloatArray

# tokenizer.ggml.token_type of tokens that stand for no text, such as `<|im_end|>`.
_CONTROL_TOKEN = 3
# tokenizer.ggml.pre of the byte-level tokenizers that split digits one by one.
_DIGIT_SPLITTERS = frozenset({"smollm"})

_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_MODEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """A byte-level BPE that splits digits.

    Attributes:
        tokens: all tokens by id.
        merges: pairs `left right`, the earliest first.
        special: control tokens, which are never split.
        chat_template: Jinja source, if the file has one.
    """

    tokens: list[str]
    merges: list[str]
    special: list[str]
    chat_template: str | None


class GgufLlama(Mapping[str, FloatArray]):
    """Float32 weights of a GGUF file by Hugging Face name, dequantised when asked for.

    Args:
        path: the file.

    Raises:
        UnsupportedError: `gguf` is not installed, or the file holds no plain Llama.
        ConfigError: the file is missing or no GGUF.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = _import_gguf()
        try:
            self._reader = self._gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"`{path}` is no readable GGUF file ({error}); check it") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise UnsupportedError(f"`{path}` is a `{architecture}`; pass a GGUF of a `llama`")
        self.config = self._read_config()
        self._refuse_extras()

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata entry of the file, or `default`."""
        entry = self._reader.get_field(name)
        return default if entry is None else entry.contents()

    def __getitem__(self, name: str) -> FloatArray:
        tensor = self._tensors[_gguf_name(name)]
        array = np.asarray(self._gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if name.endswith("q_proj.weight"):
            return half_split_rows(array, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return half_split_rows(array, self.config.num_kv_heads)
        return array

    def __contains__(self, name: object) -> bool:
        # The inherited method would dequantise the weight to find out.
        return name in self.config.weight_shapes() and _gguf_name(str(name)) in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.config.weight_shapes())

    def __len__(self) -> int:
        return len(self.config.weight_shapes())

    def tokenizer(self) -> GgufTokenizer:
        """The tokenizer of the file.

        Raises:
            UnsupportedError: it is of another kind than `GgufTokenizer`.
        """
        model, kind = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre")
        if model != "gpt2" or kind not in _DIGIT_SPLITTERS:
            raise UnsupportedError(
                f"tokenizer `{model}` with pre-tokenizer `{kind}` is not known; pass a GGUF with "
                f"`gpt2` and one of {', '.join(sorted(_DIGIT_SPLITTERS))}"
            )
        tokens = self.field("tokenizer.ggml.tokens")
        kinds = self.field("tokenizer.ggml.token_type")
        return GgufTokenizer(
            tokens=tokens,
            merges=self.field("tokenizer.ggml.merges"),
            special=[
                token for token, each in zip(tokens, kinds, strict=True) if each == _CONTROL_TOKEN
            ],
            chat_template=self.field("tokenizer.chat_template"),
        )

    def _refuse_extras(self) -> None:
        """Refuses biases, experts and scaled rotary embedding instead of dropping them."""
        unknown = self._tensors.keys() - {_gguf_name(name) for name in self}
        scaling = self.field("llama.rope.scaling.type", "none")
        if unknown or scaling != "none":
            what = f"tensor `{min(unknown)}`" if unknown else f"rotary scaling `{scaling}`"
            raise UnsupportedError(
                f"{what} is no part of a plain Llama; pass a GGUF without biases, experts and "
                "rotary scaling"
            )

    def _read_config(self) -> LlamaConfig:
        def number(name: str) -> Any:
            value = self.field(name)
            if value is None:
                raise ConfigError(f"the GGUF file has no `{name}`; convert the model again")
            return value

        num_heads = number("llama.attention.head_count")
        hidden_size = number("llama.embedding_length")
        return LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=number("llama.feed_forward_length"),
            num_layers=number("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=self.field("llama.attention.head_count_kv", num_heads),
            head_dim=self.field("llama.attention.key_length", hidden_size // num_heads),
            vocab_size=len(number("tokenizer.ggml.tokens")),
            max_positions=number("llama.context_length"),
            bos_token_id=number("tokenizer.ggml.bos_token_id"),
            eos_token_id=number("tokenizer.ggml.eos_token_id"),
            rope_theta=self.field("llama.rope.freq_base", 10000.0),
            # float32 in the file; the shortest decimal is what its author wrote.
            norm_epsilon=float(str(np.float32(number("llama.attention.layer_norm_rms_epsilon")))),
            tie_embeddings="output.weight" not in self._tensors,
        )


def half_split_rows(array: FloatArray, heads: int) -> FloatArray:
    """Undoes the order in which GGUF stores the rows of q_proj and k_proj.

    llama.cpp rotates neighbours (2i, 2i + 1) and its converter interleaves the rows to suit;
    the ONNX operators rotate (i, i + head_dim / 2), as Hugging Face does.

    Args:
        array: `[heads * head_dim, in]`.
        heads: of this projection.
    """
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    """GGUF's name of a weight.

    Raises:
        KeyError: it has none.
    """
    module = name.removesuffix(".weight")
    if module in _MODEL_TENSORS:
        return f"{_MODEL_TENSORS[module]}.weight"
    prefix, _, rest = module.partition("model.layers.")
    layer, _, part = rest.partition(".")
    if prefix or part not in _LAYER_TENSORS:
        raise KeyError(name)
    return f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise PackageMissingError(
            'reading a GGUF file needs the package `gguf`; `pip install "paged-trt[demo]"`'
        ) from error
    return gguf
