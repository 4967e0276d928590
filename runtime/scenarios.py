"""What compare feeds: ragged prompts at page boundaries, prefilled whole and in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import ConfigError, SequenceError
from paged_trt.plugins.kv import tokens_in_pages
from paged_trt.plugins.tensors import EngineSpec

Array = npt.NDArray[Any]

_BOUNDARIES: Final = ((1, -1), (1, 0), (1, 1), (2, -1), (2, 0), (2, 1))
"""Prompts as (pages, tokens more)."""
_CHUNK: Final = 77
"""Odd, so that it divides no page and chunks start at every offset within one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One iteration: prompts that run as ragged batches.

    Attributes:
        prompts: `[prompt_len]` int64 token ids of each sequence.
        num_new_tokens: greedy tokens of each sequence, the prefill's own included.
        prefill_chunk: most prompt tokens of one sequence in one step; None is all of them.
    """

    prompts: tuple[Array, ...]
    num_new_tokens: int
    prefill_chunk: int | None

    @property
    def name(self) -> str:
        """Name for reports."""
        return "prefill whole" if self.prefill_chunk is None else f"prefill by {self.prefill_chunk}"


def default_prompt_lens(spec: EngineSpec, num_new_tokens: int) -> tuple[int, ...]:
    """One token, lengths around whole pages, and the longest where pages are too long.

    Returns:
        Lengths within the engine's limits. They may be more than one batch: the session then
        admits a sequence whenever one ends.
    """
    longest = _longest_prompt(spec, num_new_tokens)
    boundaries = [tokens_in_pages(pages) + more for pages, more in _BOUNDARIES]
    fitting = [length for length in (1, *boundaries) if length <= longest]
    if len(fitting) <= len(boundaries) and longest > 0:
        fitting.append(longest)
    return tuple(dict.fromkeys(fitting))


def random_prompts(spec: EngineSpec, prompt_lens: Sequence[int], *, seed: int) -> list[Array]:
    """Prompts of random token ids, `[prompt_len]` int64 each.

    Raises:
        SequenceError: a prompt would be empty.
    """
    if any(length < 1 for length in prompt_lens):
        raise SequenceError(f"a prompt needs 1 token or more, got lengths {list(prompt_lens)}")
    generator = np.random.default_rng(seed)
    return [generator.integers(0, spec.vocab_size, length) for length in prompt_lens]


def make_scenarios(
    spec: EngineSpec, prompts: Sequence[Sequence[int] | Array], *, num_new_tokens: int
) -> list[Scenario]:
    """Scenarios of the prompts that fit the engine.

    Args:
        spec: the engine's limits and vocabulary.
        prompts: token ids of each sequence.
        num_new_tokens: greedy tokens of each sequence.

    Returns:
        Prefill in one piece, where one step holds the longest prompt, and prefill in chunks,
        where a prompt has more than one token.

    Raises:
        ConfigError: there is no prompt, or `num_new_tokens` is 0.
        SequenceError: a prompt is empty, longer than the engine serves, or holds an id outside
            its vocabulary.
    """
    lengths = [len(prompt) for prompt in prompts]
    _check(spec, lengths, num_new_tokens)
    _check_ids(spec, prompts)
    arrays = tuple(np.asarray(prompt, np.int64) for prompt in prompts)
    whole = Scenario(prompts=arrays, num_new_tokens=num_new_tokens, prefill_chunk=None)
    # An even limit below the chunk may divide a page; one less is odd and does not.
    chunk = min(_CHUNK, spec.max_num_tokens - (spec.max_num_tokens + 1) % 2)
    longest = max(lengths)
    if longest <= chunk:
        chunk = longest // 2
    if chunk == 0:
        return [whole]
    chunked = dataclasses.replace(whole, prefill_chunk=chunk)
    return [chunked] if longest > spec.max_num_tokens else [whole, chunked]


def _check_ids(spec: EngineSpec, prompts: Sequence[Sequence[int] | Array]) -> None:
    for index, prompt in enumerate(prompts):
        for position, token in enumerate(prompt):
            if not 0 <= token < spec.vocab_size:
                raise SequenceError(
                    f"prompt {index}: token {token} at position {position} is outside the "
                    f"vocabulary of {spec.vocab_size}; encode the prompt with the model's own "
                    "tokenizer"
                )


def _longest_prompt(spec: EngineSpec, num_new_tokens: int) -> int:
    return min(spec.max_input_len, spec.pool.max_kv_cache_capacity - num_new_tokens)


def _check(spec: EngineSpec, prompt_lens: Sequence[int], num_new_tokens: int) -> None:
    if num_new_tokens < 1:
        raise ConfigError(f"`--new-tokens` must be at least 1, got {num_new_tokens}")
    if not prompt_lens:
        raise ConfigError(
            f"no prompt fits {num_new_tokens} new tokens within "
            f"max_kv_cache_capacity={spec.pool.max_kv_cache_capacity}; lower `--new-tokens`"
        )
    longest = _longest_prompt(spec, num_new_tokens)
    for length in prompt_lens:
        if not 0 < length <= longest:
            raise SequenceError(
                f"a prompt of {length} tokens and {num_new_tokens} new ones do not fit: prompts "
                f"may have 1 to {longest} tokens (max_input_len={spec.max_input_len}, "
                f"max_kv_cache_capacity={spec.pool.max_kv_cache_capacity}); "
                "lower `--prompt-lens` or `--new-tokens`"
            )
