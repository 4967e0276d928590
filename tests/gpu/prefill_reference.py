"""Attention over the pools of a step, vectorised: NumPy in float64, or as the device rounds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gpu.decode_cases import OUTPUT_ROUNDING, Case, Inputs

Array = npt.NDArray[Any]
PAGE = 128


def attend(
    case: Case, inputs: Inputs, key_pool: Array, value_pool: Array, *, rounded: bool
) -> Array:
    """Output [T, num_q_heads, value_head_dim] float64 of a step whose keys are in the pools.

    Args:
        case: attributes and types.
        inputs: the op's inputs; its pools are ignored.
        key_pool: after the step.
        value_pool: after the step.
        rounded: compute in float32, with rotated queries, 16-bit keys and values, weights and
            the output rounded to the activation type, instead of float64 throughout.
    """
    attention = case.attention
    output = np.zeros((len(inputs["query"]), attention.num_q_heads, attention.value_head_dim))
    offsets = inputs["query_start_offsets"].tolist()
    for row, past in enumerate(inputs["past_lens"].tolist()):
        tokens = slice(offsets[row], offsets[row + 1])
        count = tokens.stop - tokens.start
        if count == 0:
            continue
        places, valid = _places(inputs, row, past + count, len(key_pool))
        positions = np.arange(past, past + count)
        visible = valid & _mask(case, positions, past + count)
        keys, values = (
            _gather(case, inputs, pool, places, visible.any(axis=0), index, rounded)
            for index, pool in enumerate((key_pool, value_pool))
        )
        query = _rotate_all(case, inputs["query"][tokens], inputs["rope_cos_sin"], positions)
        query = _round(case, query, rounded)
        output[tokens] = _heads(case, query, keys, values, visible, inputs["sinks"], rounded)
    return output


def allowed_error(case: Case, rounded: Array, expected: Array) -> Array:
    """[T, 1, 1]: twice the error of a computation of the same precision, and one rounding.

    Per token row, because the outputs of rows that see many keys are small; 0 for zeros.
    """
    error = np.abs(rounded - expected).max(axis=(1, 2), keepdims=True)
    largest = np.abs(expected).max(axis=(1, 2), keepdims=True)
    return np.asarray(2 * error + OUTPUT_ROUNDING[case.activation] * largest)


def _places(
    inputs: Inputs, row: int, length: int, num_pages: int
) -> tuple[tuple[Array, Array], Array]:
    """(page, slot) of each position, page 0 where there is none, and whether there is one."""
    table = inputs["page_table"][row]
    positions = np.arange(length)
    index = positions // PAGE
    pages = np.where(index < len(table), table[np.minimum(index, len(table) - 1)], -1)
    valid = (pages >= 0) & (pages < num_pages)
    return (np.where(valid, pages, 0), positions % PAGE), valid


def _mask(case: Case, positions: Array, length: int) -> Array:
    seen = np.arange(length)[None, :] <= positions[:, None]
    if case.window >= 0:
        seen &= np.arange(length)[None, :] > positions[:, None] - case.window
    return seen


def _gather(
    case: Case,
    inputs: Inputs,
    pool: Array,
    places: tuple[Array, Array],
    seen: Array,
    scale_row: int,
    rounded: bool,
) -> Array:
    """Rows [positions, heads, dim]; those that no query sees are zero."""
    found = pool[places[0], :, places[1]].astype(np.float32 if rounded else np.float64)
    found[~seen] = 0
    if case.kv.is_quantised:
        return found * inputs["kv_scales"][scale_row][:, None].astype(found.dtype)
    return _round(case, found, rounded)


def _round(case: Case, numbers: Array, rounded: bool) -> Array:
    if not rounded:
        return numbers.astype(np.float64)
    return numbers.astype(case.activation.numpy).astype(np.float32)


def _rotate_all(case: Case, query: Array, table: Array, positions: Array) -> Array:
    result: Array = query.astype(np.float32)
    if case.rope == 0:
        return result
    cosines, sines = table[positions, 0][:, None], table[positions, 1][:, None]
    pairs = np.arange(table.shape[2])
    half_split = case.rope == 1
    first, second = (pairs, pairs + len(pairs)) if half_split else (2 * pairs, 2 * pairs + 1)
    x, y = result[..., first].copy(), result[..., second].copy()
    result[..., first], result[..., second] = x * cosines - y * sines, y * cosines + x * sines
    return result


def _heads(
    case: Case,
    query: Array,
    keys: Array,
    values: Array,
    visible: Array,
    sinks: Array,
    rounded: bool,
) -> Array:
    attention = case.attention
    number = query.dtype.type
    output = np.zeros((len(query), attention.num_q_heads, values.shape[2]))
    for head in range(attention.num_q_heads):
        kv_head = head // attention.group_size
        scores = query[:, head] @ keys[:, kv_head].T * number(attention.softmax_scale)
        if attention.softcap > 0:
            scores = number(attention.softcap) * np.tanh(scores / number(attention.softcap))
        scores[~visible] = -np.inf
        peak = np.maximum(scores.max(axis=1), number(sinks[head]))
        peak[peak == -np.inf] = 0
        weights = np.exp(scores - peak[:, None])
        total = weights.sum(axis=1) + np.exp(number(sinks[head]) - peak)
        total[total == 0] = 1
        output[:, head] = _round(case, weights, rounded) @ values[:, kv_head] / total[:, None]
    return output.astype(case.activation.numpy).astype(np.float64) if rounded else output
