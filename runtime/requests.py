"""What a client asks for, and the events that it gets back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from paged_trt.plugins.errors import ConfigError, PagedTrtError

FinishName = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: an end or stop token, its token limit, `cancel`, or an error."""
MAX_SEED: Final = 2**63 - 1
MAX_LOGPROBS: Final = 20
"""Most alternatives of one token that a request may ask for."""


def _require_int(name: str, value: object, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ConfigError(f"`{name}` must be an int from {minimum} to {maximum}, got {value!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How the next token is chosen; valid by construction.

    Attributes:
        temperature: divides the logits; 0 takes the largest one (greedy).
        top_k: most likely tokens to choose from; 0 for all.
        top_p: smallest set of most likely tokens whose probabilities reach this sum; 1 for all.
        seed: the same seed, prompt and engine give the same tokens; None draws a seed.
        num_logprobs: alternatives per token in the events, 0 for the token's own alone; None
            for no logprobs.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ConfigError(f"`{name}` must be a finite number, got {value!r}")
        if self.temperature < 0:
            raise ConfigError(f"`temperature` must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"`top_p` must be over 0 and at most 1, got {self.top_p}")
        _require_int("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, MAX_SEED)
        if self.num_logprobs is not None:
            _require_int("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)

    @property
    def is_plain(self) -> bool:
        """Whether the largest logit wins and nothing is asked of the others."""
        return self.is_greedy and self.num_logprobs is None

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit wins, whatever the seed."""
        return self.temperature == 0


GREEDY: Final = SamplingSpec()
"""The largest logit wins."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        request_id: name of the request, unique among those that are open.
        prompt_tokens: token ids of the prompt; whether the engine can serve them is checked
            when the request is submitted.
        max_new_tokens: tokens to generate at most.
        sampling: how tokens are chosen.
        stop_token_ids: tokens that end the text, besides those of the session.
        adapter: name of the adapter that the engine runs for this request; its keys and values
            are shared only with requests of the same adapter.

    Raises:
        ConfigError: `request_id` is no text, or a stop token is no token id.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingSpec = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ConfigError(f"`request_id` must be a text, got {self.request_id!r}")
        object.__setattr__(self, "prompt_tokens", _as_tuple(self.prompt_tokens))
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, 2**31 - 1)


class TokenEvent(NamedTuple):
    """One new token of a request, or its end.

    The last event of a request, and only that one, has a `finish_reason`. With `stop` and
    `length` it carries the last token, with `cancelled` and `error` it carries none.

    Attributes:
        request_id: as in the request.
        token: the new token, the end token included; None where the request ended without one.
        logprob: natural logarithm of the token's probability; None unless asked for.
        top_logprobs: `(token, logprob)` of the most likely tokens, best first; None unless
            asked for.
        finish_reason: why the request ended; None where it goes on.
        error: what ended it, with `error`.
        num_cached_tokens: tokens of the prompt whose keys and values were reused.
    """

    request_id: str
    token: int | None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finish_reason: FinishName | None = None
    error: PagedTrtError | None = None
    num_cached_tokens: int = 0


def _as_tuple(tokens: Iterable[int]) -> tuple[int, ...]:
    return tokens if isinstance(tokens, tuple) else tuple(tokens)
