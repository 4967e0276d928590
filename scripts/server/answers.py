"""Answers as the OpenAI API writes them: whole, or as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from paged_trt.scripts.server.pieces import Piece, Started, TokenText
from paged_trt.scripts.server.protocol import (
    AnyRequest,
    ChatCompletionRequest,
    CompletionRequest,
)

Json = dict[str, Any]


class Answer(Protocol):
    """Writes the pieces of one request."""

    @property
    def request(self) -> AnyRequest:
        """What is answered."""
        ...

    def opening(self) -> Json | None:
        """The chunk that comes before all text; None where there is none."""
        ...

    def chunk(self, piece: Piece) -> Json:
        """A piece as a chunk of a stream."""
        ...

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """All pieces as one answer."""
        ...

    def usage_chunk(self, last: Piece) -> Json:
        """The chunk behind the last one, with the usage."""
        ...


class _Base:
    """What both kinds of answers share.

    Args:
        request: what is answered.
        started: says which request it is.
        name: value of `object` of a whole answer.
        chunk_name: value of `object` of a chunk.
    """

    def __init__(
        self, request: AnyRequest, started: Started, *, name: str, chunk_name: str
    ) -> None:
        self.request = request
        self._started = started
        self._name = name
        self._chunk_name = chunk_name
        self._created = int(time.time())

    def usage_chunk(self, last: Piece) -> Json:
        """The chunk behind the last one, with the usage."""
        return self._object(self._chunk_name, [], usage=self._usage(last))

    def _object(self, name: str, choices: list[Json], *, usage: Json | None) -> Json:
        return {
            "id": self._started.request_id,
            "object": name,
            "created": self._created,
            "model": self.request.model,
            "choices": choices,
            "usage": usage,
        }

    def _usage(self, last: Piece) -> Json:
        prompt = self._started.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": last.num_tokens,
            "total_tokens": prompt + last.num_tokens,
            "prompt_tokens_details": {"cached_tokens": last.num_cached_tokens},
        }


class CompletionAnswer(_Base):
    """Answer of `/v1/completions`."""

    def __init__(self, request: CompletionRequest, started: Started) -> None:
        super().__init__(request, started, name="text_completion", chunk_name="text_completion")

    def opening(self) -> Json | None:
        """None: a stream begins with text."""
        return None

    def chunk(self, piece: Piece) -> Json:
        """A piece as a chunk of a stream."""
        return self._object(self._chunk_name, [self._choice([piece])], usage=None)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """All pieces as one answer."""
        return self._object(self._name, [self._choice(pieces)], usage=self._usage(pieces[-1]))

    def _choice(self, pieces: Sequence[Piece]) -> Json:
        tokens = [token for piece in pieces for token in piece.tokens]
        return {
            "index": 0,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(tokens) if self.request.num_logprobs is not None else None,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _logprobs(self, tokens: Iterable[TokenText]) -> Json:
        tokens = list(tokens)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


class ChatAnswer(_Base):
    """Answer of `/v1/chat/completions`."""

    def __init__(self, request: ChatCompletionRequest, started: Started) -> None:
        super().__init__(
            request, started, name="chat.completion", chunk_name="chat.completion.chunk"
        )

    def opening(self) -> Json | None:
        """Says whose message it is."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._object(self._chunk_name, [choice], usage=None)

    def chunk(self, piece: Piece) -> Json:
        """A piece as a chunk of a stream."""
        choice = self._choice([piece], delta={"content": piece.text})
        return self._object(self._chunk_name, [choice], usage=None)

    def whole(self, pieces: Sequence[Piece]) -> Json:
        """All pieces as one answer."""
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(pieces, message={"role": "assistant", "content": text})
        return self._object(self._name, [choice], usage=self._usage(pieces[-1]))

    def _choice(self, pieces: Sequence[Piece], **content: Json) -> Json:
        tokens = [token for piece in pieces for token in piece.tokens]
        asked = self.request.num_logprobs is not None
        return {
            "index": 0,
            **content,
            "logprobs": {"content": [_token(token) for token in tokens]} if asked else None,
            "finish_reason": pieces[-1].finish_reason,
        }


def _token(token: TokenText) -> Json:
    return {
        **_text_and_logprob(token.text, token.logprob),
        "top_logprobs": [_text_and_logprob(text, logprob) for text, logprob in token.top],
    }


def _text_and_logprob(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
