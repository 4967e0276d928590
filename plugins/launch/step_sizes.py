"""Ragged sizes of steps that are timed, and where their pages lie in a pool."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, KvPoolSpec, pages_for_tokens
from paged_trt.plugins.operands import StepShape

Array = npt.NDArray[Any]
BYTES_IN_TURN: Final = 190_000_000
"""Keys and values that launches in turn read before one of them reads the first again: over
three times the largest second-level cache."""
MOST_SETS: Final = 48


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Ragged sizes of one step.

    Attributes:
        query_lens: new tokens of each sequence.
        kv_lens: keys of each sequence after the step, the new ones included.

    Raises:
        ConfigError: a sequence has no new token, or fewer keys than new tokens.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        pairs = list(zip(self.query_lens, self.kv_lens, strict=True))
        if not pairs or any(not 0 < query <= keys for query, keys in pairs):
            raise ConfigError(f"no step has new tokens and keys {pairs[:4]}")

    @property
    def shape(self) -> StepShape:
        """T, N and M."""
        tokens, num_seqs = sum(self.query_lens), len(self.query_lens)
        return StepShape(
            num_tokens=tokens,
            num_seqs=num_seqs,
            table_width=max(self.page_counts),
        )

    @property
    def page_counts(self) -> tuple[int, ...]:
        """Pages of each sequence."""
        return tuple(map(pages_for_tokens, self.kv_lens))

    def kv_bytes(self, attention: AttentionSpec, kv: DType) -> int:
        """Bytes of the keys and values that the step sees, each once."""
        return sum(self.kv_lens) * attention.kv_elements * kv.itemsize


def sets_in_turn(sizes: StepSizes, attention: AttentionSpec, kv: DType, pool: KvPoolSpec) -> int:
    """Page tables that take turns, so that none of their data is in a cache.

    As many as BYTES_IN_TURN asks for; fewer, but one at least, where the pool is small.
    """
    wanted = min(MOST_SETS, -(-BYTES_IN_TURN // sizes.kv_bytes(attention, kv)))
    return max(1, min(wanted, pool.times(sum(sizes.page_counts))))


def page_tables(sizes: StepSizes, pool: KvPoolSpec, *, num_sets: int, seed: int = 0) -> Array:
    """Tables of pages in random order, no page twice.

    Args:
        sizes: of the step.
        pool: whose pages they name.
        num_sets: tables.
        seed: of the order.

    Returns:
        `[num_sets, N, M]` int32, UNUSED_PAGE_ENTRY behind the pages of a sequence.

    Raises:
        ConfigError: the pool has too few pages.
    """
    counts = np.array(sizes.page_counts)
    needed = num_sets * int(counts.sum())
    if not pool.times(needed):
        raise ConfigError(
            f"{num_sets} steps need {needed} pages and the pool holds {pool.num_pages}"
        )
    shape = sizes.shape
    order = np.random.default_rng(seed).permutation(needed).astype(np.int32)
    tables = np.full(
        (num_sets, shape.num_seqs, shape.table_width), UNUSED_PAGE_ENTRY, dtype=np.int32
    )
    is_used = np.arange(shape.table_width)[None] < counts[:, None]
    tables[:, is_used] = order.reshape(num_sets, -1)
    return tables


def pool_spec(pool_bytes: int, attention: AttentionSpec, kv: DType) -> KvPoolSpec:
    """Pages that fit into pools of a size.

    Raises:
        KvPoolError: not even one page fits.
    """
    widest = max(attention.head_dim, attention.value_head_dim)
    # Lengths are the tables' own: the kernels know the pool's page count only.
    return KvPoolSpec.fitting(pool_bytes, token_bytes=attention.num_kv_heads * widest * kv.itemsize)
