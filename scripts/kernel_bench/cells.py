"""The shapes that kernels are timed on, in the order in which a short run should get to them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.step_sizes import StepSizes

BF16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT8, DType.INT8
SPREAD: Final = 64
"""Longest over shortest sequence of a ragged batch."""
Heads = tuple[int, int]


class Family(enum.Enum):
    """Which launches of a step are timed."""

    DECODE = "decode"
    PREFILL = "prefill"
    APPEND = "append"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape.

    Attributes:
        family: what is timed.
        heads: query and key heads.
        head_dim: of keys and values.
        kv: type of the pool; activations are bfloat16.
        sizes: of the step.
        group: why the cell is there, such as `table`.
        window: visible keys, or FULL_WINDOW.
        rope: rotate the new queries and keys.
    """

    family: Family
    heads: Heads
    sizes: StepSizes
    group: str
    head_dim: int = 128
    kv: DType = BF16
    window: int = FULL_WINDOW
    rope: bool = False

    @property
    def attention(self) -> AttentionSpec:
        """The layer."""
        return AttentionSpec(
            num_q_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            softmax_scale=float(self.head_dim) ** -0.5,
            window=self.window,
            rope=Rope.HALF_SPLIT if self.rope else Rope.NONE,
            rotary_dim=self.head_dim if self.rope else 0,
        )

    def request(self, *, arch: str | None, num_multiprocessors: int | None) -> AttentionPlanRequest:
        """What the planner is asked."""
        return AttentionPlanRequest(
            arch=arch,
            attention=self.attention,
            activation_dtype=BF16,
            kv_cache_dtype=self.kv,
            step=self.sizes.shape,
            num_multiprocessors=num_multiprocessors,
        )

    @property
    def is_even(self) -> bool:
        """Whether all sequences have the same lengths."""
        return len(set(self.sizes.kv_lens)) == len(set(self.sizes.query_lens)) == 1

    @property
    def bytes(self) -> int:
        """Bytes that must move, each once.

        Decode: visible keys and values. Append: new keys and values, read and written; queries
        are rotated where attention reads them. Prefill: keys, values, queries and output.
        """
        attention, tokens = self.attention, sum(self.sizes.query_lens)
        token_bytes = attention.kv_elements * self.kv.itemsize
        query_bytes = tokens * attention.num_q_heads * self.head_dim * BF16.itemsize
        if self.family is Family.APPEND:
            return tokens * attention.kv_elements * (BF16.itemsize + self.kv.itemsize)
        keys = sum(
            keys if self.window == FULL_WINDOW else min(keys, self.window + query - 1)
            for query, keys in zip(self.sizes.query_lens, self.sizes.kv_lens, strict=True)
        )
        return keys * token_bytes + (2 * query_bytes if self.family is Family.PREFILL else 0)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products over visible keys."""
        if self.family is Family.APPEND:
            return 0
        pairs = sum(map(self._pairs, self.sizes.query_lens, self.sizes.kv_lens))
        return 4 * self.heads[0] * self.head_dim * pairs

    def _pairs(self, queries: int, keys: int) -> int:
        past = keys - queries
        seen = np.arange(past + 1, keys + 1, dtype=np.int64)
        if self.window != FULL_WINDOW:
            seen = np.minimum(seen, self.window)
        return int(seen.sum())

    def row(self) -> dict[str, Any]:
        """The shape, as rows of a results file have it."""
        sizes = self.sizes
        shape: dict[str, Any] = (
            {
                "batch": len(sizes.kv_lens),
                "query_len": sizes.query_lens[0],
                "kv_len": sizes.kv_lens[0],
            }
            if self.is_even
            else {
                "batch": len(sizes.kv_lens),
                "query_lens": list(sizes.query_lens),
                "kv_lens": list(sizes.kv_lens),
            }
        )
        return {
            "group": self.group,
            "num_q_heads": self.heads[0],
            "num_kv_heads": self.heads[1],
            "head_dim": self.head_dim,
            "value_head_dim": self.head_dim,
            "q_dtype": BF16.value,
            "kv_dtype": self.kv.value,
            **shape,
            **({} if self.window == FULL_WINDOW else {"window": self.window}),
            **({"rope": True} if self.rope else {}),
            "bytes": self.bytes,
            "flops": self.flops,
        }

    def __str__(self) -> str:
        sizes = self.sizes
        batch = len(sizes.kv_lens)
        if not self.is_even:
            lengths = f"{batch} x {min(sizes.kv_lens)} to {max(sizes.kv_lens)}"
        elif self.family is Family.DECODE:
            lengths = f"{batch} x {sizes.kv_lens[0]}"
        else:
            lengths = f"{batch} x {sizes.query_lens[0]} on {sizes.kv_lens[0]}"
        extra = "" if self.window == FULL_WINDOW else f" window {self.window}"
        extra += " rope" if self.rope else ""
        return f"{self.heads[0]}/{self.heads[1]} d{self.head_dim} {self.kv.value} {lengths}{extra}"


def even(batch: int, keys: int, queries: int = 1) -> StepSizes:
    """Sequences of one length."""
    return StepSizes(query_lens=(queries,) * batch, kv_lens=(keys,) * batch)


def spread_lengths(batch: int, total: int, *, ratio: int = SPREAD, seed: int = 0) -> list[int]:
    """Lengths in a geometric series, in random order, whose sum is `total`.

    Args:
        batch: sequences, at least 2.
        total: tokens of all.
        ratio: longest over shortest.
        seed: of the order.
    """
    series = float(ratio) ** (np.arange(batch) / (batch - 1))
    lengths = np.maximum(1, np.round(series * total / series.sum())).astype(int)
    lengths[-1] += total - int(lengths.sum())
    return [int(length) for length in np.random.default_rng(seed).permutation(lengths)]


def decode_cells() -> Iterator[Cell]:
    """The decode table, then types, ragged batches, other heads and head dims."""

    def cell(group: str, heads: Heads, batch: int, keys: int, **options: Any) -> Cell:
        return Cell(
            family=Family.DECODE, group=group, heads=heads, sizes=even(batch, keys), **options
        )

    for heads in ((32, 8), (64, 8), (32, 32)):
        for batch in (1, 8, 32, 128):
            for keys in (1024, 4096, 16384, 65536):
                # The largest would need 69 GB.
                if batch * keys * heads[1] <= 2**26:
                    yield cell("table", heads, batch, keys)
    for heads in ((32, 8), (64, 8)):
        for batch, keys in ((1, 16384), (8, 4096), (32, 4096), (32, 16384)):
            yield cell("float8", heads, batch, keys, kv=FP8)
    for batch, tokens in ((32, 32 * 4096), (8, 8 * 16384), (64, 64 * 4096)):
        lengths = spread_lengths(batch, tokens)
        sizes = StepSizes(query_lens=(1,) * batch, kv_lens=tuple(lengths))
        yield Cell(family=Family.DECODE, group="ragged", heads=(32, 8), sizes=sizes)
    yield cell("ragged", (32, 8), 64, 4096)
    for heads in ((40, 8), (28, 4), (16, 2)):
        for batch, keys in ((1, 4096), (8, 4096), (32, 4096)):
            yield cell("heads", heads, batch, keys)
    for dim in (64, 256):
        for batch, keys in ((1, 16384), (8, 4096), (32, 4096), (32, 16384)):
            yield cell("head_dim", (32, 8), batch, keys, head_dim=dim)
    for batch, keys in ((1, 16384), (32, 4096), (32, 16384)):
        yield cell("int8", (32, 8), batch, keys, kv=INT8)
    for window in (1024, 4096):
        yield cell("window", (32, 8), 8, 16384, window=window)


def prefill_cells() -> Iterator[Cell]:
    """The prefill table, then other heads, batches, chunks, ragged batches and the rest."""

    def cell(group: str, heads: Heads, batch: int, queries: int, keys: int, **options: Any) -> Cell:
        sizes = even(batch, keys, queries)
        return Cell(family=Family.PREFILL, group=group, heads=heads, sizes=sizes, **options)

    for heads, batch, queries, keys in (
        ((32, 8), 1, 1024, 1024),
        ((32, 8), 1, 8192, 8192),
        ((32, 8), 4, 4096, 4096),
        ((32, 8), 1, 32768, 32768),
        ((32, 8), 1, 2048, 32768),
        ((32, 8), 4, 512, 8192),
        ((64, 8), 1, 8192, 8192),
        ((64, 8), 1, 16384, 16384),
        ((32, 32), 1, 8192, 8192),
    ):
        yield cell("table", heads, batch, queries, keys)
    yield cell("heads", (40, 8), 1, 8192, 8192)
    yield cell("heads", (28, 4), 1, 8192, 8192)
    for batch, queries in ((2, 4096), (8, 2048), (16, 1024), (16, 512), (1, 2048), (1, 512)):
        yield cell("batch", (32, 8), batch, queries, queries)
    for batch, queries, keys in ((1, 512, 32768), (8, 256, 4096), (2, 1024, 16384)):
        yield cell("chunk", (32, 8), batch, queries, keys)
    for batch, tokens in ((8, 16384), (16, 16384)):
        lengths = tuple(spread_lengths(batch, tokens))
        sizes = StepSizes(query_lens=lengths, kv_lens=lengths)
        yield Cell(family=Family.PREFILL, group="ragged", heads=(32, 8), sizes=sizes)
    for dim in (64, 256):
        yield cell("head_dim", (32, 8), 1, 8192, 8192, head_dim=dim)
    for window in (1024, 4096):
        yield cell("window", (32, 8), 1, 16384, 16384, window=window)
    yield cell("float8", (32, 8), 1, 8192, 8192, kv=FP8)
    for batch, queries, keys in ((1, 1024, 1024), (4, 512, 8192), (1, 2048, 32768), (1, 64, 8192)):
        yield cell("float8", (32, 8), batch, queries, keys, kv=FP8)
    yield cell("int8", (32, 8), 1, 8192, 8192, kv=INT8)


def append_cells() -> Iterator[Cell]:
    """New tokens of decode steps and of prompts, plain, quantised and rotated."""
    for kv_heads in (8, 32):
        for batch, tokens in ((1, 1), (32, 1), (128, 1), (1, 4096), (4, 8192)):
            yield Cell(
                family=Family.APPEND,
                group="table",
                heads=(32, kv_heads),
                sizes=even(batch, max(4096, tokens), tokens),
            )
    for kv, rope in ((FP8, False), (BF16, True), (FP8, True)):
        for batch, tokens in ((128, 1), (4, 8192)):
            yield Cell(
                family=Family.APPEND,
                group="rope" if rope else "float8",
                heads=(32, 8),
                sizes=even(batch, max(4096, tokens), tokens),
                kv=kv,
                rope=rope,
            )


QUICK: Final = {
    Family.DECODE: ((1, 1024), (8, 4096), (32, 4096)),
    Family.PREFILL: ((1, 1024), (1, 8192), (4, 8192)),
    Family.APPEND: ((1, 4096), (4, 8192)),
}
"""Batch and keys of the cells of a quick run, 32 query and 8 key heads."""


def cells_of(family: Family, *, quick: bool) -> list[Cell]:
    """Cells of one family, the ones that count most first."""
    makers = {
        Family.DECODE: decode_cells,
        Family.PREFILL: prefill_cells,
        Family.APPEND: append_cells,
    }
    every = list(makers[family]())
    if not quick:
        return every
    return [
        cell
        for cell in every
        if cell.is_even
        and cell.heads == (32, 8)
        and cell.group in ("table", "float8")
        and (len(cell.sizes.kv_lens), cell.sizes.kv_lens[0]) in QUICK[family]
    ]
