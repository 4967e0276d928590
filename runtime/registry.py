"""Owner of all page ids of a pool; it knows nothing of CUDA, tables or key and value bytes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import KvPoolError, PagesExhausted
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.runtime.page_contents import Content, PageContents


class PageRegistry:
    """Free list in eviction order, reference counts, and what retained pages hold.

    A page is in one of three states: referenced by one sequence or more; retained, which is
    without a reference but with known content, for a later sequence to share; or empty.
    `allocate` hands out empty pages first, then the retained ones that nobody used for the
    longest time, whose content is forgotten then.

    Invariant: every page is in exactly one state, so `num_free + num_used` is the pool's
    `num_pages`. A call that raises has changed nothing.

    Args:
        pool: geometry of the pool.
        free_order: order in which the empty pages are first handed out, a permutation of all
            ids; ascending when left out. Another order must give the same results.
        records_freed: keep the ids of pages whose content is lost, for `take_freed`.

    Raises:
        KvPoolError: `free_order` is no permutation of the pool's page ids.
    """

    def __init__(
        self,
        pool: KvPoolSpec,
        *,
        free_order: Sequence[int] | None = None,
        records_freed: bool = False,
    ) -> None:
        order = range(pool.num_pages) if free_order is None else free_order
        if free_order is not None and sorted(free_order) != list(range(pool.num_pages)):
            raise KvPoolError(
                f"`free_order` has {len(free_order)} ids and must name each of the "
                f"{pool.num_pages} pages of the pool once"
            )
        self._pool = pool
        self._empty: collections.deque[int] = collections.deque(order)
        # In the order in which they lost their last reference.
        self._retained: dict[int, None] = {}
        self._references: dict[int, int] = {}
        self._contents = PageContents()
        self._freed: list[int] | None = [] if records_freed else None
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out: empty and retained ones."""
        return len(self._empty) + len(self._retained)

    @property
    def num_retained(self) -> int:
        """Pages without a reference whose content is known."""
        return len(self._retained)

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
        if count > self.num_free:
            raise PagesExhausted(count, self.num_free)
        pages = []
        for _ in range(count):
            if not self._empty:
                self._evict()
            pages.append(self._empty.popleft())
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page_ids: Iterable[int]) -> None:
        """Add one reference to each page, which is referenced or retained.

        Raises:
            KvPoolError: a page is empty, or outside the pool.
        """
        counted = collections.Counter(page_ids)
        for page_id in counted:
            if not self.reference_count(page_id) and page_id not in self._retained:
                raise KvPoolError(f"cannot share page {page_id}: it is free already")
        for page_id, times in counted.items():
            self._retained.pop(page_id, None)
            self._references[page_id] = self._references.get(page_id, 0) + times

    def release(self, page_ids: Iterable[int]) -> None:
        """Drop one reference to each page; one without references is retained or empty then.

        Pages of one sequence are freed from its end, so that its head, which another
        sequence may begin with as well, is overwritten last.

        Raises:
            KvPoolError: a page has fewer references than the call drops (a double free), or
                it is outside the pool.
        """
        counted = dict(collections.Counter(page_ids))
        for page_id, times in counted.items():
            held = self.reference_count(page_id)
            if not held:
                raise KvPoolError(f"cannot release page {page_id}: it is free already")
            if times > held:
                raise KvPoolError(
                    f"page {page_id} is released {times} times but has {held} references; "
                    "release it once per reference"
                )
        for page_id, times in reversed(counted.items()):
            self._references[page_id] -= times
            if self._references[page_id]:
                continue
            del self._references[page_id]
            if self._contents.holds(page_id):
                self._retained[page_id] = None
            else:
                self._empty.append(page_id)
                self._note_freed(page_id)

    def root(self, tag: Hashable) -> Content:
        """The content of no token under a tag, where chains of `describe` begin."""
        return self._contents.root(tag)

    def describe(
        self, page_id: int, before: Content, tokens: npt.NDArray[np.int64]
    ) -> Content | None:
        """Say what a referenced page holds, now that it is full.

        Args:
            page_id: a page that nothing is going to write while it has references.
            before: content of the page before it in its sequence, or the root.
            tokens: `[128]` int64.

        Returns:
            Content up to the end of this page; None where `before` is known no more, and no
            page after it can be described.

        Raises:
            KvPoolError: the page is free, or described with other tokens already.
        """
        if not self.reference_count(page_id):
            raise KvPoolError(f"cannot describe page {page_id}: it is free already")
        return self._contents.add(page_id, before, tokens)

    def find(self, root: Content, tokens: npt.NDArray[np.int64]) -> list[tuple[int, Content]]:
        """Pages that hold the first full pages of some tokens, each with its content.

        Nothing is referenced: `share` the pages before anything else is allocated.
        """
        return self._contents.find(root, tokens)

    def forget_retained(self) -> None:
        """Make all retained pages empty, the longest unused first."""
        while self._retained:
            self._evict()

    def forget(self, page_ids: Iterable[int]) -> None:
        """Let nobody find some pages again, nor those that go on from them.

        Those of them that are retained are empty then; referenced ones stay so.
        """
        for page_id in page_ids:
            self._forget(page_id)

    def take_freed(self) -> list[int]:
        """Pages whose content was lost since the last call; empty unless they are recorded."""
        freed, self._freed = self._freed or [], [] if self._freed is not None else None
        return freed

    def check(self) -> None:
        """Verify conservation: every page of the pool is empty, retained or referenced, once.

        Raises:
            KvPoolError: a page is lost, or in two states, or retained without known content,
                or empty with known content.
        """
        seen = collections.Counter(itertools.chain(self._empty, self._retained, self._references))
        wrong = [page_id for page_id, times in seen.items() if times != 1]
        if wrong or set(seen) != set(range(self._pool.num_pages)):
            raise KvPoolError(
                f"{self.num_free} free and {self.num_used} used pages must be the "
                f"{self._pool.num_pages} pages of the pool; pages counted twice: {wrong[:8]}"
            )
        unknown = [page_id for page_id in self._retained if not self._contents.holds(page_id)]
        stale = [page_id for page_id in self._empty if self._contents.holds(page_id)]
        if unknown or stale:
            raise KvPoolError(
                f"retained pages {unknown[:8]} have no content, empty pages {stale[:8]} have one"
            )
        self._contents.check()

    def _evict(self) -> None:
        """Empty the page that is retained longest, and all retained pages that go on from it."""
        self.num_evicted += self._forget(next(iter(self._retained)))

    def _forget(self, page_id: int) -> int:
        """Forget a page and all that go on from it; how many of them became empty."""
        count = 0
        for forgotten in self._contents.forget(page_id):
            if forgotten in self._retained:
                del self._retained[forgotten]
                self._empty.append(forgotten)
                self._note_freed(forgotten)
                count += 1
        return count

    def _note_freed(self, page_id: int) -> None:
        if self._freed is not None:
            self._freed.append(page_id)
