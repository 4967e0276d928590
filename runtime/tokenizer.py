"""Text to token ids and back, from the tokenizer files of an engine directory.

No code of the directory is run: `tokenizer.json` is data, and a chat template is rendered in
a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import tokenizers

from paged_trt.plugins.errors import ConfigError, ManifestError, SequenceError
from paged_trt.runtime.chat_template import render

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
_EOS_FILES: Final = ("generation_config.json", "config.json")
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED_TOKENS: Final = 3
"""Tokens that may be part of a character of 4 bytes that is not complete."""
_MAX_UNCERTAIN: Final = 16
"""Tokens from which on the beginning of their text is emitted, or they have none."""


class Tokenizer:
    """Encodes prompts, decodes tokens, and knows which tokens end a text.

    Args:
        directory: holds `tokenizer.json`, and perhaps `generation_config.json`,
            `config.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Raises:
        ManifestError: `tokenizer.json` is missing, or a file is not what it claims to be.
    """

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        path = self._directory / TOKENIZER_FILE
        if not path.is_file():
            raise ManifestError(
                f"{path} does not exist; rebuild with `paged-trt build --tokenizer PATH`, or "
                "pass token ids"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ManifestError(
                f"{path} is no tokenizer ({error}); copy it from the source model again"
            ) from error
        self._config = _read_object(self._directory / TOKENIZER_CONFIG_FILE)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text; empty where no file names one.

        The first of `generation_config.json`, `config.json` and `tokenizer_config.json` that
        names one decides.

        Raises:
            ManifestError: a file names something that is no token.
        """
        for name in _EOS_FILES:
            found = _read_object(self._directory / name).get("eos_token_id")
            if found is not None:
                ids = found if isinstance(found, list) else [found]
                if not all(type(each) is int and each >= 0 for each in ids):
                    _refuse(self._directory / name, "eos_token_id", found)
                return frozenset(ids)
        token = self._special_token("eos_token")
        if token is None:
            return frozenset()
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            _refuse(self._directory / TOKENIZER_CONFIG_FILE, "eos_token", token)
        return frozenset({token_id})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: what to encode.
            add_special_tokens: let the tokenizer add its beginning-of-text token. False for
                the result of `chat_prompt`, which holds them already.

        Raises:
            SequenceError: the text holds half a character of UTF-16, as bytes that are no text
                become.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SequenceError(
                f"the prompt holds bytes that are no UTF-8 text: {error}; encode it as UTF-8, or "
                "pass token ids"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """Decoder for tokens that come one by one."""
        return TextStream(self)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, untrusted; None where the model has none.

        Raises:
            ManifestError: a file holds something else in its place.
        """
        path = self._directory / CHAT_TEMPLATE_FILE
        if path.is_file():
            return _read_text(path)
        found = self._config.get("chat_template")
        if isinstance(found, list):
            # Several named templates: `default` is the one for a conversation.
            named = {each.get("name"): each for each in found if isinstance(each, dict)}
            found = named.get("default", {}).get("template")
        if found is not None and not isinstance(found, str):
            _refuse(self._directory / TOKENIZER_CONFIG_FILE, "chat_template", found)
        return found

    def chat_variables(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """What the chat template reads to render a conversation, ready for the answer.

        Args:
            messages: dicts of `role` and `content`.
        """
        return {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "bos_token": self._special_token("bos_token") or "",
            "eos_token": self._special_token("eos_token") or "",
        }

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Prompt text of a conversation, ready for the answer.

        The template runs in this process without a limit of time; a server takes
        `TemplateProcess`.

        Args:
            messages: dicts of `role` and `content`.

        Raises:
            ConfigError: the model has no chat template, or its template refuses the messages.
            UnsupportedError: jinja2 is not installed.
        """
        template = self.chat_template
        if template is None:
            raise ConfigError(
                f"{self._directory} has no chat template; pass a plain prompt, or add "
                f"{CHAT_TEMPLATE_FILE}"
            )
        return render(template, self.chat_variables(messages))

    def _special_token(self, name: str) -> str | None:
        found = self._config.get(name)
        if isinstance(found, dict):
            found = found.get("content")
        if found is not None and not isinstance(found, str):
            _refuse(self._directory / TOKENIZER_CONFIG_FILE, name, found)
        return found


class TextStream:
    """Decodes tokens one by one and never emits part of a character.

    A character may span several tokens, and a token's text may depend on the one before, so
    the newest tokens are decoded together with those of the last emitted piece.

    A text that ends with U+FFFD may be a character that is not complete, or U+FFFD itself. A
    character has 4 bytes at most and a token one or more: behind what only the 3 newest tokens can
    still change the text is certain. So a model that goes on with broken bytes, or with tokens
    that have no text, costs no more for each token than another one.

    Args:
        tokenizer: decodes the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._newest: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; the text that is complete now, perhaps none."""
        self._newest.append(token_id)
        text = self._text(self._newest)
        if text and not text.endswith(_UNFINISHED):
            self._emit(len(self._newest))
            return text
        if len(self._newest) < _MAX_UNCERTAIN:
            return ""
        if not text:
            del self._newest[:-_UNFINISHED_TOKENS]
            return ""
        return self._certain(text)

    def finish(self) -> str:
        """The rest of the text: a character that never became complete is one U+FFFD or more."""
        text = self._text(self._newest)
        self._emit(len(self._newest))
        return text

    def _certain(self, text: str) -> str:
        """The beginning of the newest tokens' text that no other token can change."""
        latest = len(self._newest) - _UNFINISHED_TOKENS
        # Where a character lies on both sides of one place, it does not at another one before.
        for count in range(latest, latest - _UNFINISHED_TOKENS - 1, -1):
            certain = self._text(self._newest[:count])
            if not certain:
                del self._newest[:count]
                return ""
            if text.startswith(certain):
                self._emit(count)
                return certain
        return ""

    def _text(self, newest: list[int]) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + newest)[len(before) :]

    def _emit(self, count: int) -> None:
        self._before, self._newest = self._newest[:count], self._newest[count:]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"cannot read {path}: {error}; copy it from the source model again"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    """Content of a JSON object file; empty where the file is missing."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"{path} is no JSON ({error}); copy it from the source model again"
        ) from error
    if not isinstance(content, dict):
        raise ManifestError(
            f"{path} must hold a JSON object, found {type(content).__name__}; copy it from "
            "the source model again"
        )
    return content


def _refuse(path: Path, name: str, found: object) -> NoReturn:
    raise ManifestError(
        f"{path}: `{name}` is {found!r}, which this tokenizer cannot use; correct the entry"
    )
