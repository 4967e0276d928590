"""Times the prefill kernel: CUDA-graph replay, median, random page order.

python tests/gpu/bench_prefill.py [--tiles] [--kv float8] [--head-dim 128] [--heads 32/8]

`--tiles` also times other tiles than the table's, to settle what the table says.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.decode_cases import Case, Inputs, make_inputs
from gpu.prefill_device import PrefillStep

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.kernels_prefill import PrefillTile, prefill_tile

# Sequences, new tokens of each, tokens of each after the step.
CELLS = [
    (1, 1024, 1024),
    (1, 8192, 8192),
    (4, 4096, 4096),
    (1, 2048, 32768),
    (4, 512, 8192),
    (1, 32768, 32768),
]
OTHER_TILES = [
    PrefillTile(rows=128, tokens=64, warps=4, stages=1),
    PrefillTile(rows=128, tokens=64, warps=4, stages=2),
    PrefillTile(rows=128, tokens=32, warps=4, stages=4),
    PrefillTile(rows=128, tokens=64, warps=8, stages=2),
    PrefillTile(rows=128, tokens=128, warps=8, stages=1),
    PrefillTile(rows=64, tokens=64, warps=4, stages=1),
    PrefillTile(rows=64, tokens=64, warps=4, stages=2),
]
MAX_SHARED_BYTES = 227 * 1024
REPLAYS = 7


def random_pools(case: Case, num_pages: int) -> dict[str, Any]:
    """Random pools, made on the device."""
    import torch

    attention = case.attention
    pools = {}
    dims = {"key_pool": attention.head_dim, "value_pool": attention.value_head_dim}
    for name, dim in dims.items():
        shape = (num_pages, case.num_kv_heads, 128, dim)
        numbers = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        if case.kv is DType.INT8:
            numbers = numbers * 40
        dtypes = {
            DType.BFLOAT16: torch.bfloat16,
            DType.FLOAT16: torch.float16,
            DType.FLOAT8: torch.float8_e4m3fn,
            DType.INT8: torch.int8,
        }
        pools[name] = numbers.to(dtypes[case.kv]).view(torch.uint8)
    return pools


def cell_inputs(case: Case, batch: int, query: int, context: int) -> Inputs:
    """A step whose pages lie in random order in pools that are made elsewhere."""
    inputs = make_inputs(case)
    pages = -(-context // 128)
    order = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    inputs["page_table"] = order.reshape(batch, pages)
    inputs["past_lens"] = np.full(batch, context - query, np.int32)
    return inputs


def graph_microseconds(step: PrefillStep, repeats: int) -> float:
    """Median time of one launch."""
    import torch

    step.prefill()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            step.prefill()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times[2:])


def tiles_of(step: PrefillStep, others: bool) -> Iterator[PrefillTile]:
    yield prefill_tile(step.key)
    for tile in OTHER_TILES if others else ():
        is_wide = step.case.attention.value_head_dim > 128
        fits = tile.shared_bytes(step.key) < MAX_SHARED_BYTES
        if fits and not (is_wide and tile.rows > tile.warps * 16):
            yield tile


def bench_cell(case: Case, batch: int, query: int, context: int, *, others: bool) -> None:
    attention = case.attention
    pools = random_pools(case, batch * -(-context // 128))
    inputs = cell_inputs(case, batch, query, context)
    past = context - query
    pairs = batch * (query * past + query * (query + 1) // 2)
    dims = attention.head_dim + attention.value_head_dim
    operations = 2 * attention.num_q_heads * pairs * dims
    for tile in tiles_of(PrefillStep(case, inputs, pools), others):
        step = PrefillStep(case, inputs, pools, tile)
        time = graph_microseconds(step, max(1, int(2e12 / operations)))
        print(  # noqa: T201
            f"{case.kv.value:9} {batch} x {query:5} on {context:5}: {time:9.1f} us "
            f"{operations / time / 1e6:6.0f} TFLOP/s  {tile.rows}x{tile.tokens}, "
            f"{tile.warps} warps, {tile.stages} stages",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--kv", default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", default="32/8")
    options = parser.parse_args()
    q_heads, kv_heads = map(int, options.heads.split("/"))
    for batch, query, context in CELLS:
        case = Case(
            kv=DType(options.kv),
            num_kv_heads=kv_heads,
            group=q_heads // kv_heads,
            head_dim=options.head_dim,
            lengths=(query,) * batch,
            new_tokens=(query,) * batch,
            padding_rows=0,
        )
        bench_cell(case, batch, query, context, others=options.tiles)


if __name__ == "__main__":
    main()
