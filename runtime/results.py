"""What a session gives back."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from paged_trt.runtime.sequences import FinishReason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One new token of one sequence.

    Attributes:
        sequence_id: what `Session.add` returned.
        token: its new token.
        logits: `[vocab_size]` float32 that the token is the top of; None unless kept.
        finished: why the sequence ended with this token; None where it goes on.
    """

    sequence_id: int
    token: int
    logits: npt.NDArray[np.float32] | None
    finished: FinishReason | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Continuation of one prompt.

    Attributes:
        tokens: new tokens, the end-of-sequence token included.
        finish_reason: why it ended.
        logits: `[len(tokens), vocab_size]` float32; None unless kept.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logits: npt.NDArray[np.float32] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Pages now, and steps since the session was made."""

    pages_in_use: int
    pages_free: int
    sequences: int
    prefill_steps: int
    decode_steps: int
