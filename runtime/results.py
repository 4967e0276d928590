"""What a session gives back."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import PagedTrtError
from paged_trt.runtime.sequences import FinishReason

NO_TOKEN: Final = -1
"""Token of a sequence that failed."""


class StepResult(NamedTuple):
    """One new token of one sequence, or its failure.

    Attributes:
        sequence_id: what `Session.add` returned.
        token: its new token; NO_TOKEN where the sequence failed.
        logits: `[vocab_size]` float32 that the token was chosen by; None unless kept.
        logprob: natural logarithm of the token's probability; None unless asked for.
        top_logprobs: `(token, logprob)` of the most likely tokens; None unless asked for.
        finished: why the sequence ended with this token; None where it goes on.
        error: what ended it, with FinishReason.ERROR.
        num_cached_tokens: tokens of the prompt whose keys and values were reused.
    """

    sequence_id: int
    token: int
    logits: npt.NDArray[np.float32] | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finished: FinishReason | None = None
    error: PagedTrtError | None = None
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Continuation of one prompt.

    Attributes:
        tokens: new tokens, the end-of-sequence token included.
        finish_reason: why it ended.
        logits: `[len(tokens), vocab_size]` float32; None unless kept.
        num_cached_tokens: tokens of the prompt whose keys and values were reused.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logits: npt.NDArray[np.float32] | None
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Pages and sequences now, and counts since the engine core was made.

    All sessions of one core see the same numbers.

    Attributes:
        pages_in_use: pages with a reference.
        pages_free: pages that can be handed out, those with known content included.
        pages_retained: free pages whose content is known, for a later prompt to reuse.
        pages_evicted: retained pages that were handed out again for something else.
        sequences: sequences that have not ended, waiting ones included.
        waiting: sequences without a slot.
        prefill_steps: steps that ran prompt tokens, or tokens again after a preemption.
        mixed_steps: those of them that ran decode rows too.
        decode_steps: steps of one token per sequence.
        failed_steps: steps that raised.
        prompt_tokens: prompt tokens of admitted sequences.
        cached_tokens: those of them whose keys and values were reused.
        new_tokens: tokens generated.
        preemptions: times that a sequence gave its pages to an older one.
        finished: sequences that ended by an end token or their limit.
        failed: sequences that ended with an error.
        cancelled: sequences that were released before their end.
    """

    pages_in_use: int
    pages_free: int
    pages_retained: int = 0
    pages_evicted: int = 0
    sequences: int
    waiting: int = 0
    prefill_steps: int
    mixed_steps: int = 0
    decode_steps: int
    failed_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
