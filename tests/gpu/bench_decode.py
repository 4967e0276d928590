"""Times the decode kernels: CUDA-graph replay, median, KV sets of 180 MB and more in turn.

python tests/gpu/bench_decode.py [--append] [--programmatic]

    `--append` times the append too; `--programmatic` lets a kernel start before the one ahead has
    ended.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.decode_cases import Case, Inputs, make_inputs
from gpu.decode_device import DecodeStep

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.candidates import decode_candidates
from paged_trt.plugins.launch.plans import Direct
from paged_trt.plugins.launch.registry import KernelPath

BF16, FP8 = DType.BFLOAT16, DType.FLOAT8
CELLS = [
    (BF16, 1, 1024),
    (BF16, 1, 4096),
    (BF16, 1, 16384),
    (BF16, 8, 1024),
    (BF16, 8, 4096),
    (BF16, 32, 1024),
    (BF16, 32, 4096),
    (FP8, 1, 16384),
    (FP8, 8, 4096),
    (FP8, 32, 4096),
]
NUM_KV_HEADS, HEAD_DIM, GROUP = 8, 128, 4
BYTES_IN_TURN = 180_000_000
REPLAYS = 7


def device_pools(kv: DType, num_pages: int) -> dict[str, Any]:
    """Random pools, made on the device."""
    import torch

    dtype = torch.float8_e4m3fn if kv is FP8 else torch.bfloat16
    shape = (num_pages, NUM_KV_HEADS, 128, HEAD_DIM)
    return {
        name: torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype).view(torch.uint8)
        for name in ("key_pool", "value_pool")
    }


def sets_of(kv: DType, batch: int, context: int) -> list[tuple[Case, Inputs]]:
    """Steps that read different pages of one pool of random order."""
    lengths = (1,) * batch  # the pools are made on the device: no past to fill in here
    case = Case(
        kv=kv,
        num_kv_heads=NUM_KV_HEADS,
        group=GROUP,
        head_dim=HEAD_DIM,
        lengths=lengths,
        padding_rows=0,
    )
    pages = context // 128
    kv_bytes = 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * kv.itemsize
    count = max(1, -(-BYTES_IN_TURN // kv_bytes))
    order = np.random.default_rng(0).permutation(count * batch * pages).astype(np.int32)
    base = make_inputs(case)
    base["past_lens"] = np.full(batch, context - 1, np.int32)
    return [(case, {**base, "page_table": table}) for table in order.reshape(count, batch, pages)]


def graph_microseconds(steps: list[DecodeStep], paths: tuple[KernelPath, ...]) -> float:
    """Median time of one step."""
    import torch

    repeats = max(1, 100 // len(steps))
    for step in steps:
        step.launch(*paths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for step in steps:
                step.launch(*paths)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (repeats * len(steps)))
    return statistics.median(times[2:])


def bench_cell(kv: DType, batch: int, context: int, *, with_append: bool) -> None:
    sets = sets_of(kv, batch, context)
    pools = device_pools(kv, len(sets) * batch * (context // 128))
    kv_bytes = 2 * batch * context * NUM_KV_HEADS * HEAD_DIM * kv.itemsize
    results = []
    for plan in decode_candidates(DecodeStep(*sets[0], Direct(), pools).request):
        steps = [DecodeStep(case, inputs, plan, pools) for case, inputs in sets]
        for step in steps:
            step.is_programmatic = "--programmatic" in sys.argv
            step.workspace.zero_()  # what the append does before each step
        paths = steps[0].attention_paths
        if with_append:
            paths = (KernelPath.APPEND, *paths)
        results.append((graph_microseconds(steps, paths), str(plan)))
    results.sort()
    time, plan_name = results[0]
    rest = "  ".join(f"{name} {other:.2f}" for other, name in results[1:])
    rate = kv_bytes / time / 1000
    print(  # noqa: T201
        f"{kv.value:9} {batch:3} x {context:5}: {time:8.2f} us {rate:6.0f} GB/s  {plan_name}"
        f"   | {rest}",
        flush=True,
    )


def main() -> None:
    for cell in CELLS:
        bench_cell(*cell, with_append="--append" in sys.argv)


if __name__ == "__main__":
    main()
