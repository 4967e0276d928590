"""Other libraries on the cells, in the same process: FlashInfer, XQA, FlashAttention-3, cuDNN.

None of them is a dependency: those that can be imported take part. Their pages hold the same
bytes as ours, read as `[num_pages, 128, num_kv_heads, head_dim]`, which is the layout that all
of them take; sizes, page order and turns are those of our own launches.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import PagedTrtError
from paged_trt.plugins.kv import TOKENS_PER_PAGE, tokens_in_last_page
from paged_trt.plugins.launch.step_sizes import pool_spec
from paged_trt.plugins.launch.trial import Trial
from paged_trt.plugins.launch.trial_memory import TrialMemory, pool_scale
from paged_trt.plugins.timing import Call
from paged_trt.scripts.kernel_bench.cells import Cell, Family

CHECKED_QUERIES: Final = 256


class PeerError(PagedTrtError):
    """A cell that is none for a library; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerCalls:
    """A library on a cell.

    Attributes:
        calls: one per page table.
        output: from nothing to `[T, Hq, Dv]` of the call that ran last.
    """

    calls: list[Call]
    output: Callable[[], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerData:
    """Tensors of one cell, on the device.

    Attributes:
        torch: the module.
        cell: the shape.
        keys: `[num_pages, 128, Hkv, D]`.
        values: likewise.
        tables: `[num_sets, N, M]` int32; 0 behind the pages of a sequence.
        query: `[T, Hq, D]` bfloat16.
        out: likewise, for libraries that write into a given tensor.
        scale: what stored keys and values are multiplied by.
    """

    torch: Any
    cell: Cell
    keys: Any
    values: Any
    tables: Any
    query: Any
    out: Any
    scale: float = 1.0

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.cell.sizes.kv_lens)

    @property
    def max_keys(self) -> int:
        """Keys of the longest sequence."""
        return max(self.cell.sizes.kv_lens)

    @property
    def lengths(self) -> Any:
        """Keys of each sequence, `[N]` int32 on the device."""
        return self.ints(self.cell.sizes.kv_lens)

    @property
    def window_left(self) -> int:
        """Visible keys before a query's own, -1 for all."""
        return -1 if self.cell.window == FULL_WINDOW else self.cell.window - 1

    def ints(self, values: Sequence[int]) -> Any:
        """`[len(values)]` int32 on the device."""
        return self.torch.tensor(list(values), dtype=self.torch.int32, device=self.query.device)

    def page_indices(self) -> tuple[Any, Any, list[Any]]:
        """FlashInfer's page table.

        Returns:
            `[N + 1]` offsets and `[N]` tokens of last pages, on the host, and the page ids of
            each turn, on the device.
        """
        counts = self.cell.sizes.page_counts
        torch = self.torch
        offsets = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
        last = [tokens_in_last_page(keys) for keys in self.cell.sizes.kv_lens]
        width = self.tables.shape[2]
        is_used = torch.arange(width, device=self.query.device)[None] < self.ints(counts)[:, None]
        ids = [table[is_used].contiguous() for table in self.tables]
        return offsets, torch.tensor(last, dtype=torch.int32), ids


class Peer(Protocol):
    """One library, or one kernel family of it."""

    name: str
    version: str
    families: frozenset[Family]

    def prepare(self, data: PeerData) -> PeerCalls:
        """Plan, allocate and give the calls.

        Raises:
            Exception: whatever the library raises where it does not support the cell.
        """


@functools.cache
def optional(name: str) -> Any:
    """A module; None where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception:  # a wheel for another torch or driver fails in its own ways
        return None


def prepare_environment(folder: Path) -> None:
    """Settings that FlashInfer reads at import: build nothing, write into `folder`.

    Where its own modules were compiled ahead of time they are found in the package.
    """
    settings = {
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_LOGGING_LEVEL": "error",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def make_data(graphs: Any, memory: TrialMemory, cell: Cell, tables: np.ndarray) -> PeerData:
    """The tensors of a cell, over the memory of our own trials.

    Args:
        graphs: `TorchGraphs`.
        memory: filled with numbers of the cell's type.
        cell: the shape.
        tables: page tables of our own trial, `[num_sets, N, M]` int32.
    """
    torch = graphs.torch
    dtype = {
        DType.BFLOAT16: torch.bfloat16,
        DType.FLOAT8: torch.float8_e4m3fn,
        DType.INT8: torch.int8,
    }[cell.kv]
    heads, dim = cell.heads[1], cell.head_dim
    pool = pool_spec(memory.pool_bytes, cell.attention, cell.kv)
    shape = (pool.num_pages, TOKENS_PER_PAGE, heads, dim)
    size = int(np.prod(shape)) * cell.kv.itemsize
    keys, values = (
        torch.as_tensor(_DeviceBytes(address, size), device="cuda").view(dtype).view(shape)
        for address in memory.pools
    )
    tokens = sum(cell.sizes.query_lens)
    query = torch.randn(tokens, cell.heads[0], dim, device="cuda", dtype=torch.bfloat16)
    return PeerData(
        torch=torch,
        cell=cell,
        keys=keys,
        values=values,
        tables=torch.from_numpy(np.maximum(tables, 0)).cuda(),
        query=query,
        out=torch.empty_like(query),
    )


class _DeviceBytes:
    """Memory that torch does not own, in the form that it reads."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def our_data(graphs: Any, memory: TrialMemory, cell: Cell, trial: Trial) -> PeerData:
    """Our own trial in the form that `relative_error` reads."""
    torch = graphs.torch
    data = make_data(graphs, memory, cell, trial.tables)
    count = int(np.prod(data.query.shape))

    def tensor(address: int) -> Any:
        raw = torch.as_tensor(_DeviceBytes(address, count * 2), device="cuda")
        return raw.view(torch.bfloat16).view(data.query.shape)

    def transposed(pool: Any) -> Any:
        pages, tokens, heads, dim = pool.shape
        return pool.view(pages, heads, tokens, dim).permute(0, 2, 1, 3)

    return dataclasses.replace(
        data,
        keys=transposed(data.keys),
        values=transposed(data.values),
        query=tensor(trial.query),
        out=tensor(trial.output),
        scale=pool_scale(cell.kv),
    )


def relative_error(data: PeerData, output: Any, *, turn: int) -> float:
    """Norm of the error over the norm of the result, against float32 over the same bytes.

    Args:
        data: of the cell.
        output: `[T, Hq, D]`; of each sequence its last CHECKED_QUERIES rows count.
        turn: the page table.
    """
    torch, end = data.torch, 0
    rows, expected = [], []
    sizes = zip(data.cell.sizes.query_lens, data.cell.sizes.kv_lens, strict=True)
    for index, (new, keys) in enumerate(sizes):
        end += new
        count = min(new, CHECKED_QUERIES)
        expected.append(_attend(data, turn, index, slice(end - count, end), keys))
        rows.append(output[end - count : end].float())
    wanted = torch.cat(expected)
    return float((torch.cat(rows) - wanted).norm() / wanted.norm())


def _attend(data: PeerData, turn: int, sequence: int, rows: slice, keys: int) -> Any:
    """Float32 attention of the last queries of one sequence, `[rows, Hq, D]`."""
    torch, cell = data.torch, data.cell
    pages = data.tables[turn, sequence, : cell.sizes.page_counts[sequence]].long()
    key, value = (
        (_pages(pool, pages, torch)[:keys] * data.scale).repeat_interleave(
            cell.heads[0] // cell.heads[1], 1
        )
        for pool in (data.keys, data.values)
    )
    query = data.query[rows].float()
    scores = torch.einsum("qhd,khd->hqk", query, key) * cell.attention.softmax_scale
    last = torch.arange(keys - query.shape[0], keys, device=query.device)[:, None]
    place = torch.arange(keys, device=query.device)[None]
    hidden = place > last
    if cell.window != FULL_WINDOW:
        hidden |= place <= last - cell.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _pages(pool: Any, pages: Any, torch: Any) -> Any:
    """Tokens of pages as float32, `[tokens, Hkv, D]`."""
    # Not every type can be indexed; its bytes can.
    raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
    return raw[pages].contiguous().view(pool.dtype).float().flatten(0, 1)
