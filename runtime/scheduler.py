"""Which tokens of which sequences the next step runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from paged_trt.runtime.sequences import LiveSequence


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """The next `num_tokens` tokens of one sequence."""

    sequence: LiveSequence
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens of the sequence in the pool after the step."""
        return self.sequence.past_len + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step gives the sequence a new token: its prompt is complete then."""
        return self.end >= len(self.sequence.prompt)


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """Segments of one step, in row order; either prefill or decode, never both."""

    segments: tuple[Segment, ...]
    is_prefill: bool


def plan_step(sequences: Iterable[LiveSequence], *, max_num_tokens: int) -> StepPlan | None:
    """Prompts first, in slot order, as many tokens as the budget holds; else one decode step.

    Decode steps are pure, because their shape T == N picks another kernel than a ragged
    step; prompts go first, so that a decode step runs as many rows as there are sequences.

    Args:
        sequences: live sequences in slot order.
        max_num_tokens: token budget of a prefill step. A decode step may hold one token of
            every slot, whatever the budget.

    Returns:
        None where no sequence is live.
    """
    live = tuple(sequences)
    if not live:
        return None
    budget = max_num_tokens
    segments = []
    for sequence in live:
        count = min(sequence.prompt_left, sequence.prefill_chunk or budget, budget)
        if count:
            segments.append(Segment(sequence, count))
            budget -= count
    if segments:
        return StepPlan(tuple(segments), is_prefill=True)
    return StepPlan(tuple(Segment(sequence, 1) for sequence in live), is_prefill=False)
