"""Times the prefill kernels: CUDA-graph replay after an idle gap, median, random page order.

python tests/gpu/bench_prefill.py [--kernels hopper,portable] [--cells 1x1k,...] [--kv float8]
    [--head-dim 128] [--window -1] [--spread 1] [--tiles] [--suite] [--results FILE]

A step's inputs are made on the device. Kernels take turns within a cell, and each replay of about
8 ms follows an idle gap: these kernels draw all the power that the card may, and without the gap
one kernel's heat sets the clock of the next. `--tiles` also times other tiles of the portable
kernel than its table's. `--suite` times what the results file of prefill holds, instead of what
the other options say: all cells, then one cell with other types, dims and features. `--results`
writes rows of the schema of tests/bench/results, and what they were measured on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.decode_cases import Case, Inputs
from gpu.prefill_device import PrefillStep
from gpu.prefill_sm90_device import PrefillSm90Step

from paged_trt.plugins import cuda
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.kernels_prefill import PrefillTile, prefill_tile

REPLAY_MICROSECONDS = 8000
ROUNDS = 5
GAP_SECONDS = 0.1
MAX_SHARED_BYTES = 227 * 1024
RAGGED = (
    (8192, 0),
    (128, 5000),
    (3000, 100),
    (777, 0),
    (1, 999),
    (4096, 0),
    (250, 60),
    (1500, 2000),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One step: query heads, key heads, and (new tokens, past tokens) of each sequence."""

    name: str
    heads: tuple[int, int] = (32, 8)
    sequences: Sequence[tuple[int, int]]

    def pairs(self, window: int) -> int:
        """(query, key) pairs that the mask leaves."""
        total = 0
        for new, past in self.sequences:
            seen = np.arange(past + 1, past + new + 1)
            total += int((np.minimum(seen, window) if window >= 0 else seen).sum())
        return total


CELLS = (
    Cell(name="1x1k", sequences=[(1024, 0)]),
    Cell(name="1x8k", sequences=[(8192, 0)]),
    Cell(name="4x4k", sequences=[(4096, 0)] * 4),
    Cell(name="1x32k", sequences=[(32768, 0)]),
    Cell(name="2k-on-32k", sequences=[(2048, 30720)]),
    Cell(name="4x512-on-8k", sequences=[(512, 7680)] * 4),
    Cell(name="1x8k-64/8", heads=(64, 8), sequences=[(8192, 0)]),
    Cell(name="1x16k-64/8", heads=(64, 8), sequences=[(16384, 0)]),
    Cell(name="1x8k-32/32", heads=(32, 32), sequences=[(8192, 0)]),
    Cell(name="ragged", sequences=RAGGED),
    Cell(name="1x2k", sequences=[(2048, 0)]),
    Cell(name="2x512", sequences=[(512, 0)] * 2),
    Cell(name="16x1k", sequences=[(1024, 0)] * 16),
    Cell(name="8x2k-40/8", heads=(40, 8), sequences=[(2048, 0)] * 8),
    Cell(name="2x4k-28/4", heads=(28, 4), sequences=[(4096, 0)] * 2),
    Cell(name="16-on-8k", sequences=[(16, 8176)]),
    Cell(name="64-on-8k", sequences=[(64, 8128)]),
    Cell(name="128-on-32k", sequences=[(128, 32640)]),
    Cell(name="256-on-32k", sequences=[(256, 32512)]),
    Cell(name="32-decodes+512", sequences=[(1, 4095)] * 32 + [(512, 0)]),
)
SUITE: tuple[tuple[str, dict[str, Any]], ...] = (
    (",".join(cell.name for cell in CELLS), {"kernels": "hopper"}),
    ("1x1k,1x8k,4x4k,2k-on-32k,64-on-8k", {"kernels": "portable"}),
    ("1x8k", {"kernels": "hopper", "spread": 6.0}),
    ("1x8k,2k-on-32k", {"kernels": "hopper", "spread": 25.0}),
    ("1x8k", {"kernels": "hopper", "rope": 1}),
    ("1x1k", {"kernels": "hopper", "rope": 1}),
    ("1x8k", {"kernels": "hopper", "dtype": "float16"}),
    ("1x8k,4x4k", {"kernels": "hopper", "head_dim": 64}),
    ("1x8k,4x4k", {"kernels": "hopper", "head_dim": 256}),
    ("1x8k", {"kernels": "hopper", "window": 1024}),
    ("1x8k", {"kernels": "hopper", "softcap": 30.0}),
)
"""Names of cells, and options."""
OTHER_TILES = (
    PrefillTile(rows=128, tokens=64, warps=4, stages=1),
    PrefillTile(rows=128, tokens=64, warps=4, stages=2),
    PrefillTile(rows=128, tokens=32, warps=4, stages=4),
    PrefillTile(rows=128, tokens=64, warps=8, stages=2),
    PrefillTile(rows=128, tokens=128, warps=8, stages=1),
    PrefillTile(rows=64, tokens=64, warps=4, stages=1),
    PrefillTile(rows=64, tokens=64, warps=4, stages=2),
)


def make_case(cell: Cell, options: argparse.Namespace) -> Case:
    return Case(
        activation=DType(options.dtype),
        kv=DType(options.kv or options.dtype),
        num_kv_heads=cell.heads[1],
        group=cell.heads[0] // cell.heads[1],
        head_dim=options.head_dim,
        window=options.window,
        rope=options.rope,
        softcap=options.softcap,
        lengths=[new + past for new, past in cell.sequences],
        new_tokens=[new for new, _ in cell.sequences],
        padding_rows=0,
    )


def device_step(case: Case, spread: float) -> tuple[Inputs, dict[str, Any]]:
    """What a step needs on the host, and its operands on the device."""
    import torch

    attention = case.attention
    new = np.array(case.new_tokens)
    pages = [-(-length // 128) for length in case.lengths]
    ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
    table = np.full((len(pages), max(pages)), -1, np.int32)
    for row, count in enumerate(pages):
        table[row, :count], ids = ids[:count], ids[count:]
    tokens = int(new.sum())
    angles = torch.outer(
        torch.arange(max(case.lengths) + 1), 1e4 ** (-torch.arange(attention.head_dim // 2) / 64)
    )
    pool = (sum(pages), case.num_kv_heads, 128)

    def numbers(dtype: DType, *shape: int, factor: float = 1.0) -> Any:
        types = {
            DType.BFLOAT16: torch.bfloat16,
            DType.FLOAT16: torch.float16,
            DType.FLOAT8: torch.float8_e4m3fn,
            DType.INT8: torch.int8,
        }
        made = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * factor
        return (made * 40 if dtype is DType.INT8 else made).to(types[dtype])

    tensors = {
        "query": numbers(
            case.activation, tokens, attention.num_q_heads, case.head_dim, factor=spread
        ),
        "key": numbers(case.activation, 1),
        "value": numbers(case.activation, 1),
        "key_pool": numbers(case.kv, *pool, case.head_dim),
        "value_pool": numbers(case.kv, *pool, attention.value_head_dim),
        "page_table": torch.from_numpy(table),
        "query_start_offsets": torch.from_numpy(np.cumsum([0, *new]).astype(np.int32)),
        "past_lens": torch.from_numpy((np.array(case.lengths) - new).astype(np.int32)),
        "rope_cos_sin": torch.stack([angles.cos(), angles.sin()], dim=1).float(),
        "kv_scales": torch.full((2, case.num_kv_heads), 0.03),
        "sinks": torch.full((attention.num_q_heads,), -torch.inf),
    }
    flat = {
        name: part.cuda().contiguous().view(torch.uint8).view(-1) for name, part in tensors.items()
    }
    return {"query": np.empty((tokens, 0)), "page_table": table}, flat


def make_graph(launch: Callable[[], None], microseconds: float) -> tuple[Any, int]:
    """A graph of so many launches as fill REPLAY_MICROSECONDS."""
    import torch

    launches = max(2, min(100, math.ceil(REPLAY_MICROSECONDS / microseconds)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            launch()
    return graph, launches


def measure(launches: dict[str, Callable[[], None]], microseconds: float) -> dict[str, list[float]]:
    """Microseconds of one launch by name, one number a round."""
    import torch

    graphs = {name: make_graph(launch, microseconds) for name, launch in launches.items()}
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(ROUNDS):
        for name, (graph, count) in graphs.items():
            torch.cuda.synchronize()
            time.sleep(GAP_SECONDS)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launches[name]()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / count)
    return times


def steps_of(case: Case, options: argparse.Namespace) -> dict[str, PrefillStep]:
    inputs, tensors = device_step(case, options.spread)
    steps: dict[str, PrefillStep] = {}
    for kernel in options.kernels.split(","):
        if kernel == "portable":
            steps[kernel] = PrefillStep(case, inputs, tensors)
            continue
        step = steps[kernel] = PrefillSm90Step(case, inputs, tensors)
        if kernel != "hopper":
            step.with_counter(kernel == "counter")
    if options.tiles:
        for tile in OTHER_TILES:
            is_wide = case.attention.value_head_dim > 128
            fits = tile.shared_bytes(PrefillStep(case, inputs, tensors).key) < MAX_SHARED_BYTES
            if fits and not (is_wide and tile.rows > tile.warps * 16):
                steps[tile_name(tile)] = PrefillStep(case, inputs, tensors, tile)
    return steps


def tile_name(tile: PrefillTile) -> str:
    return f"{tile.rows}x{tile.tokens}-{tile.warps}-{tile.stages}"


def plan_of(step: PrefillStep) -> str:
    if isinstance(step, PrefillSm90Step):
        return f"{step.prefill_plan}, {step.prefill_plan.blocks} blocks"
    return tile_name(step.tile or prefill_tile(step.key))


def bench_cell(cell: Cell, options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    case = make_case(cell, options)
    attention = case.attention
    operations = (
        2
        * attention.num_q_heads
        * cell.pairs(case.window)
        * (case.head_dim + attention.value_head_dim)
    )
    steps = steps_of(case, options)
    times = measure({name: step.prefill for name, step in steps.items()}, operations / 500e6 + 5)
    rows = []
    for name, step in steps.items():
        median = statistics.median(times[name])
        rows.append(
            {
                "cell": cell.name,
                "kernel": name,
                "num_q_heads": attention.num_q_heads,
                "num_kv_heads": case.num_kv_heads,
                "head_dim": case.head_dim,
                "value_head_dim": attention.value_head_dim,
                "q_dtype": case.activation.value,
                "kv_dtype": case.kv.value,
                "window": case.window,
                "rope": case.rope,
                "softcap": case.softcap,
                "spread": options.spread,
                "batch": len(cell.sequences),
                "query_lens": list(case.new_tokens),
                "kv_lens": list(case.lengths),
                "flops": operations,
                "ours_us": round(median, 2),
                "ours_us_min": round(min(times[name]), 2),
                "ours_us_max": round(max(times[name]), 2),
                "tflops": round(operations / median / 1e6, 1),
                "plan": plan_of(step),
            }
        )
        print(  # noqa: T201
            f"{cell.name:15} {name:9} {median:9.1f} us ({min(times[name]):.1f} to "
            f"{max(times[name]):.1f}) {operations / median / 1e6:6.0f} TFLOP/s  {plan_of(step)}",
            flush=True,
        )
    del steps
    torch.cuda.empty_cache()
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kernels",
        default="hopper,portable",
        help="hopper as planned, with tiles from a `counter` or `dealt` out; portable",
    )
    parser.add_argument("--cells", default="", help="names, comma-separated; all by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv", default="")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=-1)
    parser.add_argument("--rope", type=int, default=0)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--spread", type=float, default=1.0, help="factor of the queries")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--results", type=Path)
    return parser.parse_args()


def matmul_tflops() -> float:
    """What a bf16 product of 8192^3 reaches here and now."""
    import torch

    matrix = torch.randn(8192, 8192, device="cuda").bfloat16()
    times = measure({"matmul": lambda: torch.matmul(matrix, matrix)}, 1500)["matmul"]
    return round(2 * 8192**3 / statistics.median(times) / 1e6, 1)


def write_results(path: Path, rows: list[dict[str, Any]], matmul: float) -> None:
    import torch

    record = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": cuda.nvrtc_version(),
        "ceilings": {"matmul_TFLOPs": matmul},
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = options.cells.split(",") if options.cells else [cell.name for cell in CELLS]
    return [row for cell in CELLS if cell.name in chosen for row in bench_cell(cell, options)]


def main() -> None:
    options = parse()
    matmul = matmul_tflops()
    print(f"bf16 matmul 8192^3: {matmul} TFLOP/s")  # noqa: T201
    rows = []
    for cells, others in SUITE if options.suite else ((options.cells, {}),):
        rows += bench(argparse.Namespace(**{**vars(options), **others, "cells": cells}))
        if options.results:  # what there is, should the rest not come to its end
            write_results(options.results, rows, matmul)


if __name__ == "__main__":
    main()
