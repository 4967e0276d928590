"""What a decode cell should give, from the bytes that its trial reads; no other library needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.kv import pages_for_tokens, tokens_in_pages
from paged_trt.plugins.launch.trial import Trial
from paged_trt.plugins.launch.trial_memory import TrialMemory, pool_scale
from paged_trt.scripts.kernel_bench.cells import BF16, Cell

Array = npt.NDArray[Any]


def output_of(memory: TrialMemory, cell: Cell, trial: Trial) -> Array:
    """What the last launch of a decode left, `[N, Hq, Dv]` float32."""
    attention, batch = cell.attention, len(cell.sizes.kv_lens)
    return _numbers(memory, trial.output, (batch, attention.num_q_heads, attention.value_head_dim))


def expected_of(memory: TrialMemory, cell: Cell, trial: Trial, sequence: int) -> Array:
    """Attention of one sequence under a trial's first page table, `[Hq, Dv]`, in float32."""
    attention, keys = cell.attention, cell.sizes.kv_lens[sequence]
    query_bytes = attention.num_q_heads * attention.head_dim * BF16.itemsize
    query = _numbers(
        memory,
        trial.query + sequence * query_bytes,
        (attention.num_kv_heads, attention.group_size, attention.head_dim),
    )
    pages = trial.tables[0][sequence][: pages_for_tokens(keys)]
    dims = (attention.head_dim, attention.value_head_dim)
    key, value = (
        _rows(memory, cell, pool, pages, dim)[:, :keys]
        for pool, dim in zip(memory.pools, dims, strict=True)
    )
    if cell.window != FULL_WINDOW:
        key, value = key[:, -cell.window :], value[:, -cell.window :]
    scores = query @ key.transpose(0, 2, 1) * np.float32(attention.softmax_scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: Array = weights @ value / weights.sum(axis=-1, keepdims=True)
    return found.reshape(attention.num_q_heads, attention.value_head_dim)


def relative_difference(found: Array, wanted: Array) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def page_bytes_of(cell: Cell, dim: int) -> int:
    """Bytes of one page of keys or values of that head dim, all heads."""
    return cell.attention.num_kv_heads * tokens_in_pages(1) * dim * cell.kv.itemsize


def _rows(memory: TrialMemory, cell: Cell, pool: int, pages: Array, dim: int) -> Array:
    """Keys or values of a sequence, `[Hkv, tokens, dim]` float32."""
    heads, page_bytes = cell.attention.num_kv_heads, page_bytes_of(cell, dim)
    raw = [memory.download(pool + int(page) * page_bytes, page_bytes) for page in pages]
    tiles = np.stack(raw).view(cell.kv.numpy).reshape(len(pages), heads, -1, dim)
    numbers: Array = tiles.astype(np.float32) * np.float32(pool_scale(cell.kv))
    return numbers.transpose(1, 0, 2, 3).reshape(heads, -1, dim)


def _numbers(memory: TrialMemory, address: int, shape: tuple[int, ...]) -> Array:
    raw = memory.download(address, int(np.prod(shape)) * BF16.itemsize)
    found: Array = raw.view(BF16.numpy).reshape(shape).astype(np.float32)
    return found
