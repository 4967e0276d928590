"""PagedAttention in NumPy, written from the contract and sharing no code with the function body.

What is stored in the pool is computed in float32, as the contract's types say, so that pool
bytes can be compared exactly; the attention itself is float64, one query row at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PAGE = 128
FLOAT8_MAX = 448.0
INT8_MAX = 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The op's attributes that change numbers, with the contract's neutral defaults."""

    softmax_scale: float
    window: int = -1
    softcap: float = 0.0
    rope: int = 0


def paged_attention(
    inputs: Mapping[str, Array], settings: Settings
) -> tuple[npt.NDArray[np.float64], Array, Array]:
    """Run one step.

    Args:
        inputs: the op's eleven inputs by their contract names, with ml_dtypes types where
            NumPy has none. The pools are not modified.
        settings: the op's attributes.

    Returns:
        output [T, num_q_heads, value_head_dim] float64, and both pools after the step.
    """
    key_pool, value_pool = inputs["key_pool"].copy(), inputs["value_pool"].copy()
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    output = np.zeros((*query.shape[:2], value.shape[2]))
    tokens = _tokens(inputs)
    for token, sequence, position in tokens:
        page = int(_page(inputs, sequence, position))
        if page < 0:
            continue
        rotated = _rotate(key[token], inputs["rope_cos_sin"], position, settings.rope)
        slot = position % PAGE
        key_scale, value_scale = inputs["kv_scales"]
        key_pool[page, :, slot] = _quantise(rotated, key_scale, key_pool.dtype)
        value_pool[page, :, slot] = _quantise(
            value[token].astype(np.float32), value_scale, value_pool.dtype
        )
    for token, sequence, position in tokens:
        rotated = _rotate(query[token], inputs["rope_cos_sin"], position, settings.rope)
        keys, values = _visible(inputs, key_pool, value_pool, sequence, position, settings.window)
        output[token] = _attend(rotated.astype(np.float64), keys, values, inputs["sinks"], settings)
    return output, key_pool, value_pool


def _tokens(inputs: Mapping[str, Array]) -> list[tuple[int, int, int]]:
    """(token row, sequence row, position) of every token that is no padding."""
    offsets = inputs["query_start_offsets"].tolist()
    return [
        (token, sequence, past + token - offsets[sequence])
        for sequence, past in enumerate(inputs["past_lens"].tolist())
        for token in range(offsets[sequence], offsets[sequence + 1])
    ]


def _page(inputs: Mapping[str, Array], sequence: int, position: int) -> int:
    """Page of a position, -1 where the table names none that exists."""
    table_row = inputs["page_table"][sequence].tolist()
    index = position // PAGE
    if index >= len(table_row):
        return -1
    page = int(table_row[index])
    return page if 0 <= page < len(inputs["key_pool"]) else -1


def _rotate(vectors: Array, table: Array, position: int, rope: int) -> npt.NDArray[np.float32]:
    """`vectors` [heads, dim] turned by the angles of `position`."""
    result: npt.NDArray[np.float32] = vectors.astype(np.float32)
    if rope == 0:
        return result
    source = result.copy()
    cosines, sines = table[position]
    pairs = len(cosines)
    for pair in range(pairs):
        first, second = (pair, pair + pairs) if rope == 1 else (2 * pair, 2 * pair + 1)
        x, y = source[:, first], source[:, second]
        result[:, first] = x * cosines[pair] - y * sines[pair]
        result[:, second] = y * cosines[pair] + x * sines[pair]
    return result


def _quantise(vectors: npt.NDArray[np.float32], scales: Array, dtype: np.dtype[Any]) -> Array:
    """`vectors` [heads, dim] as the pool stores them."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == np.int8:
            scaled = np.nan_to_num(vectors / scales[:, None], nan=0.0, posinf=1e9, neginf=-1e9)
            return np.clip(np.rint(scaled), -INT8_MAX, INT8_MAX).astype(np.int8)
        if dtype == ml_dtypes.float8_e4m3fn:
            scaled = np.clip(vectors / scales[:, None], -FLOAT8_MAX, FLOAT8_MAX)
            return scaled.astype(dtype)
        return vectors.astype(dtype)


def _visible(
    inputs: Mapping[str, Array],
    key_pool: Array,
    value_pool: Array,
    sequence: int,
    position: int,
    window: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Keys and values that a query at `position` sees, [visible, heads, dim]."""
    first = 0 if window < 0 else max(0, position - window + 1)
    places = [
        (page, seen % PAGE)
        for seen in range(first, position + 1)
        if (page := _page(inputs, sequence, seen)) >= 0
    ]
    pages = np.array([page for page, _ in places], dtype=np.int64)
    slots = np.array([slot for _, slot in places], dtype=np.int64)
    keys = key_pool[pages, :, slots].astype(np.float64)
    values = value_pool[pages, :, slots].astype(np.float64)
    if key_pool.dtype in (np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)):
        keys = keys * inputs["kv_scales"][0][:, None]
        values = values * inputs["kv_scales"][1][:, None]
    return keys, values


def _attend(
    query: npt.NDArray[np.float64],
    keys: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    sinks: Array,
    settings: Settings,
) -> npt.NDArray[np.float64]:
    """One token's output [num_q_heads, value_head_dim]."""
    group = query.shape[0] // keys.shape[1]
    output = np.zeros((query.shape[0], values.shape[2]))
    for head, vector in enumerate(query):
        scores = keys[:, head // group] @ vector * settings.softmax_scale
        if settings.softcap > 0:
            scores = settings.softcap * np.tanh(scores / settings.softcap)
        logits = np.append(scores, float(sinks[head]))
        peak = logits.max()
        if peak == -np.inf:
            continue
        weights = np.exp(logits - peak)
        output[head] = weights[:-1] @ values[:, head // group] / weights.sum()
    return output
