"""Requests for a benchmark: lengths as a public trace has them, arrivals at random."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ConfigError

DATA: Final = Path(__file__).with_name("traffic_azure_2023.json")
SERVICES: Final = ("conv", "code")
"""Services of the trace: a chat, and code completion."""
MIN_ANSWER: Final = 2
"""Tokens of the shortest answer: one alone has no time to the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Lengths that an engine takes, in tokens.

    Attributes:
        max_input_len: longest prompt.
        max_kv_cache_capacity: longest prompt with its answer.
        vocab_size: number of token ids.
    """

    max_input_len: int
    max_kv_cache_capacity: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request.

    Attributes:
        seconds: from the begin of the run to its arrival.
        prompt: its token ids.
        num_new_tokens: length of its answer.
    """

    seconds: float
    prompt: tuple[int, ...]
    num_new_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All requests of a run.

    Attributes:
        arrivals: in the order of their arrival.
        num_prompts_cut: prompts that were longer than the engine takes.
        num_answers_cut: answers for which the engine had less room than they wanted.
    """

    arrivals: tuple[Arrival, ...]
    num_prompts_cut: int
    num_answers_cut: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """What traffic to make.

    Attributes:
        service: one of SERVICES.
        rate: mean requests per second; a Poisson process.
        num_requests: requests in all.
        seed: of lengths, arrivals and token ids.
        length_scale: what all lengths of the trace are multiplied with.
        shared_prefix_tokens: first tokens that all prompts share, as those of a system prompt.

    Raises:
        ConfigError: a value is out of range.
    """

    service: str
    rate: float
    num_requests: int
    seed: int = 0
    length_scale: float = 1.0
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.service not in SERVICES:
            raise ConfigError(f"`{self.service}` is no service of the trace; {SERVICES} are")
        for name in ("rate", "num_requests", "length_scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`{name}` must be over 0, got {getattr(self, name)}")
        for name in ("seed", "shared_prefix_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{name}` must be 0 or more, got {getattr(self, name)}")


def trace_source() -> str:
    """Where the lengths come from, for results files."""
    source: str = _data()["source"]
    return source


def make_traffic(options: TrafficOptions, limits: Limits) -> Traffic:
    """Requests whose lengths are drawn from the trace's quantiles.

    Lengths of prompt and answer are drawn one without the other, each by its own quantiles with
    straight lines between them. A prompt over the engine's limits is cut to its first tokens, and
    an answer to the room that its prompt leaves; both are counted.

    Args:
        options: what to make.
        limits: of the engine.

    Raises:
        ConfigError: the shared prefix leaves no room for a token of its own.
    """
    longest = min(limits.max_input_len, limits.max_kv_cache_capacity - MIN_ANSWER)
    if options.shared_prefix_tokens >= longest:
        raise ConfigError(
            f"a shared prefix of {options.shared_prefix_tokens} tokens leaves no room in prompts "
            f"of up to {longest}; pass a shorter one"
        )
    generator = np.random.default_rng(options.seed)
    arrivals = np.cumsum(generator.exponential(1 / options.rate, options.num_requests))
    prompts = _lengths(generator, options, "prompt_tokens")
    answers = np.maximum(_lengths(generator, options, "new_tokens"), MIN_ANSWER)
    shared = generator.integers(limits.vocab_size, size=options.shared_prefix_tokens).tolist()
    cut_prompts = np.clip(prompts, len(shared) + 1, longest)
    cut_answers = np.minimum(answers, limits.max_kv_cache_capacity - cut_prompts)
    return Traffic(
        arrivals=tuple(
            Arrival(
                seconds=float(seconds),
                prompt=(
                    *shared,
                    *generator.integers(limits.vocab_size, size=length - len(shared)).tolist(),
                ),
                num_new_tokens=int(count),
            )
            for seconds, length, count in zip(arrivals, cut_prompts, cut_answers, strict=True)
        ),
        num_prompts_cut=int((cut_prompts < prompts).sum()),
        num_answers_cut=int((cut_answers < answers).sum()),
    )


def _lengths(
    generator: np.random.Generator, options: TrafficOptions, name: str
) -> npt.NDArray[np.int64]:
    data = _data()
    at = 100 * generator.random(options.num_requests)
    drawn = np.interp(at, data["percentiles"], data["services"][options.service][name])
    lengths: npt.NDArray[np.int64] = np.rint(drawn * options.length_scale).astype(np.int64)
    return np.maximum(lengths, 1)


def _data() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return content
