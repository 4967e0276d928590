from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_trt.plugins import kv
from paged_trt.plugins.errors import KvPoolError
from paged_trt.plugins.kv import KvPoolSpec

INT32_MAX = 2**31 - 1


def test_constants_are_the_contract() -> None:
    assert kv.TOKENS_PER_PAGE == 128
    assert kv.UNUSED_PAGE_ENTRY == -1
    assert kv.MAX_KV_POOL_PAGES == 1_073_741_823
    assert kv.MAX_KV_CACHE_CAPACITY == 2_147_483_520


@pytest.mark.parametrize(
    ("capacity", "pages"),
    [
        (1, 1),
        (127, 1),
        (128, 1),
        (129, 2),
        (256, 2),
        (257, 3),
        (kv.MAX_KV_CACHE_CAPACITY, 16777215),
    ],
)
def test_pages_of_a_sequence(capacity: int, pages: int) -> None:
    assert kv.compute_max_pages_per_seq(capacity) == pages
    assert kv.pages_for_tokens(capacity) == pages
    assert kv.pages_per_slot(kv.tokens_in_pages(pages)) == pages


def test_no_token_needs_no_page() -> None:
    assert kv.pages_for_tokens(0) == 0


@pytest.mark.parametrize("padded", [1, 127, 129, 130, 0, -128, kv.MAX_KV_CACHE_CAPACITY + 128])
def test_pages_per_slot_refuses_what_is_no_padded_capacity(padded: int) -> None:
    with pytest.raises(KvPoolError, match="max_cap_padded"):
        kv.pages_per_slot(padded)


def test_minimum_is_64_bit_and_the_spec_checks_the_limit() -> None:
    pages = kv.compute_minimum_kv_pool_pages(INT32_MAX, kv.MAX_KV_CACHE_CAPACITY)
    assert pages == INT32_MAX * 16777215
    with pytest.raises(KvPoolError, match=f"need {pages} pages.*{kv.MAX_KV_POOL_PAGES}"):
        KvPoolSpec.plan(max_batch_size=INT32_MAX, max_kv_cache_capacity=kv.MAX_KV_CACHE_CAPACITY)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, INT32_MAX + 1, np.int32(4)])
@pytest.mark.parametrize("field", ["num_pages", "max_batch_size", "max_kv_cache_capacity"])
def test_spec_refuses_what_is_no_positive_int32(field: str, value: Any) -> None:
    good = KvPoolSpec.plan(max_batch_size=2, max_kv_cache_capacity=256)
    with pytest.raises(KvPoolError, match=field):
        dataclasses.replace(good, **{field: value})


def test_capacity_over_the_limit_names_both_numbers() -> None:
    over = kv.MAX_KV_CACHE_CAPACITY + 1
    with pytest.raises(KvPoolError, match=rf"{kv.MAX_KV_CACHE_CAPACITY}, got {over}"):
        KvPoolSpec.plan(max_batch_size=1, max_kv_cache_capacity=over)


def test_count_under_the_minimum_names_both_numbers() -> None:
    with pytest.raises(KvPoolError, match=r"num_pages=15 .*at least 16"):
        KvPoolSpec.plan(max_batch_size=4, max_kv_cache_capacity=512, kv_pool_pages=15)


def test_count_over_the_limit_names_both_numbers() -> None:
    over = kv.MAX_KV_POOL_PAGES + 1
    with pytest.raises(KvPoolError, match=rf"num_pages={over} .*{kv.MAX_KV_POOL_PAGES}"):
        KvPoolSpec.plan(max_batch_size=1, max_kv_cache_capacity=128, kv_pool_pages=over)
    KvPoolSpec.plan(max_batch_size=1, max_kv_cache_capacity=128, kv_pool_pages=kv.MAX_KV_POOL_PAGES)


@pytest.mark.parametrize("retained", [-1, 1.5, True, kv.MAX_KV_POOL_PAGES])
def test_retained_pages_are_checked(retained: Any) -> None:
    with pytest.raises(KvPoolError, match="retained_pages"):
        KvPoolSpec.plan(max_batch_size=1, max_kv_cache_capacity=128, retained_pages=retained)


def test_one_of_the_two_counts() -> None:
    with pytest.raises(KvPoolError, match="exclude each other"):
        KvPoolSpec.plan(
            max_batch_size=1, max_kv_cache_capacity=128, retained_pages=0, kv_pool_pages=1
        )


@given(
    batch=st.integers(1, 4096),
    capacity=st.integers(1, 1 << 20),
    retained=st.integers(0, 1000),
)
def test_plan_is_minimal_and_pads_to_itself(batch: int, capacity: int, retained: int) -> None:
    minimum = batch * -(-capacity // 128)
    if minimum + retained > kv.MAX_KV_POOL_PAGES:
        with pytest.raises(KvPoolError):
            KvPoolSpec.plan(
                max_batch_size=batch, max_kv_cache_capacity=capacity, retained_pages=retained
            )
        return
    pool = KvPoolSpec.plan(
        max_batch_size=batch, max_kv_cache_capacity=capacity, retained_pages=retained
    )
    assert pool.num_pages == minimum + retained
    assert (pool.minimum_pages, pool.retained_pages) == (minimum, retained)
    assert pool.padded().padded() == pool.padded()
    assert pool.padded().max_pages_per_seq == pool.max_pages_per_seq
    assert pool.padded().num_pages == pool.num_pages
    last = pool.identity_pages(batch - 1)
    assert last.stop == minimum
    assert pool.owns(last[-1])


def test_value_ids_follow_the_key_ids() -> None:
    pool = KvPoolSpec.plan(max_batch_size=2, max_kv_cache_capacity=256)
    assert [pool.value_page_id(page) for page in range(4)] == [4, 5, 6, 7]
    for outside in (-1, 4):
        with pytest.raises(KvPoolError, match=f"page id {outside} .* 4 pages"):
            pool.value_page_id(outside)


def test_pool_shape_is_head_major() -> None:
    pool = KvPoolSpec.plan(max_batch_size=2, max_kv_cache_capacity=256)
    assert pool.pool_shape(3, 64) == (4, 3, 128, 64)


@pytest.mark.parametrize(
    ("maximum", "buckets"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))]
)
def test_buckets_end_with_the_maximum(maximum: int, buckets: tuple[int, ...]) -> None:
    assert kv.power_of_two_buckets(maximum) == buckets


@pytest.mark.parametrize("slot", [-1, 2, True])
def test_identity_needs_a_slot_of_the_batch(slot: Any) -> None:
    pool = KvPoolSpec.plan(max_batch_size=2, max_kv_cache_capacity=256)
    with pytest.raises(KvPoolError, match="slot"):
        pool.identity_pages(slot)
