"""FlashAttention-3 from pages."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.scripts.kernel_bench.cells import Family
from paged_trt.scripts.kernel_bench.peers import Peer, PeerCalls, PeerData, optional

MODULE = "flash_attn_interface"
DISTRIBUTIONS = ("tokenspeed-fa3", "flash-attn-3", "flash_attn_3")


class FlashAttention3:
    """Decode with scheduler metadata, prefill packed; float8 pools with float8 queries.

    Args:
        version: of the wheel.
    """

    name = "FlashAttention-3"
    families = frozenset({Family.DECODE, Family.PREFILL})

    def __init__(self, version: str) -> None:
        self.version = version

    def prepare(self, data: PeerData) -> PeerCalls:
        """One call per page table."""
        module, cell = optional(MODULE), data.cell
        query = data.query if cell.kv is DType.BFLOAT16 else data.query.to(data.keys.dtype)
        options: dict[str, Any] = {
            "cache_seqlens": data.lengths,
            "causal": True,
            "window_size": (data.window_left, 0) if data.window_left >= 0 else (-1, -1),
            "softmax_scale": cell.attention.softmax_scale,
        }
        if cell.family is Family.DECODE:
            query = query.view(data.batch, 1, *query.shape[1:])
            options["scheduler_metadata"] = module.get_scheduler_metadata(
                data.batch,
                1,
                data.max_keys,
                *cell.heads,
                cell.head_dim,
                data.lengths,
                qkv_dtype=query.dtype,
                page_size=TOKENS_PER_PAGE,
                causal=True,
                window_size=options["window_size"],
            )
        elif cell.is_even:
            query = query.view(data.batch, -1, *query.shape[1:])
        else:
            starts = data.ints([0, *cell.sizes.query_lens]).cumsum(0)
            options |= {"cu_seqlens_q": starts.int(), "max_seqlen_q": max(cell.sizes.query_lens)}
        found: list[Any] = [None]

        def run(table: Any) -> None:
            found[0] = module.flash_attn_with_kvcache(
                query, data.keys, data.values, page_table=table, **options
            )

        def output() -> Any:
            result = found[0][0] if isinstance(found[0], tuple) else found[0]
            return result.reshape(data.query.shape)

        tables = [table.contiguous() for table in data.tables]
        return PeerCalls(calls=[_bound(run, table) for table in tables], output=output)


def flash_attention_peers() -> list[Peer]:
    """FlashAttention-3, where it can be imported."""
    return [] if optional(MODULE) is None else [FlashAttention3(_version())]


def _version() -> str:
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "3"


def _bound(run: Any, argument: Any) -> Any:
    return lambda: run(argument)
