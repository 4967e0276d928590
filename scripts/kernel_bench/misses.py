"""Cells that a sweep looks at: those that missed a target in the last run, and some beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.kernel_bench.cells import Cell, Family, cells_of

DECODE_MISSES: Final = (
    # Few keys: a step is a chain of latencies. Of 20 us the bytes take 15. 128 of 132
    # multiprocessors work.
    "32/8 d128 bfloat16 1 x 1024",
    "32/8 d128 bfloat16 1 x 4096",
    "32/8 d128 bfloat16 1 x 16384",
    # One wave of 256 of 264 blocks; its first loads and its merges are hidden by nothing.
    "32/8 d128 bfloat16 32 x 1024",
    "32/8 d128 bfloat16 32 x 4096",
    # 64 columns of keys: `balanced` cuts them, `cluster:2` fills 128 of 132 multiprocessors.
    "32/8 d128 bfloat16 8 x 16384",
    # Not cut, so one wave of 256 blocks that all last as long as the slowest; `direct`, which needs
    # no schedule, is 0.7% faster.
    "32/8 d128 bfloat16 32 x 16384",
    # Four waves of blocks, each with a start and a merge of its own (128 x 1024: one part in ten).
    "32/8 d128 bfloat16 128 x 1024",
    "32/8 d128 bfloat16 128 x 16384",
    # Half the bytes of bfloat16 and the same starts and merges, so they count twice.
    "32/8 d128 float8 1 x 16384",
    "32/8 d128 float8 32 x 4096",
    "32/8 d128 float8 32 x 16384",
    # Many value elements of partials: a merge kernel has 32 blocks for those of the first, and the
    # second has too few for one by the planner's bound.
    "32/8 d256 bfloat16 1 x 16384",
    "32/8 d256 bfloat16 8 x 4096",
    # Sixteen waves of short blocks.
    "32/32 d128 bfloat16 128 x 1024",
    "32/32 d128 bfloat16 8 x 16384",
    "64/8 d128 bfloat16 1 x 4096",
    "64/8 d128 bfloat16 1 x 16384",
    # 32 partials: a merge kernel has them. 16 are 6% faster for the first.
    "28/4 d128 bfloat16 1 x 4096",
    "16/2 d128 bfloat16 1 x 4096",
    "32/8 d64 bfloat16 32 x 16384",
    "32/8 d128 bfloat16 8 x 16384 window 4096",
)
"""By what `str` says of a cell, with what sweeps and profiles of an H200 showed; the ragged batches
come on top."""
LEAST_APPEND: Final = 128
"""New tokens below which an append is a matter of latency."""


def missed_cells(family: Family) -> list[Cell]:
    """Cells of decode or append that a sweep looks at, in the order to run them."""
    every = cells_of(family, quick=False)
    if family is Family.APPEND:
        return [cell for cell in every if sum(cell.sizes.query_lens) >= LEAST_APPEND]
    ragged = [cell for cell in every if not cell.is_even]
    return [*named_cells(family, DECODE_MISSES), *ragged]


def named_cells(family: Family, names: Sequence[str]) -> list[Cell]:
    """Cells by what `str` says of them, in the order of the names.

    Raises:
        ConfigError: the benchmark has no cell of a name.
    """
    by_name = {str(cell): cell for cell in cells_of(family, quick=False)}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(
            f"the benchmark has no {family.value} cell `{unknown[0]}`; "
            f"`paged-trt bench kernels --list` names its {len(by_name)}"
        )
    return [by_name[name] for name in names]
