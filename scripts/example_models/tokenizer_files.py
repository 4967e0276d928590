"""Writes the small files of a Hugging Face folder: tokenizer and configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paged_trt.scripts.example_models.config import LlamaConfig


def byte_alphabet() -> list[str]:
    """The character that GPT-2's byte-level BPE shows for each byte, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, extra = [], 0x100
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(extra))
            extra += 1
    return characters


def write_tokenizer(
    path: Path,
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    special: Sequence[str],
    individual_digits: bool,
) -> None:
    """Writes `tokenizer.json` of a byte-level BPE.

    Args:
        path: the file to write.
        tokens: all tokens by id, in the byte-level alphabet.
        merges: pairs `left right`, the earliest first.
        special: tokens that are never split and are left out of decoded text.
        individual_digits: whether every digit is a token of its own.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if individual_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(path))


def write_configs(
    folder: Path, config: LlamaConfig, *, tokens: Mapping[str, str], chat_template: str | None
) -> None:
    """Writes `config.json` and `tokenizer_config.json`.

    Args:
        folder: an existing folder.
        config: shape of the model.
        tokens: entries such as `eos_token` of `tokenizer_config.json`.
        chat_template: Jinja source, if the model has one.
    """
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    for name, content in (
        ("config.json", config.hugging_face()),
        ("tokenizer_config.json", settings),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
