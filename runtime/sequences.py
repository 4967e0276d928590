"""What is known of a live sequence, and which prompts an engine can serve."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import SequenceError
from paged_trt.plugins.tensors import EngineSpec


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """One sequence between `add` and `release`.

    Attributes:
        sequence_id: number given by the session, never reused.
        prompt: `[prompt_len]` int64.
        max_new_tokens: tokens to generate at most.
        prefill_chunk: most prompt tokens of one step; None leaves it to the step's budget.
        keep_logits: whether results carry logits.
        slot: row of the page table; -1 before it is admitted.
        pages: page ids in the order of the sequence.
        past_len: tokens in the pool.
        new_tokens: tokens generated so far; the last of them is not in the pool yet.
    """

    sequence_id: int
    prompt: npt.NDArray[np.int64]
    max_new_tokens: int
    prefill_chunk: int | None
    keep_logits: bool
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    past_len: int = 0
    new_tokens: list[int] = dataclasses.field(default_factory=list)

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not in the pool yet."""
        return max(len(self.prompt) - self.past_len, 0)

    def next_ids(self, count: int) -> npt.NDArray[np.int64]:
        """The `count` token ids that the next step appends, `[count]` int64."""
        if self.prompt_left:
            return self.prompt[self.past_len : self.past_len + count]
        return np.asarray(self.new_tokens[-1:], np.int64)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends with its newest token; None where it goes on."""
        if self.new_tokens[-1] in eos_token_ids:
            return FinishReason.EOS
        if len(self.new_tokens) >= self.max_new_tokens:
            return FinishReason.LENGTH
        return None


def check_prompt(
    spec: EngineSpec, prompt_ids: Iterable[int], max_new_tokens: int
) -> npt.NDArray[np.int64]:
    """The prompt as `[prompt_len]` int64, once it is known that the engine can serve it.

    Raises:
        SequenceError: it is empty or too long, an id is outside the vocabulary, or
            `max_new_tokens` is no positive int.
    """
    prompt = _as_ids(prompt_ids)
    if not len(prompt):
        raise SequenceError("a prompt of 0 tokens has no next token; pass at least 1 token")
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise SequenceError(f"`max_new_tokens` must be an int from 1, got {max_new_tokens!r}")
    if len(prompt) > spec.max_input_len:
        raise SequenceError(
            f"the prompt has {len(prompt)} tokens and the engine takes max_input_len="
            f"{spec.max_input_len}; shorten it, or rebuild with a larger `--max-input-len`"
        )
    total = len(prompt) + max_new_tokens
    if total > spec.pool.max_kv_cache_capacity:
        raise SequenceError(
            f"{len(prompt)} prompt tokens and max_new_tokens={max_new_tokens} make {total}, over "
            f"max_kv_cache_capacity={spec.pool.max_kv_cache_capacity}; ask for fewer tokens, "
            "or rebuild with a larger `--max-kv-cache-capacity`"
        )
    outside = np.flatnonzero((prompt < 0) | (prompt >= spec.vocab_size))
    if outside.size:
        position = int(outside[0])
        raise SequenceError(
            f"token {prompt[position]} at position {position} is outside the vocabulary of "
            f"{spec.vocab_size}; encode the prompt with the model's own tokenizer"
        )
    return prompt


def _as_ids(prompt_ids: Iterable[int]) -> npt.NDArray[np.int64]:
    is_sequence = isinstance(prompt_ids, (Sequence, np.ndarray))
    raw = np.asarray(prompt_ids if is_sequence else list(prompt_ids))
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise SequenceError(
            f"a prompt is one list of integer token ids, got shape {list(raw.shape)} of "
            f"{raw.dtype}; encode text with the model's tokenizer first"
        )
    # A copy: the caller may change the list while the sequence is live.
    return raw.astype(np.int64)
