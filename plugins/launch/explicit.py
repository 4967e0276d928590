"""The bound on what a user's own plan may cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import tokens_in_pages
from paged_trt.plugins.launch.gather import layer_refusal
from paged_trt.plugins.launch.plans import AttentionPlan, Gather, SplitKv
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.workspace import plan_workspace_bytes

MAX_EXPLICIT_WORKSPACE_BYTES: Final = 2**30
"""A split that needs more moves more partial results than it is ever worth."""


def require_affordable(plan: AttentionPlan, largest: Sequence[AttentionPlanRequest]) -> None:
    """Refuse an explicit plan that takes memory that pages should have, or that nothing follows.

    Args:
        plan: the user's.
        largest: the largest step of each layer.

    Raises:
        ConfigError: it needs more than MAX_EXPLICIT_WORKSPACE_BYTES, and the message says how
            much and what would fit; or it gathers and no layer can.
    """
    if isinstance(plan, Gather):
        _require_gathering(largest)
    needed = _bytes(plan, largest)
    if needed <= MAX_EXPLICIT_WORKSPACE_BYTES or not isinstance(plan, SplitKv):
        return
    step = largest[0].step
    raise ConfigError(
        f"`--attention-plan {plan}` needs {needed:,} bytes of workspace for {step.num_seqs} "
        f"sequences of {tokens_in_pages(step.table_width):,} tokens, over the limit of "
        f"{MAX_EXPLICIT_WORKSPACE_BYTES:,}; pass {_what_fits(plan, largest)}or leave it to `auto`"
    )


def _require_gathering(largest: Sequence[AttentionPlanRequest]) -> None:
    reasons = [layer_refusal(request) for request in largest]
    if None not in reasons:
        raise ConfigError(
            "`--attention-plan gather` is for float8 and int8 pools under Hopper's prefill kernel, "
            f"and no layer has one: {reasons[0]}; leave it to `auto`, or pass `--kv-cache-dtype`"
        )


def _what_fits(plan: SplitKv, largest: Sequence[AttentionPlanRequest]) -> str:
    """The smallest doubling of the partition that fits, as words of a message."""
    tokens, capacity = plan.partition_tokens, tokens_in_pages(largest[0].step.table_width)
    while (tokens := tokens * 2) < capacity:
        wider = SplitKv(partition_tokens=tokens, threshold_tokens=tokens)
        if (size := _bytes(wider, largest)) <= MAX_EXPLICIT_WORKSPACE_BYTES:
            return f"`split:{tokens}` ({size:,} bytes), "
    return "`direct`, "


def _bytes(plan: AttentionPlan, largest: Sequence[AttentionPlanRequest]) -> int:
    # TensorRT lets layers share one workspace.
    return max(plan_workspace_bytes(plan, request) for request in largest)
