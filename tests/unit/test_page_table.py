import numpy as np
import pytest

from paged_trt.plugins.errors import KvPoolError
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.runtime.page_table import PageTable

POOL = KvPoolSpec(num_pages=8, max_batch_size=2, max_kv_cache_capacity=300)


@pytest.fixture
def table() -> PageTable:
    return PageTable(POOL)


def gathered(table: PageTable, slots: list[int], width: int) -> list[list[int]]:
    out = np.zeros((len(slots), width), np.int32)
    table.gather(slots, out)
    rows: list[list[int]] = out.tolist()
    return rows


def test_rows_start_unused_and_are_replaced_whole(table: PageTable) -> None:
    assert gathered(table, [0, 1], 3) == [[-1, -1, -1], [-1, -1, -1]]
    table.commit({0: [5, 2, 7]})
    table.commit({0: [4], 1: [2, 7]})
    assert gathered(table, [1, 0], 2) == [[2, 7], [4, -1]]
    assert table.row(1) == (2, 7)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({1: [3], 2: [4]}, "slot 2 is outside the table of 2 rows"),
        ({1: [3], 0: [1, 2, 3, 4]}, "4 pages do not fit the row of slot 0, which has 3"),
        ({1: [3], 0: [8]}, "page id 8 of slot 0 is outside the pool of 8 pages"),
        ({1: [3], 0: [4, -1]}, "page id -1 of slot 0 is outside the pool of 8 pages"),
        ({1: [3], 0: [True]}, "page id True of slot 0"),
        ({1: [3], 0: [4, 4]}, "page 4 is twice in the row of slot 0"),
        ({1: [3], 0: [3]}, "page 3 of slot 1 is in 2 rows"),
        ({1: [6]}, "page 6 of slot 1 is in 2 rows"),
    ],
)
def test_a_bad_commit_changes_no_row(
    table: PageTable, rows: dict[int, list[int]], message: str
) -> None:
    table.commit({0: [6], 1: [1]})
    table.take_dirty()
    with pytest.raises(KvPoolError, match=message):
        table.commit(rows)
    assert (table.row(0), table.row(1)) == ((6,), (1,))
    assert not table.take_dirty()


def test_shared_pages_may_be_in_several_rows(table: PageTable) -> None:
    table.commit({0: [6, 1], 1: [6, 2]}, shared={6})
    table.clear(0)
    table.commit({1: [6, 2, 3]})


def test_the_first_entries_of_a_row_may_be_unused(table: PageTable) -> None:
    table.commit({0: [-1, -1, 4], 1: [-1, 2]})
    assert gathered(table, [0, 1], 3) == [[-1, -1, 4], [-1, 2, -1]]
    table.check_row(0, 384, first_page=2)
    with pytest.raises(KvPoolError, match=r"row 0, column 1 .* id -1, outside the pool of 8"):
        table.check_row(0, 384, first_page=1)


def test_rows_may_swap_pages_in_one_commit(table: PageTable) -> None:
    table.commit({0: [1], 1: [2]})
    table.commit({0: [2], 1: [1]})
    assert gathered(table, [0, 1], 1) == [[2], [1]]


def test_dirty_rows_are_told_once(table: PageTable) -> None:
    table.commit({1: [1]})
    assert table.take_dirty() == {1}
    assert not table.take_dirty()
    table.move(1, 0)
    assert table.take_dirty() == {0, 1}


def test_a_row_moves_to_an_empty_slot_only(table: PageTable) -> None:
    table.commit({0: [1, 2], 1: [3]})
    with pytest.raises(KvPoolError, match="slot 0 still holds 2 pages"):
        table.move(1, 0)
    table.clear(0)
    table.move(1, 0)
    assert (table.row(0), table.row(1)) == ((3,), ())


def test_a_needed_page_must_be_there(table: PageTable) -> None:
    table.commit({0: [1, 2]})
    table.check_row(0, 256)
    table.check_row(1, 0)
    with pytest.raises(KvPoolError, match=r"slot 0 needs 3 pages for 257 tokens .* holds 2"):
        table.check_row(0, 257)


@pytest.mark.parametrize("broken", [-1, 8])
def test_a_damaged_entry_is_seen_before_it_is_used(table: PageTable, broken: int) -> None:
    table.commit({0: [1, 2]})
    table._ids[0, 1] = broken
    table.check_row(0, 128)
    with pytest.raises(KvPoolError, match=f"row 0, column 1 .* id {broken}, outside the pool of 8"):
        table.check_row(0, 129)


def test_a_step_cannot_be_wider_than_the_table(table: PageTable) -> None:
    with pytest.raises(KvPoolError, match="width 4 is wider than the table of 3"):
        gathered(table, [0], 4)


def test_identity_fails_closed(table: PageTable) -> None:
    assert not table.is_identity()
    table.set_identity()
    assert table.is_identity()
    assert gathered(table, [0, 1], 3) == [[0, 1, 2], [3, 4, 5]]
    table.commit({1: [3, 4]})
    assert not table.is_identity()
    table.commit({1: [3, 4, 6]})
    assert not table.is_identity()
