import pytest

from paged_trt.plugins.errors import KvPoolError, PagesExhausted
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.runtime.registry import PageRegistry

POOL = KvPoolSpec(num_pages=6, max_batch_size=2, max_kv_cache_capacity=300)


@pytest.fixture
def registry() -> PageRegistry:
    return PageRegistry(POOL)


def test_pages_are_handed_out_in_order_and_the_longest_free_comes_first(
    registry: PageRegistry,
) -> None:
    assert registry.allocate(3) == [0, 1, 2]
    registry.release([0, 1, 2])
    assert registry.allocate(6) == [3, 4, 5, 2, 1, 0]


def test_a_failed_allocation_changes_nothing_and_names_both_numbers(
    registry: PageRegistry,
) -> None:
    registry.allocate(4)
    with pytest.raises(PagesExhausted, match="3 pages are wanted and 2 are free") as caught:
        registry.allocate(3)
    assert (caught.value.wanted, caught.value.free) == (3, 2)
    assert registry.allocate(2) == [4, 5]
    registry.check()


def test_no_page_can_be_asked_for(registry: PageRegistry) -> None:
    assert registry.allocate(0) == []
    with pytest.raises(KvPoolError, match="-1 pages"):
        registry.allocate(-1)


def test_a_shared_page_is_free_after_its_last_release(registry: PageRegistry) -> None:
    pages = registry.allocate(2)
    registry.share(pages[:1])
    registry.release(pages)
    assert (registry.reference_count(0), registry.reference_count(1)) == (1, 0)
    registry.release([0])
    assert (registry.num_free, registry.num_used) == (6, 0)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 1, 5], "cannot release page 5: it is free already"),
        ([0, 0], "page 0 is released 2 times but has 1 references"),
        ([0, 6], "page id 6 is outside the pool of 6 pages"),
        ([-1], "page id -1 is outside the pool of 6 pages"),
    ],
)
def test_a_bad_release_changes_nothing(
    registry: PageRegistry, pages: list[int], message: str
) -> None:
    registry.allocate(2)
    with pytest.raises(KvPoolError, match=message):
        registry.release(pages)
    assert (registry.num_free, registry.num_used) == (4, 2)
    registry.check()


def test_a_free_page_cannot_be_shared(registry: PageRegistry) -> None:
    with pytest.raises(KvPoolError, match="cannot share page 3"):
        registry.share([3])


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 5, 6]])
def test_the_free_order_is_a_permutation(order: list[int]) -> None:
    with pytest.raises(KvPoolError, match="each of the 6 pages"):
        PageRegistry(POOL, free_order=order)
    assert PageRegistry(POOL, free_order=[5, 3, 1, 0, 2, 4]).allocate(2) == [5, 3]


@pytest.mark.parametrize("damage", ["lost", "twice", "free and used"])
def test_check_sees_a_broken_free_list(registry: PageRegistry, damage: str) -> None:
    registry.allocate(1)
    free = registry._empty
    if damage == "lost":
        free.popleft()
    else:
        free.append(0 if damage == "free and used" else 3)
    with pytest.raises(KvPoolError, match="the 6 pages of the pool"):
        registry.check()
