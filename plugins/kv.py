"""KV page geometry: the only module that computes, compares or validates page counts.

The network, the optimization profiles, the plugin, the manifest, the allocation, the
registry and the page table all read `num_pages` from one `KvPoolSpec` and from nowhere
else. An AST test holds that no other module does page arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from paged_trt.plugins.errors import KvPoolError

INT32_MAX: Final = 2**31 - 1
TOKENS_PER_PAGE: Final = 128
"""Page size P: tokens per page."""
UNUSED_PAGE_ENTRY: Final = -1
"""Page-table entry that holds no page."""
MAX_KV_POOL_PAGES: Final = INT32_MAX // 2
"""Largest K-page count: value ids (`K id + num_pages`) and `2 * num_pages` fit a positive int32."""
MAX_KV_CACHE_CAPACITY: Final = (INT32_MAX // TOKENS_PER_PAGE) * TOKENS_PER_PAGE
"""Largest token capacity whose page-aligned padded value fits int32."""


def _require_int(name: str, value: object, minimum: int, maximum: int) -> None:
    # bool and NumPy integers are refused: the first is a slip, the second wraps around.
    if type(value) is not int or not minimum <= value <= maximum:
        raise KvPoolError(
            f"`{name}` must be an int from {minimum} to {maximum}, got {value!r} "
            f"({type(value).__name__})"
        )


def pages_for_tokens(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens of one sequence span; 0 for no token.

    Raises:
        KvPoolError: `num_tokens` is negative, no int, or over MAX_KV_CACHE_CAPACITY.
    """
    _require_int("num_tokens", num_tokens, 0, MAX_KV_CACHE_CAPACITY)
    return -(-num_tokens // TOKENS_PER_PAGE)


def tokens_in_pages(num_pages: int) -> int:
    """Tokens that `num_pages` pages of one sequence hold.

    Raises:
        KvPoolError: `num_pages` is negative, no int, or the tokens pass int32.
    """
    _require_int("num_pages", num_pages, 0, MAX_KV_CACHE_CAPACITY // TOKENS_PER_PAGE)
    return num_pages * TOKENS_PER_PAGE


def pages_per_slot(max_cap_padded: int) -> int:
    """Pages that one slot's padded token capacity spans.

    Args:
        max_cap_padded: token capacity of a slot, a multiple of TOKENS_PER_PAGE.

    Raises:
        KvPoolError: not a positive multiple of TOKENS_PER_PAGE, or over MAX_KV_CACHE_CAPACITY.
    """
    _require_int("max_cap_padded", max_cap_padded, 1, MAX_KV_CACHE_CAPACITY)
    if max_cap_padded % TOKENS_PER_PAGE:
        raise KvPoolError(
            f"`max_cap_padded` must be a multiple of {TOKENS_PER_PAGE}, got {max_cap_padded}"
        )
    return max_cap_padded // TOKENS_PER_PAGE


def compute_max_pages_per_seq(max_kv_cache_capacity: int) -> int:
    """Pages that one sequence's KV capacity spans: the last dimension of the page table.

    Raises:
        KvPoolError: the capacity is not an int from 1 to MAX_KV_CACHE_CAPACITY.
    """
    _require_int("max_kv_cache_capacity", max_kv_cache_capacity, 1, MAX_KV_CACHE_CAPACITY)
    return pages_for_tokens(max_kv_cache_capacity)


def compute_minimum_kv_pool_pages(max_batch_size: int, max_kv_cache_capacity: int) -> int:
    """Minimum active pages: `max_batch_size * ceil(max_kv_cache_capacity / 128)`.

    Identity-mapped slots occupy these first pages. The product is returned unbounded;
    `KvPoolSpec` checks it against MAX_KV_POOL_PAGES.

    Raises:
        KvPoolError: an argument is not a positive int32.
    """
    _require_int("max_batch_size", max_batch_size, 1, INT32_MAX)
    return max_batch_size * compute_max_pages_per_seq(max_kv_cache_capacity)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvPoolSpec:
    """Page geometry of a KV pool, shared by all layers; valid by construction.

    Attributes:
        num_pages: key pages of every layer's pool (the value half has as many).
        max_batch_size: sequence rows of one step.
        max_kv_cache_capacity: tokens that one sequence may hold, past and new.

    Raises:
        KvPoolError: a value is no positive int32, the capacity is over
            MAX_KV_CACHE_CAPACITY, or `num_pages` is under the minimum or over
            MAX_KV_POOL_PAGES.
    """

    num_pages: int
    max_batch_size: int
    max_kv_cache_capacity: int

    def __post_init__(self) -> None:
        minimum = compute_minimum_kv_pool_pages(self.max_batch_size, self.max_kv_cache_capacity)
        if minimum > MAX_KV_POOL_PAGES:
            raise KvPoolError(
                f"max_batch_size={self.max_batch_size} and "
                f"max_kv_cache_capacity={self.max_kv_cache_capacity} need {minimum} pages, over "
                f"the limit of {MAX_KV_POOL_PAGES}; lower one of the two"
            )
        _require_int("num_pages", self.num_pages, 1, INT32_MAX)
        if self.num_pages < minimum:
            raise KvPoolError(
                f"num_pages={self.num_pages} cannot hold max_batch_size={self.max_batch_size} "
                f"sequences of max_kv_cache_capacity={self.max_kv_cache_capacity} tokens; "
                f"raise it to at least {minimum}: `--kv-pool-pages {minimum}`"
            )
        if self.num_pages > MAX_KV_POOL_PAGES:
            raise KvPoolError(
                f"num_pages={self.num_pages} is over the limit of {MAX_KV_POOL_PAGES}; "
                "lower `--kv-pool-pages` or `--retained-pages`"
            )

    @classmethod
    def plan(
        cls,
        *,
        max_batch_size: int,
        max_kv_cache_capacity: int,
        retained_pages: int | None = None,
        kv_pool_pages: int | None = None,
    ) -> KvPoolSpec:
        """Pool for the given limits: the minimum, plus retained pages, or an explicit count.

        Args:
            max_batch_size: sequence rows of one step.
            max_kv_cache_capacity: tokens that one sequence may hold.
            retained_pages: pages on top of the minimum, kept for reuse across requests.
            kv_pool_pages: the whole count, instead of `retained_pages`.

        Raises:
            KvPoolError: both counts are given, or the result is invalid.
        """
        if retained_pages is not None and kv_pool_pages is not None:
            raise KvPoolError(
                f"`--retained-pages` {retained_pages} and `--kv-pool-pages` {kv_pool_pages} "
                "exclude each other; give one of the two"
            )
        if kv_pool_pages is None:
            extra = 0 if retained_pages is None else retained_pages
            _require_int("retained_pages", extra, 0, MAX_KV_POOL_PAGES)
            kv_pool_pages = (
                compute_minimum_kv_pool_pages(max_batch_size, max_kv_cache_capacity) + extra
            )
            if kv_pool_pages > MAX_KV_POOL_PAGES:
                raise KvPoolError(
                    f"max_batch_size={max_batch_size}, "
                    f"max_kv_cache_capacity={max_kv_cache_capacity} and retained_pages={extra} "
                    f"need {kv_pool_pages} pages, over the limit of {MAX_KV_POOL_PAGES}; "
                    "lower one of them"
                )
        return cls(
            num_pages=kv_pool_pages,
            max_batch_size=max_batch_size,
            max_kv_cache_capacity=max_kv_cache_capacity,
        )

    @classmethod
    def from_table_width(
        cls, *, num_pages: int, max_batch_size: int, max_pages_per_seq: int
    ) -> KvPoolSpec:
        """Pool as an operator knows it: its capacity is the padded one.

        Raises:
            KvPoolError: the geometry is invalid.
        """
        _require_int(
            "max_pages_per_seq", max_pages_per_seq, 1, MAX_KV_CACHE_CAPACITY // TOKENS_PER_PAGE
        )
        return cls(
            num_pages=num_pages,
            max_batch_size=max_batch_size,
            max_kv_cache_capacity=tokens_in_pages(max_pages_per_seq),
        )

    @classmethod
    def fitting(cls, pool_bytes: int, *, token_bytes: int) -> KvPoolSpec:
        """Pool as a kernel knows it, of as many pages as a block of memory holds.

        Args:
            pool_bytes: of the keys or of the values, whichever need more.
            token_bytes: of one token in that pool.

        Raises:
            KvPoolError: not even one page fits.
        """
        _require_int("token_bytes", token_bytes, 1, INT32_MAX)
        return cls(
            num_pages=min(pool_bytes // (token_bytes * TOKENS_PER_PAGE), MAX_KV_POOL_PAGES),
            max_batch_size=1,
            max_kv_cache_capacity=1,
        )

    @property
    def max_pages_per_seq(self) -> int:
        """Largest width of the page table."""
        return compute_max_pages_per_seq(self.max_kv_cache_capacity)

    @property
    def minimum_pages(self) -> int:
        """Pages that hold every slot at full capacity."""
        return compute_minimum_kv_pool_pages(self.max_batch_size, self.max_kv_cache_capacity)

    @property
    def retained_pages(self) -> int:
        """Pages on top of the minimum."""
        return self.num_pages - self.minimum_pages

    def padded(self) -> KvPoolSpec:
        """This pool with its capacity rounded up to whole pages, as the operator sees it."""
        return KvPoolSpec.from_table_width(
            num_pages=self.num_pages,
            max_batch_size=self.max_batch_size,
            max_pages_per_seq=self.max_pages_per_seq,
        )

    def pool_shape(self, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
        """Shape of one key or value pool, `[num_pages, num_kv_heads, 128, head_dim]`."""
        return (self.num_pages, num_kv_heads, TOKENS_PER_PAGE, head_dim)

    def covers_table(self, num_positions: int) -> bool:
        """Whether positions 0 to `num_positions` - 1 reach into the last page of a full row."""
        covered = pages_for_tokens(min(num_positions, MAX_KV_CACHE_CAPACITY))
        return covered >= self.max_pages_per_seq

    def table_entries(self) -> int:
        """Entries of the largest page table, `[max_batch_size, max_pages_per_seq]`."""
        return self.max_batch_size * self.max_pages_per_seq

    def times(self, pages: int) -> int:
        """How often `pages` different pages fit into the pool."""
        return self.num_pages // pages

    def value_page_id(self, key_page_id: int) -> int:
        """Id of a value page in the combined view of one allocation, keys first.

        Raises:
            KvPoolError: `key_page_id` is outside the pool.
        """
        if not self.owns(key_page_id):
            raise KvPoolError(
                f"page id {key_page_id} is outside the pool of {self.num_pages} pages"
            )
        return key_page_id + self.num_pages

    def owns(self, page_id: int) -> bool:
        """Whether `page_id` names a page of this pool."""
        return 0 <= page_id < self.num_pages

    def identity_pages(self, slot: int) -> range:
        """Pages of `slot` under identity mapping.

        Raises:
            KvPoolError: `slot` is outside the batch.
        """
        _require_int("slot", slot, 0, self.max_batch_size - 1)
        first = slot * self.max_pages_per_seq
        return range(first, first + self.max_pages_per_seq)


def tokens_in_last_page(num_tokens: int) -> int:
    """Tokens in the last page that `num_tokens` tokens of one sequence span, 1 to 128.

    Raises:
        KvPoolError: `num_tokens` is not positive, no int, or over MAX_KV_CACHE_CAPACITY.
    """
    _require_int("num_tokens", num_tokens, 1, MAX_KV_CACHE_CAPACITY)
    return (num_tokens - 1) % TOKENS_PER_PAGE + 1


def page_of_position(position: int) -> int:
    """Index into a sequence's page-table row of the page that holds `position`."""
    return position // TOKENS_PER_PAGE


def full_pages(num_tokens: int) -> int:
    """Pages of a sequence whose every position is taken by its first `num_tokens` tokens.

    Raises:
        KvPoolError: `num_tokens` is negative, no int, or over MAX_KV_CACHE_CAPACITY.
    """
    _require_int("num_tokens", num_tokens, 0, MAX_KV_CACHE_CAPACITY)
    return num_tokens // TOKENS_PER_PAGE


def page_positions(index: int) -> slice:
    """Positions of a sequence that its page number `index` holds."""
    return slice(index * TOKENS_PER_PAGE, (index + 1) * TOKENS_PER_PAGE)


def first_visible_page(past_len: int, window: int) -> int:
    """First page of a sequence that its next token, or a later one, can see.

    Args:
        past_len: tokens in the pool; the next token has this position.
        window: keys visible to the left, the token itself included, of the layer that sees
            most; negative where it sees all.
    """
    if window < 0:
        return 0
    return max(0, past_len - window + 1) // TOKENS_PER_PAGE


def most_pages_read(*, num_tokens: int, num_seqs: int, table_width: int, window: int) -> int:
    """Pages that a step may read, each counted for every sequence that reads it.

    However the tokens fall on the sequences: c tokens of one see window + c - 1 positions at most,
    which begin anywhere in a page.

    Args:
        num_tokens: new tokens of all sequences.
        num_seqs: sequences.
        table_width: pages that a sequence may have.
        window: keys visible to the left including self; negative where all are.
    """
    every = num_seqs * table_width
    if window < 0:
        return every
    seen = num_tokens + num_seqs * (window + TOKENS_PER_PAGE - 3)
    return min(every, seen // TOKENS_PER_PAGE + num_seqs)


def bytes_of_pages(count: int, *, token_bytes: int) -> int:
    """Bytes of `count` pages of tokens of a size."""
    return count * TOKENS_PER_PAGE * token_bytes


def table_width_buckets(pool: KvPoolSpec) -> tuple[int, ...]:
    """Page-table widths that a step may use: powers of two, then the maximum."""
    return power_of_two_buckets(pool.max_pages_per_seq)


def power_of_two_buckets(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `maximum`, then `maximum`."""
    buckets = []
    size = 1
    while size < maximum:
        buckets.append(size)
        size *= 2
    return (*buckets, maximum)
