"""Content keys of pages: chains, tags, equal hashes, and what is forgotten with a page."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from paged_trt.plugins.errors import KvPoolError, PagesExhausted
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.runtime.page_contents import PageContents, PageKey, ReuseTag
from paged_trt.runtime.registry import PageRegistry

TAG = ReuseTag(model="m", kv_cache_dtype="float16", windows=(-1, -1))
POOL = KvPoolSpec(num_pages=6, max_batch_size=2, max_kv_cache_capacity=300)


def page(first: int) -> npt.NDArray[np.int64]:
    return np.arange(first, first + 128)


def text(*firsts: int) -> npt.NDArray[np.int64]:
    return np.concatenate([page(first) for first in firsts])


def ids(contents: PageContents, tokens: npt.NDArray[np.int64], tag: ReuseTag = TAG) -> list[int]:
    return [page_id for page_id, _ in contents.find(contents.root(tag), tokens)]


def add(contents: PageContents, firsts: list[int], pages: list[int], tag: ReuseTag = TAG) -> int:
    content: int | None = contents.root(tag)
    for first, page_id in zip(firsts, pages, strict=True):
        assert content is not None
        content = contents.add(page_id, content, page(first))
    contents.check()
    assert content is not None
    return content


def test_full_pages_are_found_up_to_the_first_difference() -> None:
    contents = PageContents()
    add(contents, [0, 1000, 2000], [7, 3, 5])
    assert ids(contents, text(0, 1000, 2000)) == [7, 3, 5]
    assert ids(contents, text(0, 1000, 2001)) == [7, 3]
    assert ids(contents, text(0, 1000)[:-1]) == [7]
    assert ids(contents, text(1000, 2000)) == []
    assert ids(contents, text(1, 1000)) == []


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"kv_cache_dtype": "int8"}, {"windows": (-1, 64)}, {"adapter": "a"}],
    ids=str,
)
def test_another_tag_shares_nothing(change: dict[str, object]) -> None:
    contents = PageContents()
    add(contents, [0, 1000], [0, 1])
    other = dataclasses.replace(TAG, **change)  # type: ignore[arg-type]
    assert ids(contents, text(0, 1000), other) == []
    add(contents, [0, 1000], [2, 3], other)
    assert ids(contents, text(0, 1000), other) == [2, 3]
    assert ids(contents, text(0, 1000)) == [0, 1]


def test_equal_hashes_are_no_equal_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageKey, "__hash__", lambda _: 1)
    contents = PageContents()
    add(contents, [0, 1000], [0, 1])
    add(contents, [0, 2000], [4, 2])
    assert ids(contents, text(0, 1000)) == [0, 1]
    assert ids(contents, text(0, 2000)) == [0, 2]
    assert ids(contents, text(0, 3000)) == [0]
    assert ids(contents, text(1000, 0)) == []


def test_the_first_page_of_a_content_stays_its_page() -> None:
    contents = PageContents()
    first = add(contents, [0], [0])
    assert add(contents, [0], [1]) == first
    assert not contents.holds(1)
    # What goes on from the second page goes on from the first one.
    add(contents, [0, 1000], [1, 2])
    assert ids(contents, text(0, 1000)) == [0, 2]


def test_a_page_is_forgotten_with_all_that_go_on_from_it() -> None:
    contents = PageContents()
    last = add(contents, [0, 1000, 2000], [0, 1, 2])
    add(contents, [0, 3000], [9, 3])
    assert contents.forget(1) == [1, 2]
    contents.check()
    assert ids(contents, text(0, 1000, 2000)) == [0]
    assert ids(contents, text(0, 3000)) == [0, 3]
    assert contents.add(5, last, page(5000)) is None
    assert contents.forget(1) == []
    assert sorted(contents.forget(0)) == [0, 3]
    assert len(contents) == 0


def test_a_page_cannot_hold_two_contents() -> None:
    contents = PageContents()
    add(contents, [0], [0])
    with pytest.raises(KvPoolError, match="page 0 is known already with other tokens"):
        add(contents, [1], [0])


def test_check_sees_a_page_that_nothing_leads_to() -> None:
    contents = PageContents()
    last = add(contents, [0, 1000], [0, 1])
    contents._pages[contents._content_of[0]].after.discard(last)
    with pytest.raises(KvPoolError, match="page 1 is known but nothing leads to it"):
        contents.check()


@pytest.fixture
def registry() -> PageRegistry:
    return PageRegistry(POOL, records_freed=True)


def describe(registry: PageRegistry, pages: list[int], firsts: list[int]) -> None:
    content: int | None = registry.root(TAG)
    for page_id, first in zip(pages, firsts, strict=True):
        assert content is not None
        content = registry.describe(page_id, content, page(first))


def found(registry: PageRegistry, *firsts: int) -> list[int]:
    return [page_id for page_id, _ in registry.find(registry.root(TAG), text(*firsts))]


def test_described_pages_are_retained_and_handed_out_last(registry: PageRegistry) -> None:
    pages = registry.allocate(3)
    describe(registry, pages[:2], [0, 1000])
    registry.release(pages)
    registry.check()
    assert (registry.num_used, registry.num_free, registry.num_retained) == (0, 6, 2)
    assert registry.take_freed() == [2]
    assert registry.allocate(4) == [3, 4, 5, 2]
    assert found(registry, 0, 1000) == [0, 1]
    # The end of a text goes before its beginning.
    assert registry.allocate(1) == [1]
    assert (found(registry, 0, 1000), registry.num_evicted) == ([0], 1)
    assert registry.take_freed() == [1]
    registry.check()


def test_a_hit_makes_a_retained_page_used_again(registry: PageRegistry) -> None:
    pages = registry.allocate(2)
    describe(registry, pages, [0, 1000])
    registry.release(pages)
    registry.share(found(registry, 0, 1000))
    assert (registry.num_used, registry.num_retained) == (2, 0)
    with pytest.raises(PagesExhausted, match="5 pages are wanted and 4 are free"):
        registry.allocate(5)
    registry.share(pages)
    registry.release(pages)
    assert registry.num_used == 2
    registry.check()


def test_the_text_that_nobody_used_for_the_longest_time_goes_first(
    registry: PageRegistry,
) -> None:
    pages = registry.allocate(6)
    describe(registry, pages[:2], [0, 1000])
    describe(registry, pages[2:4], [5000, 6000])
    registry.release(pages)
    registry.share([0, 1])
    registry.release([0, 1])
    assert registry.allocate(3) == [5, 4, 3]
    assert (found(registry, 0, 1000), found(registry, 5000, 6000)) == ([0, 1], [2])


def test_what_goes_on_from_an_evicted_page_is_lost_with_it(registry: PageRegistry) -> None:
    pages = registry.allocate(4)
    describe(registry, pages, [0, 1000, 2000, 3000])
    # The head is free first, as where a window has moved on; the tail is still in use.
    registry.release([0])
    registry.release([1, 2])
    assert registry.num_retained == 3
    assert sorted(registry.allocate(3)) == [0, 4, 5]
    assert found(registry, 0, 1000) == []
    assert (registry.num_retained, registry.num_free) == (0, 2)
    registry.release([3])
    registry.check()
    assert registry.num_retained == 0


def test_an_empty_page_can_neither_be_shared_nor_described(registry: PageRegistry) -> None:
    with pytest.raises(KvPoolError, match="cannot share page 3: it is free already"):
        registry.share([3])
    with pytest.raises(KvPoolError, match="cannot describe page 3: it is free already"):
        registry.describe(3, registry.root(TAG), page(0))
    registry.check()


@pytest.mark.parametrize("damage", ["retained", "empty"])
def test_check_sees_a_page_in_the_wrong_state(registry: PageRegistry, damage: str) -> None:
    describe(registry, registry.allocate(1), [0])
    registry.release([0])
    if damage == "retained":
        registry._contents.forget(0)
    else:
        registry._empty.append(registry._retained.popitem()[0])
    with pytest.raises(KvPoolError, match=r"retained pages .* have no content"):
        registry.check()
