"""Keys and values of sequences in the order of their tokens, gathered from the pools.

Raw pools are no good for a comparison: pages that no sequence owns hold anything. What a step
has written and can read is the same for every executor, whatever its page ids and types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY
from paged_trt.plugins.tensors import (
    EngineSpec,
    LogitsMode,
    key_pool_name,
    kv_scales_name,
    value_pool_name,
)
from paged_trt.runtime.executor import Executor, StepInputs

Array = npt.NDArray[Any]
_POISON: Final = {DType.INT8: 0x7F}
"""int8 has no NaN: its largest number, which no neighbour of a real one is."""
_NOT_A_NUMBER: Final = 0xFF
"""Every byte of a NaN in float16, bfloat16 and float8."""


class PagedExecutor(Executor, Protocol):
    """An executor whose pools can be read and filled: for checks, not for decoding."""

    @property
    def kv_scales(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Scales input name -> `[2, num_kv_heads]` float32; empty unless quantised."""
        ...

    @property
    def gives_layer_outputs(self) -> bool:
        """Whether `read_layer_outputs` has something to give."""
        ...

    def read_layer_outputs(self) -> list[Array]:
        """Attention outputs of the last step, `[T, num_q_heads, value_head_dim]` by layer."""
        ...

    def read_pages(self, name: str, pages: Sequence[int]) -> Array:
        """Pages of the pool input `name`, `[len(pages), num_kv_heads, 128, head_dim]`."""
        ...

    def fill_pools(self, byte: int) -> None:
        """Set every byte of every pool."""
        ...


def key_name(layer: int) -> str:
    """Name of the gathered keys of `layer` in a comparison."""
    return f"key.{layer}"


def value_name(layer: int) -> str:
    """Name of the gathered values of `layer` in a comparison."""
    return f"value.{layer}"


def gathered_dtype(spec: EngineSpec) -> DType:
    """Type of gathered keys and values: float16 as it is, all others as float32.

    NumPy has no bfloat16 and no float8, and float32 holds each of their values.
    """
    return DType.FLOAT16 if spec.kv_cache_dtype is DType.FLOAT16 else DType.FLOAT32


def poison_byte(dtype: DType) -> int:
    """The byte that fills pages nobody wrote, so that reading one shows."""
    return _POISON.get(dtype, _NOT_A_NUMBER)


def gather_kv(pools: PagedExecutor, inputs: StepInputs) -> dict[str, Array]:
    """Keys and values of all sequence rows after a step.

    Args:
        pools: an executor that has run the step.
        inputs: of the step, N sequence rows and page-table width M.

    Returns:
        `key.{i}` and `value.{i}` of each layer, `[N, num_kv_heads, M * 128, head_dim]` in
        `gathered_dtype`, dequantised; 0 behind the last token of a sequence.
    """
    spec, table = pools.spec, inputs.page_table
    lengths = inputs.past_lens + np.diff(inputs.query_start_offsets)
    pages = np.unique(table[table != UNUSED_PAGE_ENTRY])
    # An unused entry may take any page: its positions are behind the end.
    index = np.searchsorted(pages, np.maximum(table, pages[0]))
    gathered = {}
    for layer in range(len(spec.layers)):
        scales = pools.kv_scales.get(kv_scales_name(layer))
        sides = ((key_name, key_pool_name), (value_name, value_pool_name))
        for side, (output, pool) in enumerate(sides):
            tiles = pools.read_pages(pool(layer), pages.tolist()).astype(np.float32)
            if scales is not None:
                tiles *= scales[side][:, None, None]
            gathered[output(layer)] = _in_order(tiles, index, lengths).astype(
                gathered_dtype(spec).numpy
            )
    return gathered


def _in_order(tiles: Array, index: Array, lengths: Array) -> Array:
    """Tiles `[pages, H, 128, D]` as rows `[N, H, M * 128, D]` that end with their tokens."""
    num_seqs, heads, head_dim = len(index), tiles.shape[1], tiles.shape[-1]
    rows = tiles[index].transpose(0, 2, 1, 3, 4).reshape(num_seqs, heads, -1, head_dim)
    is_token = np.arange(rows.shape[2]) < lengths[:, None]
    return np.where(is_token[:, None, :, None], rows, np.float32(0))


def last_logits(spec: EngineSpec, logits: Array, inputs: StepInputs) -> npt.NDArray[np.float32]:
    """Logits of the last token of each sequence row, `[N, vocab_size]`; 0 for padding rows."""
    offsets = inputs.query_start_offsets
    if spec.logits_mode is LogitsMode.ALL:
        logits = logits[offsets[1:] - 1]
    is_real = np.diff(offsets) > 0
    return np.where(is_real[:, None], logits, 0).astype(np.float32)
