"""What is known of a live sequence, and which prompts an engine can serve."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import SequenceError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.executor import token_of_row
from paged_trt.runtime.requests import GREEDY, SamplingSpec

if TYPE_CHECKING:
    from paged_trt.runtime.results import StepResult


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"
    ERROR = "error"


class LiveSequence:
    """One sequence between `add` and its end.

    Args:
        sequence_id: number given by the engine core, never reused; a lower one is older.
        prompt: `[prompt_len]` int64.
        max_new_tokens: tokens to generate at most.
        sampling: how its tokens are chosen.
        stop_token_ids: tokens that end it.
        prefill_chunk: most tokens of one prefill step; None leaves it to the step's budget.
        keep_logits: whether results carry logits.
        adapter: adapter that it runs with.
        deliver: takes its results, in the thread that runs the step; it must not raise.

    Attributes:
        tokens: `[prompt_len + max_new_tokens]` int64; the first `num_tokens` are there, of which
            the last `num_unknown` say which row of a running step they come from.
        num_tokens: tokens of the prompt and tokens generated so far.
        num_unknown: tokens that a running step generates.
        slot: row of the page table; -1 while it waits.
        pages: page ids in the order of the sequence, unused entries where they were freed
            because no layer sees them any more.
        past_len: tokens in the pool, those that a running step writes included.
        content: what its described pages hold; None where no more can be described.
        num_described: its first pages, whose content the registry was told of.
        room: tokens that its pages hold without another page or a copy of one.
        review_at: tokens in the pool at which a page is full, or seen no more.
        num_cached: prompt tokens whose keys and values were found when it was first admitted;
            None before that.
    """

    __slots__ = (
        "adapter",
        "content",
        "deliver",
        "keep_logits",
        "max_new_tokens",
        "num_cached",
        "num_described",
        "num_tokens",
        "num_unknown",
        "pages",
        "past_len",
        "prefill_chunk",
        "prompt_len",
        "review_at",
        "room",
        "sampling",
        "sequence_id",
        "slot",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        *,
        sequence_id: int,
        prompt: npt.NDArray[np.int64],
        max_new_tokens: int,
        sampling: SamplingSpec = GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
        prefill_chunk: int | None = None,
        keep_logits: bool = False,
        adapter: str | None = None,
        deliver: Callable[[StepResult], None] = lambda _: None,
    ) -> None:
        self.sequence_id = sequence_id
        self.prompt_len = self.num_tokens = len(prompt)
        self.num_unknown = 0
        self.max_new_tokens = max_new_tokens
        self.tokens: npt.NDArray[np.int64] = np.zeros(len(prompt) + max_new_tokens, np.int64)
        self.tokens[: len(prompt)] = prompt
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.prefill_chunk = prefill_chunk
        self.keep_logits = keep_logits
        self.adapter = adapter
        self.deliver = deliver
        self.num_cached: int | None = None
        self.forget_pages()

    def copy(self, sequence_id: int, deliver: Callable[[StepResult], None]) -> LiveSequence:
        """Another sequence of the tokens that are known, without a slot and pages."""
        other = LiveSequence(
            sequence_id=sequence_id,
            prompt=self.tokens[: self.prompt_len],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
            prefill_chunk=self.prefill_chunk,
            keep_logits=self.keep_logits,
            adapter=self.adapter,
            deliver=deliver,
        )
        other.num_tokens = self.num_known
        other.tokens[: other.num_tokens] = self.tokens[: other.num_tokens]
        return other

    def forget_pages(self) -> None:
        """Begin again without a slot and with nothing in the pool; the tokens stay known."""
        self.slot = -1
        self.pages: list[int] = []
        self.past_len = 0
        self.content: int | None = None
        self.num_described = self.room = self.review_at = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_len

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and generated tokens that no running step is to give."""
        return self.num_tokens - self.num_unknown

    @property
    def num_left(self) -> int:
        """Tokens that are not in the pool yet."""
        return self.num_tokens - self.past_len

    @property
    def decodes(self) -> bool:
        """Whether all that is left is its newest token; else it prefills."""
        return self.num_tokens - self.past_len == 1 and self.num_tokens > self.prompt_len

    def next_ids(self, count: int) -> npt.NDArray[np.int64]:
        """The `count` token ids that the next step appends, `[count]` int64."""
        return self.tokens[self.past_len : self.past_len + count]

    def expect(self, row: int) -> int:
        """Its next token comes from a row of the step that runs now; the token's position."""
        position = self.num_tokens
        self.tokens[position] = token_of_row(row)
        self.num_tokens += 1
        self.num_unknown += 1
        return position

    def learn(self, position: int, token: int) -> FinishReason | None:
        """Put a token where it was expected; why the sequence ends with it, or None."""
        self.tokens[position] = token
        self.num_unknown -= 1
        if token in self.stop_token_ids:
            return FinishReason.EOS
        return FinishReason.LENGTH if position + 1 >= len(self.tokens) else None


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
    is_stream = isinstance(prompt_ids, Iterable) and not isinstance(
        prompt_ids, (Sequence, np.ndarray)
    )
    # A lone number, of one prompt that should be a list of prompts, has no dimension.
    raw = np.asarray(list(prompt_ids) if is_stream else prompt_ids)
    if raw.ndim != 1 or (raw.size and raw.dtype.kind not in "iu"):
        raise SequenceError(
            f"a prompt is one list of integer token ids, got shape {list(raw.shape)} of "
            f"{raw.dtype}; encode text with the model's tokenizer first"
        )
    # A copy: the caller may change the list while the sequence is live.
    return raw.astype(np.int64)
