"""Forms of Hopper's prefill kernel that planners do not take by themselves.

They are compiled and timed on request only: none has run on a device yet. What one is good for is
said in `kernels/prefill_sm90_options.cuh`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_prefill_sm90 import (
    ANY_DIMS,
    FORM_MACROS,
    NARROW_DIM,
    SCORES_AHEAD,
    hopper_plan,
    refusal,
)
from paged_trt.plugins.launch.plans import PrefillPlan
from paged_trt.plugins.launch.requests import AttentionPlanRequest

COMBINATIONS: Final = (
    ("overlap",),
    ("short-end",),
    ("small-sections",),
    ("overlap", "short-end"),
    ("overlap", "short-end", "small-sections"),
)
"""Forms worth timing, alone and together."""
NARROW_COMBINATIONS: Final = (
    (SCORES_AHEAD,),
    (SCORES_AHEAD, "overlap"),
    (SCORES_AHEAD, "overlap", "small-sections"),
)
"""The same for heads that the scores of two key tiles fit beside."""


def parse_forms(text: str) -> tuple[str, ...]:
    """Forms of `overlap+short-end` and the like; none of an empty text.

    Raises:
        UnsupportedError: there is no such form.
    """
    names = tuple(filter(None, text.split("+")))
    for name in names:
        if name not in FORM_MACROS:
            raise UnsupportedError(
                f"Hopper's prefill kernel has no form `{name}`; it has {', '.join(FORM_MACROS)}"
            )
    return names


def prefill_candidates(request: AttentionPlanRequest) -> tuple[PrefillPlan, ...]:
    """Plans of a prefill step worth timing, all of Hopper's kernel; today's first, where it is one.

    Where no kernel covers the layer's dims today, the first is the form that takes any dims. Steps
    whose keys are split between blocks have one plan.
    """
    today: tuple[str, ...] = ()
    if refusal(request) is not None:
        today = (ANY_DIMS,)
        if refusal(request, forms=today) is not None:
            return ()
    first = dataclasses.replace(hopper_plan(request), forms=today)
    if first.partitions > 1:
        return (first,)
    attention = request.attention
    is_narrow = max(attention.head_dim, attention.value_head_dim) <= NARROW_DIM
    others = (*COMBINATIONS, *(NARROW_COMBINATIONS if is_narrow else ()))
    return (
        first,
        dataclasses.replace(first, takes_tiles=not first.takes_tiles),
        *(dataclasses.replace(first, forms=(*today, *forms)) for forms in others),
    )


def name_of(plan: PrefillPlan, candidates: Sequence[PrefillPlan]) -> str:
    """Short name of a plan among its fellows, such as `overlap+short-end`."""
    first = candidates[0]
    forms = "+".join(form for form in plan.forms if form not in first.forms)
    if plan.takes_tiles == first.takes_tiles:
        return forms or "today"
    return forms or ("counter" if plan.takes_tiles else "dealt")
