"""Registry and page table under arbitrary sequences of calls; bugs must be seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged_trt.plugins.errors import KvPoolError, PagesExhausted
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.runtime.page_table import PageTable
from paged_trt.runtime.registry import PageRegistry

POOL = KvPoolSpec(num_pages=9, max_batch_size=3, max_kv_cache_capacity=384)
SETTINGS = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

# The first failure will do: no shrinking, no second bug.
BUG_SETTINGS = settings(
    SETTINGS, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False
)


class PageMachine(RuleBasedStateMachine):
    """Slots own pages through the registry; a model of plain lists says who owns what."""

    registry_type: type[PageRegistry] = PageRegistry
    table_type: type[PageTable] = PageTable

    def __init__(self) -> None:
        super().__init__()
        self.registry = self.registry_type(POOL)
        self.table = self.table_type(POOL)
        self.rows: dict[int, list[int]] = {slot: [] for slot in range(POOL.max_batch_size)}
        self.hogged: list[int] = []

    @rule(slot=st.integers(0, 2), count=st.integers(0, 4))
    def grow(self, slot: int, count: int) -> None:
        free = self.registry.num_free
        if count > free:
            with pytest.raises(PagesExhausted) as caught:
                self.registry.allocate(count)
            assert (caught.value.wanted, caught.value.free) == (count, free)
            return
        pages = self.registry.allocate(count)
        grown = [*self.rows[slot], *pages]
        try:
            self.table.commit({slot: grown})
        except KvPoolError:
            assert len(grown) > POOL.max_pages_per_seq
            self.registry.release(pages)
        else:
            self.rows[slot] = grown

    @rule(count=st.integers(0, 5))
    def hog(self, count: int) -> None:
        if count <= self.registry.num_free:
            self.hogged += self.registry.allocate(count)

    @rule()
    def unhog(self) -> None:
        self.registry.release(self.hogged)
        self.hogged = []

    @rule(slot=st.integers(0, 2))
    def release(self, slot: int) -> None:
        self.table.clear(slot)
        self.registry.release(self.rows[slot])
        self.rows[slot] = []

    @rule(slot=st.integers(0, 2))
    @precondition(lambda self: any(self.rows.values()))
    def release_twice(self, slot: int) -> None:
        pages = self.rows[slot]
        if pages:
            with pytest.raises(KvPoolError):
                self.registry.release([*pages, pages[0]])

    @rule(slot=st.integers(0, 2), other=st.integers(0, 2))
    def move(self, slot: int, other: int) -> None:
        if self.rows[other]:
            with pytest.raises(KvPoolError):
                self.table.move(slot, other)
            return
        self.table.move(slot, other)
        self.rows[other], self.rows[slot] = self.rows[slot], self.rows[other]

    @rule(slot=st.integers(0, 2), other=st.integers(0, 2))
    def steal(self, slot: int, other: int) -> None:
        if slot != other and self.rows[slot]:
            with pytest.raises(KvPoolError):
                self.table.commit({other: self.rows[slot]})

    @invariant()
    def pages_are_conserved(self) -> None:
        owned = [*self.hogged, *(page for row in self.rows.values() for page in row)]
        assert len(set(owned)) == len(owned)
        assert self.registry.num_used == len(owned)
        assert self.registry.num_free + len(owned) == POOL.num_pages
        self.registry.check()

    @invariant()
    def the_table_says_the_same(self) -> None:
        for slot, row in self.rows.items():
            assert list(self.table.row(slot)) == row


def test_pages_are_never_owned_twice() -> None:
    run_state_machine_as_test(PageMachine, settings=SETTINGS)


class PartialAllocation(PageRegistry):
    """Takes what is there before it fails."""

    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            super().allocate(self.num_free)
        return super().allocate(count)


class DoubleFree(PageRegistry):
    """Frees a page as often as it is told to."""

    def release(self, page_ids: Iterable[int]) -> None:
        for page_id in page_ids:
            self._references.pop(page_id, None)
            self._empty.append(page_id)


class LeakOfOne(PageRegistry):
    """Forgets the last page of a release."""

    def release(self, page_ids: Iterable[int]) -> None:
        super().release(list(page_ids)[:-1])


class HalfCommit(PageTable):
    """Writes before it checks."""

    def commit(self, rows: Any, **options: Any) -> None:
        for slot, pages in rows.items():
            self._write(slot, pages[: self._ids.shape[1]])
        super().commit(rows, **options)


@pytest.mark.parametrize("bug", [PartialAllocation, DoubleFree, LeakOfOne, HalfCommit])
def test_the_machine_sees_a_bug(bug: type[Any]) -> None:
    part = "registry_type" if issubclass(bug, PageRegistry) else "table_type"
    machine = type("Buggy", (PageMachine,), {part: bug})
    with pytest.raises((AssertionError, KvPoolError, IndexError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=BUG_SETTINGS)
