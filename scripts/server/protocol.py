"""What the OpenAI API's requests hold: each parameter is taken, or refused by its name.

Three rules decide about parameters that this server does not act on. Those that cannot change
an answer are ignored; those that would are refused unless they have the value that leaves the
answer as it is; unknown ones are refused. null, [] and {} are as if left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from paged_trt.runtime.requests import MAX_LOGPROBS, MAX_SEED, SamplingSpec

MAX_STOPS = 4
MAX_STOP_LENGTH = 256
_EMPTY: tuple[object, ...] = (None, [], {})

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Zero = Annotated[float, Field(ge=0, le=0)]


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value not in _EMPTY}


class StreamOptions(_Model):
    """Options of a streamed answer; `include_obfuscation` is ignored."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(_Model):
    """The only format of answers."""

    type: Literal["text"]


class _Parameters(_Model):
    """What both kinds of requests share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []
    # Values that leave the answer as it is.
    n: Literal[1] = 1
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}
    # They cannot change the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no logprobs."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens to generate at most; None for as many as the engine holds."""
        return self.max_tokens

    @property
    def sampling(self) -> SamplingSpec:
        """How tokens are chosen.

        Raises:
            ConfigError: a value is out of range.
        """
        return SamplingSpec(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            num_logprobs=self.num_logprobs,
        )


class CompletionRequest(_Parameters):
    """Body of `POST /v1/completions`: one prompt, as text or token ids."""

    prompt: str | list[TokenId]
    max_tokens: PositiveInt | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Literal[1] = 1
    echo: Literal[False] = False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no logprobs."""
        return self.logprobs


class TextPart(_Model):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Model):
    """A message of a conversation; a text of several parts has a line for each."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """As chat templates know it, which know no `developer`."""
        if isinstance(self.content, str):
            text = self.content
        else:
            text = "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(_Parameters):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] = ["text"]
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: Any = None

    @pydantic.model_validator(mode="after")
    def _agree(self) -> ChatCompletionRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("`max_tokens` is the old name of `max_completion_tokens`; pass one")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs` to be true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens to generate at most; None for as many as the engine holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None for no logprobs."""
        return self.top_logprobs if self.logprobs else None


AnyRequest = CompletionRequest | ChatCompletionRequest
