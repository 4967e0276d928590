"""Prompts of the command line, as token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from paged_trt.plugins.errors import ConfigError, SequenceError
from paged_trt.plugins.manifest import TOKENIZER_FILES, check_files, read_manifest
from paged_trt.runtime.tokenizer import TOKENIZER_FILE, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its text where it was given as text, and its token ids."""

    text: str | None
    token_ids: tuple[int, ...]

    @property
    def label(self) -> str:
        """Text or ids, for reports."""
        return self.text if self.text is not None else ",".join(map(str, self.token_ids))


def open_tokenizer(engine_dir: Path) -> Tokenizer | None:
    """The engine directory's tokenizer; None where it was built without one.

    Raises:
        ManifestError: the directory is no engine, or a file is not the one that was built.
    """
    # The hashes of weights and plan wait until the prompts are known to be readable.
    check_files(engine_dir, read_manifest(engine_dir), names=TOKENIZER_FILES)
    return Tokenizer(engine_dir) if (engine_dir / TOKENIZER_FILE).is_file() else None


def read_prompts(
    tokenizer: Tokenizer | None, *, texts: Sequence[str], ids: Sequence[str], chat: bool
) -> list[Prompt]:
    """Texts first, then ids.

    Args:
        tokenizer: reads the texts.
        texts: text of each `--prompt`.
        ids: text of each `--input-ids`, such as `1,2,3`.
        chat: wrap each text in the chat template as one user message.

    Raises:
        ConfigError: there is text and no tokenizer, or `chat` without text.
        SequenceError: an id is no integer.
    """
    if chat and not texts:
        raise ConfigError("`--chat` wraps text; pass `--prompt TEXT` with it")
    return [
        *(Prompt(text, _encode(tokenizer, text, chat=chat)) for text in texts),
        *(Prompt(None, parse_ids(each)) for each in ids),
    ]


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids of `1,2,3`.

    Raises:
        SequenceError: an entry is no integer.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise SequenceError(
            f"`--input-ids` takes numbers with commas between, such as 1,2,3; got `{text}`"
        ) from error


def _encode(tokenizer: Tokenizer | None, text: str, *, chat: bool) -> tuple[int, ...]:
    if tokenizer is None:
        raise ConfigError(
            "the engine directory has no tokenizer, so text cannot be read; pass `--input-ids`, "
            "or build the engine with `--tokenizer PATH`"
        )
    if chat:
        rendered = tokenizer.chat_prompt([{"role": "user", "content": text}])
        # The template writes the special tokens itself.
        return tuple(tokenizer.encode(rendered, add_special_tokens=False))
    return tuple(tokenizer.encode(text))
