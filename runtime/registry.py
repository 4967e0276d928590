"""Owner of all page ids of a pool; it knows nothing of CUDA, tables or key and value bytes."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from paged_trt.plugins.errors import KvPoolError, PagesExhausted
from paged_trt.plugins.kv import KvPoolSpec


class PageRegistry:
    """Free list in eviction order and reference counts.

    Invariant: every page is either free or referenced, so `num_free + num_used` is the
    pool's `num_pages`. A call that raises has changed nothing.

    Args:
        pool: geometry of the pool.
        free_order: order in which the free pages are first handed out, a permutation of all
            ids; ascending when left out. Another order must give the same results.

    Raises:
        KvPoolError: `free_order` is no permutation of the pool's page ids.
    """

    def __init__(self, pool: KvPoolSpec, *, free_order: Sequence[int] | None = None) -> None:
        order = range(pool.num_pages) if free_order is None else free_order
        if free_order is not None and sorted(free_order) != list(range(pool.num_pages)):
            raise KvPoolError(
                f"`free_order` has {len(free_order)} ids and must name each of the "
                f"{pool.num_pages} pages of the pool once"
            )
        self._pool = pool
        self._free: collections.deque[int] = collections.deque(order)
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return len(self._references)

    def reference_count(self, page_id: int) -> int:
        """References to a page; 0 where it is free.

        Raises:
            KvPoolError: `page_id` is outside the pool.
        """
        if not self._pool.owns(page_id):
            raise KvPoolError(
                f"page id {page_id} is outside the pool of {self._pool.num_pages} pages"
            )
        return self._references.get(page_id, 0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, the longest free first, with one reference each.

        Raises:
            PagesExhausted: fewer pages are free; nothing was changed.
            KvPoolError: `count` is negative.
        """
        if count < 0:
            raise KvPoolError(f"cannot allocate {count} pages; ask for 0 or more")
        if count > len(self._free):
            raise PagesExhausted(count, len(self._free))
        pages = [self._free.popleft() for _ in range(count)]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page_ids: Iterable[int]) -> None:
        """Add one reference to each page.

        Raises:
            KvPoolError: a page is free, or outside the pool.
        """
        counted = self._counted(page_ids, verb="share")
        for page_id, times in counted.items():
            self._references[page_id] += times

    def release(self, page_ids: Iterable[int]) -> None:
        """Drop one reference to each page; a page without references becomes free.

        Pages of one sequence are freed from its end, so that its head, which another
        sequence may begin with as well, is overwritten last.

        Raises:
            KvPoolError: a page has fewer references than the call drops (a double free), or
                it is outside the pool.
        """
        counted = self._counted(page_ids, verb="release")
        for page_id, times in counted.items():
            held = self._references[page_id]
            if times > held:
                raise KvPoolError(
                    f"page {page_id} is released {times} times but has {held} references; "
                    "release it once per reference"
                )
        for page_id, times in reversed(counted.items()):
            self._references[page_id] -= times
            if not self._references[page_id]:
                del self._references[page_id]
                self._free.append(page_id)

    def check(self) -> None:
        """Verify conservation: every page of the pool is free once, or referenced.

        Raises:
            KvPoolError: a page is lost, or is free twice, or is free and referenced.
        """
        seen = collections.Counter(self._free)
        seen.update(self._references.keys())
        wrong = [page_id for page_id, times in seen.items() if times != 1]
        if wrong or set(seen) != set(range(self._pool.num_pages)):
            raise KvPoolError(
                f"{self.num_free} free and {self.num_used} used pages must be the "
                f"{self._pool.num_pages} pages of the pool; pages counted twice: {wrong[:8]}"
            )

    def _counted(self, page_ids: Iterable[int], *, verb: str) -> dict[int, int]:
        counted = dict(collections.Counter(page_ids))
        for page_id in counted:
            if not self.reference_count(page_id):
                raise KvPoolError(f"cannot {verb} page {page_id}: it is free already")
        return counted
