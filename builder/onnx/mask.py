"""Proves that a mask is causal, or causal with one window.

A mask is evaluated (see `probe`) and compared, entry by entry, with the mask that
PagedAttention applies. SMALL_STEPS hold prefill, chunked prefill and decode around page and
window borders. LONG_LENGTHS are decode steps, whose one row costs little and shows any window
shorter than the length.

What stays unproved: steps that were not evaluated or that the model cannot run, padded or
batched masks (a paged step has neither), and lengths over the longest that was evaluated. The
last is a fact that `resolve` compares with the capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from paged_trt.builder.onnx.evaluator import EvaluationError
from paged_trt.builder.onnx.graph import Array, node_name, value_name
from paged_trt.builder.onnx.probe import Probe, Step, steps_of
from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.errors import OnnxRewriteError

SMALL_STEPS: Final = (
    *steps_of([(0, 1), (0, 2), (0, 5), (1, 1), (1, 3), (4, 1), (7, 9)]),
    *steps_of([(0, 130), (127, 2), (128, 1), (129, 130), (300, 17), (511, 3)]),
    *steps_of([(2000, 40), (5000, 9)]),
)
LONG_LENGTHS: Final = tuple(2**exponent for exponent in range(20, 4, -1))
"""Lengths that are tried, longest first: a mask cut from a table ends at some of them."""
_HIDDEN_BELOW: Final = -1e4
"""An additive mask hides with less than this: exporters write -inf or the type's minimum."""
_REMEDY: Final = "export the model with a causal mask, or a causal mask with one sliding window"


@dataclass(frozen=True, kw_only=True)
class ProvedMask:
    """A mask that equals PagedAttention's.

    Attributes:
        window: keys visible to the left including self, or FULL_WINDOW.
        positions: length up to which that was evaluated.
    """

    window: int
    positions: int


def window_mask(step: Step, window: int) -> npt.NDArray[np.bool_]:
    """What PagedAttention lets a query see, `[new, total]`, true for visible."""
    query = np.arange(step.past, step.total)[:, None]
    key = np.arange(step.total)[None, :]
    visible = key <= query
    return visible if window == FULL_WINDOW else visible & (key > query - window)


def prove_mask(
    probe: Probe, mask: ir.Value, *, node: ir.Node, is_causal: bool = False
) -> ProvedMask:
    """Find the window of a mask, and check it in every step.

    Args:
        probe: evaluates values of the model.
        mask: boolean (true is visible) or additive, broadcast to `[1, heads, new, total]`.
        node: the attention node, for messages.
        is_causal: whether the node hides later keys by itself.

    Raises:
        OnnxRewriteError: the mask depends on data, is no causal mask, or does not run.
    """
    if not probe.depends_on_lengths_only(mask):
        raise OnnxRewriteError(
            node_name(node),
            f"its mask `{value_name(mask)}` depends on more than attention_mask, position_ids "
            "and lengths",
            _REMEDY,
        )
    key = (mask, is_causal)
    if key not in probe.proved_masks:
        probe.proved_masks[key] = _prove(probe, mask, node=node, is_causal=is_causal)
    window, positions = probe.proved_masks[key]
    return ProvedMask(window=window, positions=positions)


def _prove(probe: Probe, mask: ir.Value, *, node: ir.Node, is_causal: bool) -> tuple[int, int]:
    """Window and proved length."""
    visibility = _Visibility(probe, mask, is_causal)
    longest, last_row = _longest_row(visibility, node)
    visible = int(last_row.sum())
    window = FULL_WINDOW if visible == longest.total else visible
    lengths = [Step(length - 1, 1) for length in LONG_LENGTHS if length <= longest.total]
    for step in (*SMALL_STEPS, *lengths):
        if step.total > longest.total:
            continue
        try:
            found = visibility.evaluate(step)
        except EvaluationError as error:
            # A model that cannot run several tokens after a past leaves that step open: the
            # prefill and the single tokens after it say what the mask is.
            if step.past and step.new > 1 and not isinstance(error, _OddMaskError):
                continue
            raise _does_not_run(node, mask, error) from error
        _require_equal(found, window_mask(step, window), step=step, node=node, mask=mask)
    return window, longest.total


class _OddMaskError(EvaluationError):
    """The mask was computed, and is no mask of visible and hidden keys."""


class _Visibility:
    """A mask as booleans, `[..., new, total]`."""

    def __init__(self, probe: Probe, mask: ir.Value, is_causal: bool) -> None:
        self._probe, self._mask, self._is_causal = probe, mask, is_causal

    def evaluate(self, step: Step) -> npt.NDArray[np.bool_]:
        array = self._probe.evaluate(self._mask, step)
        try:
            shape = np.broadcast_shapes(array.shape, (step.new, step.total))
        except ValueError:
            shape = ()
        # A mask wider or taller than the step would not broadcast in the node either.
        if shape[-2:] != (step.new, step.total):
            raise _OddMaskError(f"with {step} its shape is {list(array.shape)}")
        visible = np.broadcast_to(_as_booleans(array, step), shape)
        return visible & window_mask(step, FULL_WINDOW) if self._is_causal else visible


def _as_booleans(array: Array, step: Step) -> npt.NDArray[np.bool_]:
    if array.dtype == np.bool_:
        return array
    numbers = array.astype(np.float32)
    visible, hidden = numbers == 0, numbers <= _HIDDEN_BELOW
    if not (visible | hidden).all():
        odd = float(numbers[~(visible | hidden)][0])
        raise _OddMaskError(
            f"with {step} it adds {odd:g} to a score: a bias, such as ALiBi or a learned one, is "
            "no mask of keys that are seen or not"
        )
    return np.asarray(visible)


def _longest_row(visibility: _Visibility, node: ir.Node) -> tuple[Step, npt.NDArray[np.bool_]]:
    problem: EvaluationError | None = None
    for length in LONG_LENGTHS:
        step = Step(length - 1, 1)
        try:
            found = visibility.evaluate(step)
        except EvaluationError as error:
            problem = error
            continue
        return step, found.reshape(-1, length)[0]
    raise _does_not_run(node, visibility._mask, problem) from problem


def _does_not_run(node: ir.Node, mask: ir.Value, error: EvaluationError | None) -> OnnxRewriteError:
    return OnnxRewriteError(
        node_name(node), f"its mask `{value_name(mask)}` cannot be evaluated: {error}", _REMEDY
    )


def _require_equal(
    found: npt.NDArray[np.bool_],
    expected: npt.NDArray[np.bool_],
    *,
    step: Step,
    node: ir.Node,
    mask: ir.Value,
) -> None:
    different = np.argwhere(found != expected)
    if not len(different):
        return
    *_, row, key = (int(index) for index in different[0])
    verb = "hides" if expected[row, key] else "shows"
    raise OnnxRewriteError(
        node_name(node),
        f"its mask `{value_name(mask)}` is neither causal nor causal with one window: with {step} "
        f"it {verb} key {key} {'from' if verb == 'hides' else 'to'} the query at {step.past + row}",
        _REMEDY,
    )
