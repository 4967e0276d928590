"""Decode steps for the device, and what a computation of the same precision makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import numpy_attention

from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType

Array = npt.NDArray[Any]
Inputs = dict[str, Array]
PAGE = 128
RAGGED_LENGTHS = (1, 127, 128, 129, 256, 1000, 5000)
OUTPUT_ROUNDING = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One step.

    Attributes:
        new_tokens: new tokens of each sequence; empty for a decode step, one each.
        lengths: tokens of each sequence after the step.
        padding_rows: sequence rows behind the last one, each with a padding token row.
        padding_tokens: more token rows behind those.
        query_factor: size of the queries; the softmax scale is divided by it.
        identity_pages: page ids in order, instead of scrambled.
        poison: what pages and rows that no sequence owns hold.
    """

    activation: DType = DType.BFLOAT16
    kv: DType = DType.BFLOAT16
    head_dim: int = 128
    value_head_dim: int = 0
    num_kv_heads: int = 2
    group: int = 4
    lengths: Sequence[int] = RAGGED_LENGTHS
    new_tokens: Sequence[int] = ()
    padding_rows: int = 2
    padding_tokens: int = 0
    window: int = -1
    softcap: float = 0.0
    rope: int = 0
    rotary_dim: int = 0
    has_sinks: bool = False
    query_factor: float = 1.0
    identity_pages: bool = False
    poison: float = np.nan
    seed: int = 0

    @property
    def attention(self) -> AttentionSpec:
        return AttentionSpec(
            num_q_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim or self.head_dim,
            softmax_scale=self.head_dim**-0.5 / self.query_factor,
            window=self.window,
            softcap=self.softcap,
            rope=Rope(self.rope),
            rotary_dim=(self.rotary_dim or self.head_dim) if self.rope else 0,
        )

    @property
    def settings(self) -> numpy_attention.Settings:
        attention = self.attention
        return numpy_attention.Settings(
            softmax_scale=attention.softmax_scale,
            window=self.window,
            softcap=attention.softcap,
            rope=self.rope,
        )


def make_inputs(case: Case) -> Inputs:
    """The op's eleven inputs by their contract names."""
    random = np.random.default_rng(case.seed)
    attention = case.attention
    new = list(case.new_tokens or [1] * len(case.lengths)) + [0] * case.padding_rows
    lengths = [*case.lengths, *[0] * case.padding_rows]
    tokens = sum(new) + case.padding_rows + case.padding_tokens
    past = [length - count for length, count in zip(lengths, new, strict=True)]

    def activation(heads: int, dim: int, factor: float = 1.0) -> Array:
        numbers = random.standard_normal((tokens, heads, dim)) * factor
        return numbers.astype(case.activation.numpy)

    sinks = random.uniform(-1, 4, attention.num_q_heads).astype(np.float32)
    table, num_pages = _page_table(case, lengths, random)
    inputs = {
        "query": activation(attention.num_q_heads, attention.head_dim, case.query_factor),
        "key": activation(attention.num_kv_heads, attention.head_dim),
        "value": activation(attention.num_kv_heads, attention.value_head_dim),
        "key_pool": _pool(case, num_pages, attention.head_dim),
        "value_pool": _pool(case, num_pages, attention.value_head_dim),
        "page_table": table,
        "query_start_offsets": np.cumsum([0, *new]).astype(np.int32),
        "past_lens": np.array(past, np.int32),
        "rope_cos_sin": _rope_table(attention, max(lengths) + 1),
        "kv_scales": _scales(case, random),
        "sinks": sinks if case.has_sinks else np.full_like(sinks, -np.inf),
    }
    for row, count in enumerate(past):
        _fill_past(case, inputs, row, count)
    return inputs


def _page_table(
    case: Case, lengths: Sequence[int], random: np.random.Generator
) -> tuple[Array, int]:
    pages_of_row = [-(-length // PAGE) for length in lengths]
    num_pages = sum(pages_of_row) + 3
    # A second generator, so that both orders of pages come with the same numbers.
    ids = np.random.default_rng(case.seed + 1).permutation(num_pages)
    free = iter(range(num_pages) if case.identity_pages else ids.tolist())
    table = np.full((len(lengths), max(pages_of_row) + 1), -1, np.int32)
    for row, pages in enumerate(pages_of_row):
        table[row, :pages] = [next(free) for _ in range(pages)]
    return table, num_pages


def _pool(case: Case, num_pages: int, dim: int) -> Array:
    poison = 127 if case.kv is DType.INT8 and np.isnan(case.poison) else case.poison
    return np.full((num_pages, case.num_kv_heads, PAGE, dim), poison).astype(case.kv.numpy)


def _fill_past(case: Case, inputs: Inputs, row: int, count: int) -> None:
    # A generator per row: the numbers do not depend on where the pages are.
    random = np.random.default_rng((case.seed, row))
    for first in range(0, count, PAGE):
        page, rows = inputs["page_table"][row, first // PAGE], min(PAGE, count - first)
        for name in ("key_pool", "value_pool"):
            pool = inputs[name]
            numbers = random.standard_normal((case.num_kv_heads, rows, pool.shape[3]))
            if case.kv is DType.INT8:
                numbers = np.clip(np.rint(numbers * 40), -127, 127)
            pool[page, :, :rows] = numbers.astype(pool.dtype)


def _rope_table(attention: AttentionSpec, positions: int) -> Array:
    if attention.rope is Rope.NONE:
        return np.zeros((1, 2, 1), np.float32)
    half = attention.rotary_dim // 2
    angles = np.outer(np.arange(positions), 1000.0 ** (-np.arange(half) / half))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _scales(case: Case, random: np.random.Generator) -> Array:
    shape = (2, case.num_kv_heads)
    if case.kv is DType.INT8:
        return random.uniform(0.02, 0.04, shape).astype(np.float32)
    if case.kv is DType.FLOAT8:
        return random.uniform(0.05, 1.5, shape).astype(np.float32)
    return np.ones(shape, np.float32)


def same_precision(case: Case, inputs: Inputs, key_pool: Array, value_pool: Array) -> Array:
    """Decode output with every step rounded as a device of this precision rounds it.

    Products and sums are float32; queries, 16-bit keys and values, weights and the output are of
    the activation type.
    """
    dtype = case.activation.numpy
    attention = case.attention
    output = np.zeros((len(inputs["query"]), attention.num_q_heads, attention.value_head_dim))
    for row, past in enumerate(inputs["past_lens"].tolist()):
        token = int(inputs["query_start_offsets"][row])
        if int(inputs["query_start_offsets"][row + 1]) == token:
            continue
        keys, values = (
            _gather(case, inputs, pool, row, past, index)
            for index, pool in enumerate((key_pool, value_pool))
        )
        query = rotate(inputs["query"][token], inputs["rope_cos_sin"], past, case.rope)
        query = query.astype(dtype).astype(np.float32)
        output[token] = _attend_rounded(case, query, keys, values, inputs["sinks"])
    return output


def rotate(vectors: Array, table: Array, position: int, rope: int) -> Array:
    """`vectors` [heads, dim] in float32, turned by the angles of `position`."""
    result: Array = vectors.astype(np.float32)
    if rope == 0:
        return result
    cosines, sines = table[position]
    pairs = len(cosines)
    places = np.arange(pairs)
    first, second = (places, places + pairs) if rope == 1 else (2 * places, 2 * places + 1)
    x, y = result[:, first].copy(), result[:, second].copy()
    result[:, first], result[:, second] = x * cosines - y * sines, y * cosines + x * sines
    return result


def _gather(
    case: Case, inputs: Inputs, pool: Array, row: int, position: int, scale_row: int
) -> Array:
    """Visible keys or values of a row, [visible, heads, dim] float32."""
    first = 0 if case.window < 0 else max(0, position - case.window + 1)
    places = np.arange(first, position + 1)
    table_row = np.append(inputs["page_table"][row], -1)
    pages = table_row[np.minimum(places // PAGE, len(table_row) - 1)]
    valid = (pages >= 0) & (pages < len(pool))
    found = pool[pages[valid], :, places[valid] % PAGE]
    if case.kv.is_quantised:
        return found.astype(np.float32) * inputs["kv_scales"][scale_row][:, None]
    return found.astype(case.activation.numpy).astype(np.float32)


def _attend_rounded(case: Case, query: Array, keys: Array, values: Array, sinks: Array) -> Array:
    dtype, attention = case.activation.numpy, case.attention
    output = np.zeros((attention.num_q_heads, attention.value_head_dim), np.float32)
    for head in range(attention.num_q_heads):
        kv_head = head // attention.group_size
        scores = keys[:, kv_head] @ query[head] * np.float32(attention.softmax_scale)
        if attention.softcap > 0:
            cap = np.float32(attention.softcap)
            scores = cap * np.tanh(scores / cap)
        peak = max(scores.max(initial=-np.inf), float(sinks[head]))
        if peak == -np.inf:
            continue
        weights = np.exp(scores - np.float32(peak))
        total = weights.sum() + np.exp(np.float32(sinks[head] - peak))
        rounded = weights.astype(dtype).astype(np.float32)
        output[head] = rounded @ values[:, kv_head] / total
    return output.astype(dtype).astype(np.float64)


def allowed_error(case: Case, inputs: Inputs, truth: tuple[Array, Array, Array]) -> Array:
    """[T, 1, 1]: twice the error of a computation of the same precision, and one rounding.

    Per token row, because the outputs of long sequences are small; 0 for a row of zeros.
    """
    expected, key_pool, value_pool = truth
    error = np.abs(same_precision(case, inputs, key_pool, value_pool) - expected)
    largest = np.abs(expected).max(axis=(1, 2), keepdims=True)
    allowed: Array = 2 * error.max(axis=(1, 2), keepdims=True)
    return allowed + OUTPUT_ROUNDING[case.activation] * largest


def truth_of(case: Case, inputs: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Output [T, num_q_heads, value_head_dim] float64 and both pools after the step."""
    return numpy_attention.paged_attention(inputs, case.settings)
