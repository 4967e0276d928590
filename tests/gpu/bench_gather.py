"""Times prefill over 8-bit pools both ways: on the portable kernel, and gathered for Hopper's.

    PYTHONPATH=.typing python tests/gpu/bench_gather.py --results FILE [--limit-s 120]

Whole steps are timed, the append included, because the gather kernel starts while it runs. All
kernels are compiled first, in processes of their own. Both ways of a step take turns, and each
replay of about 2 ms follows a short idle gap. The last outputs of both are compared. At the end it
says from how many query rows of a key on gathering is faster in every cell: FEWEST_ROWS of
`plugins/launch/gather.py`. After `--limit-s` the process ends, also where a kernel hangs; what was
measured by then is in the file. It needs no torch. `--dry-run` does what needs no device: it
compiles, and lists the plans.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from paged_trt.plugins import cuda
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.device import Stream, kept_device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.files import write_text
from paged_trt.plugins.launch.dispatch import kernel_keys
from paged_trt.plugins.launch.gather import query_rows
from paged_trt.plugins.launch.loaded import KERNELS
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import Direct, Gather
from paged_trt.plugins.launch.precompile import compile_one, start_compiling
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.step_sizes import BYTES_IN_TURN, StepSizes
from paged_trt.plugins.launch.trial import Trial, prepare_trial
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.timing import DriverGraphs, Replay, Times, measure_in_turn

ARCH, UNITS = "sm_90", 132
"""What a dry run compiles for."""
HEADS: Final = (32, 8)
HEAD_DIMS: Final = (64, 128)
KV_TYPES: Final = (DType.FLOAT8, DType.INT8)
CELLS: Final = {
    "1x1k": (1, 1024, 0),
    "1x8k": (1, 8192, 0),
    "4x4k": (4, 4096, 0),
    "16x512": (16, 512, 0),
    "4x512-on-8k": (4, 512, 7680),
    "2k-on-32k": (1, 2048, 30720),
    "1x256-on-8k": (1, 256, 7936),
    "8x128-on-4k": (8, 128, 3968),
    "8x64-on-4k": (8, 64, 4032),
    "8x32-on-4k": (8, 32, 4064),
    "8x16-on-4k": (8, 16, 4080),
}
"""Sequences, new tokens of each, and tokens before them."""
PLANNERS: Final = {
    "portable": PolicyPlanner(explicit=Direct()),
    "gather": PolicyPlanner(explicit=Gather()),
}
REPLAYS: Final = 5
GAP_SECONDS: Final = 0.02
COMPARED_BYTES: Final = 2**21
ALLOWED_DIFFERENCE: Final = 0.02
Row = dict[str, Any]


def sizes_of(name: str) -> StepSizes:
    """Lengths of a cell."""
    batch, new, past = CELLS[name]
    return StepSizes(query_lens=(new,) * batch, kv_lens=(new + past,) * batch)


def request_of(
    name: str, kv: DType, head_dim: int, *, arch: str, units: int
) -> AttentionPlanRequest:
    """What the planner is asked of a cell."""
    return AttentionPlanRequest(
        arch=arch,
        attention=AttentionSpec(
            num_q_heads=HEADS[0],
            num_kv_heads=HEADS[1],
            head_dim=head_dim,
            value_head_dim=head_dim,
            softmax_scale=float(head_dim) ** -0.5,
        ),
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=kv,
        step=sizes_of(name).shape,
        num_multiprocessors=units,
    )


def works(arch: str, units: int) -> Iterator[tuple[str, AttentionPlanRequest]]:
    """Cells of one type and dim after the other: a pool is filled once for each type."""
    for kv in KV_TYPES:
        for head_dim in HEAD_DIMS:
            for name in CELLS:
                yield name, request_of(name, kv, head_dim, arch=arch, units=units)


def compile_all(arch: str, units: int) -> list[str]:
    """Compile every kernel at once; what could not be compiled."""
    keys = {
        key
        for _, request in works(arch, units)
        for planner in PLANNERS.values()
        for key in kernel_keys(request, planner.plan(request).plan)
    }
    start_compiling(keys).result()
    return [problem for problem in map(compile_one, keys) if problem]


class RestingGraphs(DriverGraphs):
    """Graphs whose replays follow an idle gap: one kernel's heat does not slow the next."""

    def record(self, calls: Sequence[Callable[[], None]]) -> Replay:
        """A graph of `calls`, in order; nothing of it has run yet."""
        replay = super().record(calls)

        class Resting:
            def __call__(self) -> float:
                time.sleep(GAP_SECONDS)
                return replay()

            def close(self) -> None:
                replay.close()

        return Resting()


@contextlib.contextmanager
def open_device() -> Iterator[tuple[TrialMemory, RestingGraphs]]:
    """Pools and a timer on the first device."""
    device = kept_device(0)
    with device.current(), contextlib.ExitStack() as stack:
        stream = Stream(device.driver)
        stack.callback(stream.close)
        graphs = RestingGraphs(stream, driver=device.driver)
        stack.callback(graphs.close)
        memory = TrialMemory(device, stream, pool_bytes=BYTES_IN_TURN)
        stack.callback(memory.close)
        yield memory, graphs


def flops_of(name: str, request: AttentionPlanRequest) -> int:
    """Operations of both products over visible keys."""
    batch, new, past = CELLS[name]
    pairs = batch * (new * past + new * (new + 1) // 2)
    return 4 * request.attention.num_q_heads * request.attention.head_dim * pairs


def time_step(
    memory: TrialMemory, graphs: RestingGraphs, name: str, request: AttentionPlanRequest
) -> Row:
    """One row: both ways of a step."""
    try:
        trials = {}
        for way, planner in PLANNERS.items():
            KERNELS.warm(kernel_keys(request, planner.plan(request).plan))
            trials[way] = prepare_trial(memory, request, sizes_of(name), planner=planner)
        stream = memory.stream.handle
        calls = [trial.calls(stream, only=lambda _: True) for trial in trials.values()]
        outputs = []
        for trial, work in zip(trials.values(), calls, strict=True):
            graphs.run(work[0])
            outputs.append(last_outputs(memory, trial))
        first, second = outputs
        size, error = float(np.linalg.norm(first)), float(np.linalg.norm(second - first))
        difference = error / size if size > 0 else math.inf
        flops = flops_of(name, request)
        found = measure_in_turn(graphs, calls, replays=REPLAYS, estimate=flops / 400e6 + 10)
    finally:
        memory.release()
    return row_of(name, request, dict(zip(trials, found, strict=True))) | {
        "difference": difference,
        "is_right": difference <= ALLOWED_DIFFERENCE,  # NaN is not
    }


def last_outputs(memory: TrialMemory, trial: Trial) -> Any:
    """The last outputs of a trial, float32."""
    request = trial.request
    attention, dtype = request.attention, request.activation_dtype
    size = request.step.num_tokens * attention.num_q_heads * attention.value_head_dim
    num_bytes = size * dtype.itemsize
    compared = min(num_bytes, COMPARED_BYTES)
    data = memory.download(trial.output + num_bytes - compared, compared)
    return data.view(dtype.numpy).astype(np.float32)


def row_of(name: str, request: AttentionPlanRequest, times: dict[str, Times]) -> Row:
    """A row of the results file; times are median, minimum and maximum."""
    portable, gathered = times["portable"], times["gather"]
    return {
        "cell": name,
        "kv_dtype": request.kv_cache_dtype.value,
        "head_dim": request.attention.head_dim,
        "query_rows": query_rows(request),
        **{
            f"{way}_us": [round(time, 2) for time in (each.median, each.minimum, each.maximum)]
            for way, each in times.items()
        },
        "ratio": round(gathered.median / portable.median, 3),
        "tflops": round(flops_of(name, request) / gathered.median / 1e6, 1),
        "plan": str(PLANNERS["gather"].plan(request).plan),
    }


def fewest_rows(rows: Iterable[Row]) -> int | None:
    """Query rows of a key from which on gathering is faster in every row; None where in none."""
    ordered = sorted(rows, key=lambda row: (-row["query_rows"], -row["ratio"]))
    found = None
    for row in ordered:
        if row["ratio"] >= 1:
            # One slower cell of as many rows is enough.
            return found if found is None or found > row["query_rows"] else None
        found = row["query_rows"]
    return found


def line_of(row: Row) -> str:
    return (
        f"{row['cell']:12} {row['kv_dtype']:7} d{row['head_dim']:<4} {row['query_rows']:6} rows "
        f"portable {row['portable_us'][0]:9.1f} us, gather {row['gather_us'][0]:9.1f} us, "
        f"{row['ratio']:.3f}, {row['tflops']:.0f} TFLOP/s, differ by {row['difference']:.1e}"
        f"{'' if row['is_right'] else ' WRONG'}"
    )


def measure_all(results: Path | None) -> None:
    rows: list[Row] = []
    units = cuda.multiprocessors()
    with open_device() as (memory, graphs):
        for name, request in works(cuda.device_arch(), units):
            rows.append(time_step(memory, graphs, name, request))
            print(line_of(rows[-1]), flush=True)  # noqa: T201
            if results is not None:
                record = {"gpu": cuda.device_name(), "cuda": cuda.nvrtc_version(), "rows": rows}
                record["fewest_rows"] = fewest_rows(rows)
                write_text(results, json.dumps(record, indent=1))
    print(f"gathering is faster from {fewest_rows(rows)} query rows of a key on")  # noqa: T201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="JSON, written anew after every step")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds of everything")
    parser.add_argument("--dry-run", action="store_true", help="compile; no device is needed")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    begin = time.monotonic()
    arch, units = (ARCH, UNITS) if options.dry_run else (cuda.device_arch(), cuda.multiprocessors())
    problems = compile_all(arch, units)
    print(f"compiled in {time.monotonic() - begin:.1f} s {problems or ''}", flush=True)  # noqa: T201
    if options.dry_run:
        for name, request in works(arch, units):
            print(name, request.kv_cache_dtype.value, query_rows(request), *(  # noqa: T201
                f"{way}: {planner.plan(request).plan}" for way, planner in PLANNERS.items()
            ))  # fmt: skip
        return
    measure_all(options.results)
    print(f"{time.monotonic() - begin:.1f} s in all")  # noqa: T201


if __name__ == "__main__":
    main()
