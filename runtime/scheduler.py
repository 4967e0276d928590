"""Which tokens of which sequences the next step runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.sequences import LiveSequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """How decode and prefill share the steps; valid by construction.

    Attributes:
        step_tokens: most tokens of a step that prefills; None for the engine's max_num_tokens.
            Fewer keep the time between two tokens of a running sequence short.
        mixes: let a step that prefills carry the decode rows too. Otherwise prefill and decode
            steps take turns.

    Raises:
        ConfigError: `step_tokens` is no positive int.
    """

    step_tokens: int | None = None
    mixes: bool = True

    def __post_init__(self) -> None:
        tokens = self.step_tokens
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ConfigError(f"`step_tokens` must be an int from 1, got {tokens!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """The next `num_tokens` tokens of one sequence."""

    sequence: LiveSequence
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens of the sequence in the pool after the step."""
        return self.sequence.past_len + self.num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """Segments of one step, in the order of their slots.

    Attributes:
        segments: at least one.
        is_prefill: some row runs prompt tokens, or tokens again after a preemption. Otherwise
            every row is the one token of a decode step.
        is_mixed: there are decode rows in a step that prefills.
    """

    segments: tuple[Segment, ...]
    is_prefill: bool
    is_mixed: bool = False


class Scheduler:
    """Plans steps so that neither prompts nor running sequences wait for ever.

    Decode rows come first: each costs one token of the budget. The rest goes to those that
    prefill, the oldest first. Where nothing would be left for them, or steps are not mixed,
    prefill and decode take turns.

    Args:
        max_num_tokens: most tokens of a step that prefills. A decode step may hold one token
            of every slot, whatever the budget.
        policy: how decode and prefill share the steps.
    """

    def __init__(self, *, max_num_tokens: int, policy: StepPolicy | None = None) -> None:
        policy = policy or StepPolicy()
        self._budget = min(max_num_tokens, policy.step_tokens or max_num_tokens)
        self._mixes = policy.mixes
        self._prefilled_last = False
        self._decoded: tuple[LiveSequence, ...] = ()
        self._decode_plan: StepPlan | None = None

    def plan(self, sequences: Iterable[LiveSequence]) -> StepPlan | None:
        """The next step; None where no sequence has a slot.

        Args:
            sequences: those that have a slot, in slot order.
        """
        # Who gets its last token from a step that runs has nothing left to run.
        live = tuple([each for each in sequences if each.num_tokens < len(each.tokens)])
        decoding = [each for each in live if each.decodes]
        if len(decoding) == len(live):
            return self._decode_step(live)
        room = self._budget - len(decoding) if self._mixes else 0
        if room > 0:
            return self._prefill_step(live, dict.fromkeys(decoding, 1), room)
        if decoding and self._prefilled_last:
            return self._decode_step(tuple(decoding))
        return self._prefill_step(live, {}, self._budget)

    def note(self, plan: StepPlan) -> None:
        """Tell that a planned step is run."""
        self._prefilled_last = plan.is_prefill

    def _prefill_step(
        self, live: tuple[LiveSequence, ...], counts: dict[LiveSequence, int], room: int
    ) -> StepPlan:
        for sequence in sorted(live, key=lambda each: each.sequence_id):
            if sequence.decodes or not room:
                continue
            counts[sequence] = min(sequence.num_left, sequence.prefill_chunk or room, room)
            room -= counts[sequence]
        segments = tuple(Segment(each, counts[each]) for each in live if each in counts)
        is_mixed = any(segment.sequence.decodes for segment in segments)
        return StepPlan(segments, is_prefill=True, is_mixed=is_mixed)

    def _decode_step(self, sequences: tuple[LiveSequence, ...]) -> StepPlan | None:
        # One step after the other has the same sequences, and a plan of decode rows says no more.
        if sequences != self._decoded:
            self._decoded = sequences
            segments = tuple(Segment(each, 1) for each in sequences)
            self._decode_plan = StepPlan(segments, is_prefill=False) if segments else None
        return self._decode_plan
