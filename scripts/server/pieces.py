"""Token events of a session as pieces of text."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Literal

from paged_trt.runtime.requests import TokenEvent
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.server.stops import StopStrings

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
UNLIKELY_LOGPROB = -9999.0
"""What OpenAI's API writes for a token of no probability: JSON has no infinity."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine took the request.

    Attributes:
        request_id: its name.
        num_prompt_tokens: length of its prompt.
    """

    request_id: str
    num_prompt_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One token of a request that asked for logprobs.

    Attributes:
        text: its text; `token_id:N` where it is no text by itself.
        logprob: natural logarithm of its probability, UNLIKELY_LOGPROB at least.
        top: text and logprob of the most likely tokens, best first.
        offset: characters of the answer before it.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that is certain, and where the request stands.

    Attributes:
        text: what comes behind the pieces before.
        tokens: the tokens whose text begins in this piece, where logprobs were asked for.
        finish_reason: why the answer ended; None where it goes on.
        num_tokens: tokens generated so far, those of a stop string and the end token included.
        num_cached_tokens: tokens of the prompt whose keys and values were reused.
    """

    text: str
    tokens: tuple[TokenText, ...]
    finish_reason: Literal["stop", "length"] | None
    num_tokens: int
    num_cached_tokens: int


class Assembler:
    """Turns the events of one request into pieces.

    Args:
        tokenizer: decodes the tokens.
        stops: strings that end the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._decoded = 0
        self._sent = 0
        self._num_tokens = 0
        self._tokens: collections.deque[TokenText] = collections.deque()

    def push(self, event: TokenEvent) -> Piece | None:
        """The piece that an event makes certain; None where it makes none.

        Args:
            event: carries a token.
        """
        assert event.token is not None  # noqa: S101 - the caller takes the events without one
        ends = event.finish_reason is not None
        self._num_tokens += 1
        text = ""
        # The end token is no part of the text, whether or not its tokenizer calls it special.
        if event.finish_reason != "stop":
            self._note_token(event)
            text = self._stream.push(event.token)
        if ends:
            text += self._stream.finish()
        self._decoded += len(text)
        certain, is_stopped = self._stops.push(text, is_last=ends)
        self._sent += len(certain)
        if not certain and not ends and not is_stopped:
            return None
        return Piece(
            text=certain,
            tokens=self._sent_tokens(),
            finish_reason="length" if event.finish_reason == "length" and not is_stopped
            else "stop" if ends or is_stopped else None,
            num_tokens=self._num_tokens,
            num_cached_tokens=event.num_cached_tokens,
        )  # fmt: skip

    def _note_token(self, event: TokenEvent) -> None:
        if event.logprob is not None and event.token is not None:
            top = tuple(
                (self._text(token), max(UNLIKELY_LOGPROB, value))
                for token, value in event.top_logprobs or ()
            )
            self._tokens.append(
                TokenText(
                    text=self._text(event.token),
                    logprob=max(UNLIKELY_LOGPROB, event.logprob),
                    top=top,
                    offset=self._decoded,
                )
            )

    def _sent_tokens(self) -> tuple[TokenText, ...]:
        found = []
        while self._tokens and self._tokens[0].offset < self._sent:
            found.append(self._tokens.popleft())
        return tuple(found)

    def _text(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        return text if text and _INCOMPLETE not in text else f"token_id:{token}"
