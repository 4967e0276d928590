"""The orders that racecheck is asked about on a device compile, and are what they are called."""

from __future__ import annotations

import pytest
from gpu.racecheck import orders

pytest.importorskip("cuda.core", reason="cuda-core is not installed")


def test_every_order_is_a_kernel() -> None:
    cubin = orders.compile_orders()
    assert cubin.code.startswith(b"\x7fELF")
    names = {cubin.names[orders.name_of(order)] for order in orders.ORDERS + orders.RACES}
    assert len(names) == len(orders.ORDERS) + len(orders.RACES)
    for freed, awaited, filled in orders.ORDERS + orders.RACES:
        assert any(all(part in name for part in (freed, awaited, filled)) for name in names)


def test_expected_sums_are_those_of_the_loops() -> None:
    """As `use` in orders.cu reads: chunks of four words, of what each lane stored."""
    words = [word % 32 for word in range(512)]
    for lane in range(32):
        own = [4 * chunk + word for chunk in range(lane, 128, 32) for word in range(4)]
        wanted = sum(step + words[word] for step in range(orders.ROUNDS) for word in own)
        assert orders.expected_sums()[1, 32 + lane] == wanted
