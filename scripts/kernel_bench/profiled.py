"""Cells that a profile looks at: those that miss a target, and a good one of each family."""

from __future__ import annotations

from typing import Final

from paged_trt.scripts.kernel_bench.cells import Cell, Family, cells_of
from paged_trt.scripts.kernel_bench.misses import named_cells

PROFILED: Final[dict[Family, tuple[str, ...]]] = {
    Family.DECODE: (
        # The reference: a cell that meets its target.
        "32/8 d128 bfloat16 8 x 4096",
        "32/8 d128 bfloat16 1 x 16384",
        "32/8 d128 bfloat16 32 x 1024",
        "64/8 d128 bfloat16 1 x 4096",
        "32/8 d128 float8 32 x 4096",
        "32/8 d256 bfloat16 1 x 16384",
        "32/8 d128 float8 32 x 16384",
        "32/8 d128 bfloat16 32 x 16384",
        "32/8 d128 bfloat16 32 x 65536",
        "32/8 d128 bfloat16 128 x 16384",
    ),
    Family.PREFILL: (
        "32/8 d128 bfloat16 1 x 8192 on 8192",
        "32/8 d128 bfloat16 1 x 1024 on 1024",
        "32/8 d128 bfloat16 4 x 4096 on 4096",
        "32/8 d128 bfloat16 1 x 2048 on 32768",
        "32/8 d128 bfloat16 16 x 512 on 512",
        "32/8 d128 bfloat16 16 x 1024 on 1024",
        "32/8 d128 bfloat16 8 x 2048 on 2048",
        "32/8 d128 bfloat16 2 x 4096 on 4096",
        "64/8 d128 bfloat16 1 x 16384 on 16384",
        "32/32 d128 bfloat16 1 x 8192 on 8192",
        "32/8 d64 bfloat16 1 x 8192 on 8192",
    ),
    Family.APPEND: (
        "32/8 d128 bfloat16 1 x 4096 on 4096",
        "32/8 d128 bfloat16 4 x 8192 on 8192",
        "32/32 d128 bfloat16 128 x 1 on 4096",
        "32/8 d128 bfloat16 4 x 8192 on 8192 rope",
    ),
}
"""By what `str` says of a cell, the reference first; the first ragged decode comes on top."""
PROFILED_PEERS: Final[dict[Family, tuple[str, ...]]] = {
    Family.DECODE: (),
    Family.PREFILL: ("FlashAttention-3",),
    Family.APPEND: ("FlashInfer",),
}
"""Other libraries that are profiled beside ours: the one whose time the target is made of."""
SMALL_BYTES: Final = 2**30


def profiled_cells(family: Family) -> list[Cell]:
    """Cells of a family that a profile looks at, in the order to run them."""
    found = named_cells(family, PROFILED[family])
    if family is Family.DECODE:
        found.append(next(cell for cell in cells_of(family, quick=False) if not cell.is_even))
    return found


def by_pool(cells: list[Cell]) -> list[list[Cell]]:
    """Cells in groups that share a pool: the small ones, then each large one alone, by size.

    A profiler saves all memory of the process before it replays a kernel: a pool for the largest
    cell would make every other one as slow.
    """

    def size(cell: Cell) -> int:
        return cell.sizes.kv_bytes(cell.attention, cell.kv)

    small = [cell for cell in cells if size(cell) <= SMALL_BYTES]
    large = sorted((cell for cell in cells if size(cell) > SMALL_BYTES), key=size)
    return [group for group in (small, *([cell] for cell in large)) if group]
