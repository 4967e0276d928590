"""What pages hold: keys that chain a page's tokens to everything before them.

A key is the content that precedes the page and the page's own token ids. Keys are compared in
full, never by hash alone, so two prompts share a page only where every token up to its end is
the same one, under the same tag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import KvPoolError
from paged_trt.plugins.kv import full_pages, page_positions

Content = int
"""Number of a content: a tag alone, or a tag and the tokens of one or more full pages. Never
given twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseTag:
    """What must be the same for keys and values to be the same, besides the tokens.

    Attributes:
        model: hash of the engine's geometry.
        kv_cache_dtype: type of the pools.
        windows: window of each layer.
        adapter: adapter that the request runs with; None for the plain model.
    """

    model: str
    kv_cache_dtype: str
    windows: tuple[int, ...]
    adapter: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PageKey:
    """The content before a page, and the page's token ids, `[128]` int32, as bytes."""

    before: Content
    tokens: bytes


@dataclasses.dataclass(slots=True, eq=False)
class _Page:
    page_id: int
    key: PageKey
    after: set[Content] = dataclasses.field(default_factory=set)


class PageContents:
    """A tree of known pages: below each content, the pages that go on from it."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Content] = {}
        self._root_contents: set[Content] = set()
        self._by_key: dict[PageKey, Content] = {}
        self._pages: dict[Content, _Page] = {}
        self._content_of: dict[int, Content] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._pages)

    def holds(self, page_id: int) -> bool:
        """Whether the content of a page is known."""
        return page_id in self._content_of

    def root(self, tag: Hashable) -> Content:
        """The content of no token under a tag."""
        if tag not in self._roots:
            self._roots[tag] = self._number()
            self._root_contents.add(self._roots[tag])
        return self._roots[tag]

    def find(self, root: Content, tokens: npt.NDArray[np.int64]) -> list[tuple[int, Content]]:
        """Known pages that hold the full pages of some tokens, from the first on.

        Args:
            root: of the tokens' tag.
            tokens: `[num_tokens]` int64.

        Returns:
            Page id and content of each page, until the first page that is not known.
        """
        found = []
        content = root
        for key_tokens in _page_tokens(tokens):
            known = self._by_key.get(PageKey(content, key_tokens))
            if known is None:
                break
            content = known
            found.append((self._pages[known].page_id, known))
        return found

    def add(self, page_id: int, before: Content, tokens: npt.NDArray[np.int64]) -> Content | None:
        """Note what a page holds.

        Args:
            page_id: a page whose 128 positions are written.
            before: content of the page before it, or the root.
            tokens: `[128]` int64.

        Returns:
            The content up to the end of the page. It is that of another page where one with
            the same tokens is known already. None where `before` is known no more.

        Raises:
            KvPoolError: the page is known with other tokens.
        """
        if before not in self._pages and before not in self._root_contents:
            return None
        key = PageKey(before, _as_bytes(tokens))
        known = self._by_key.get(key)
        if known is not None:
            return known
        if page_id in self._content_of:
            raise KvPoolError(f"page {page_id} is known already with other tokens; release it")
        content = self._number()
        self._by_key[key] = content
        self._pages[content] = _Page(page_id, key)
        self._content_of[page_id] = content
        if before in self._pages:
            self._pages[before].after.add(content)
        return content

    def forget(self, page_id: int) -> list[int]:
        """Forget a page and all that go on from it: nothing leads to them any more.

        Returns:
            The ids of the forgotten pages, `page_id` first; none where it is not known.
        """
        if page_id not in self._content_of:
            return []
        forgotten = []
        pending = [self._content_of[page_id]]
        before = self._pages[pending[0]].key.before
        if before in self._pages:
            self._pages[before].after.discard(pending[0])
        while pending:
            page = self._pages.pop(pending.pop())
            del self._by_key[page.key]
            del self._content_of[page.page_id]
            forgotten.append(page.page_id)
            pending += page.after
        return forgotten

    def check(self) -> None:
        """Verify that every known page is reached from a root, and once.

        Raises:
            KvPoolError: it is not so.
        """
        for content, page in self._pages.items():
            before = page.key.before
            is_reached = before in self._root_contents or (
                before in self._pages and content in self._pages[before].after
            )
            if (
                not is_reached
                or self._content_of.get(page.page_id) != content
                or self._by_key.get(page.key) != content
            ):
                raise KvPoolError(f"page {page.page_id} is known but nothing leads to it")
        if not len(self._pages) == len(self._content_of) == len(self._by_key):
            raise KvPoolError(
                f"{len(self._content_of)} pages, {len(self._by_key)} keys and "
                f"{len(self._pages)} contents must be as many"
            )

    def _number(self) -> Content:
        self._next += 1
        return self._next


def _page_tokens(tokens: npt.NDArray[np.int64]) -> Iterator[bytes]:
    for index in range(full_pages(len(tokens))):
        yield _as_bytes(tokens[page_positions(index)])


def _as_bytes(tokens: npt.NDArray[np.int64]) -> bytes:
    # Token ids are below the vocabulary size, an int32.
    return tokens.astype(np.int32).tobytes()
