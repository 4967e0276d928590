"""What `gpu_host run` does on the host: GPU tests, then one engine end to end, then the results.

The end-to-end run decodes the same prompts on three executors: the plan with CUDA graphs, the
plan step by step, and the reference executor on the CPU. Greedy tokens must be equal up to a
near tie, and both runs of the plan must give the same logits bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.builder.config import BuildConfig
from paged_trt.builder.pipeline import BuildRequest, build_engine_directory
from paged_trt.plugins import cuda, trt
from paged_trt.plugins.device import kept_device
from paged_trt.plugins.manifest import EngineManifest, read_manifest
from paged_trt.runtime.comparison import Tolerance, tolerance_for
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.results import Generation
from paged_trt.runtime.session import Session
from paged_trt.runtime.tensorrt_executor import ExecutorStats
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.results import Results, commit

ROOT: Final = Path(__file__).resolve().parents[1]
TOY_DIALECT: Final = "attention23-past"
METHODS: Final = {
    "e2e": (
        "greedy decode of a ragged batch, tokens and logits against the reference executor on the "
        "CPU; step times are host times from the inputs of a decode step to its logits in host "
        "memory, enqueue is the host time of one plugin call; median, minimum and maximum of the "
        "second of two runs"
    ),
    "gpu-matrix": (
        "kernels against NumPy in float64 over the same pools; the error of each token row is at "
        "most twice that of a computation of the same precision, and one rounding of the output; "
        "the row whose error is the largest part of its allowance is kept; pool bytes after an "
        "append are equal"
    ),
    "sanitizer": (
        "compute-sanitizer around every process of pytest; errors and hazards are summed over the "
        "processes; return codes of driver calls are not errors"
    ),
}
_SUMMARY: Final = re.compile(
    r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", re.IGNORECASE
)


@dataclasses.dataclass(kw_only=True)
class Decoded:
    """One executor's run.

    Attributes:
        generations: one per prompt, with logits.
        step_us: host time of each decode step.
        enqueue_us: median host time of a plugin call; None where it was not measured.
        stats: of a TensorRT executor.
        notes: what a report must say.
    """

    generations: list[Generation]
    step_us: tuple[float, ...]
    enqueue_us: float | None
    stats: ExecutorStats | None
    notes: tuple[str, ...]


def run(options: argparse.Namespace) -> int:
    """Run everything that was asked for.

    Args:
        options: of `gpu_host run`.

    Returns:
        0, or 1 where a test failed or tokens differ by more than a near tie.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    code = 0 if options.skip_tests else run_tests(options)
    with contextlib.ExitStack() as stack:
        folder = options.engine
        if folder is None:
            workspace = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = build(options, workspace)
        manifest = read_manifest(folder)
        row, agrees = end_to_end(folder, manifest, options)
    tensorrt = f"{manifest.build.flavor} {trt.version()}"
    path = write_results(options.output, "e2e", [row], tensorrt=tensorrt, options=options)
    sys.stdout.write(f"{json.dumps(row, indent=2)}\n{path}: {'agrees' if agrees else 'DIFFERS'}\n")
    return code or (0 if agrees else 1)


def run_tests(options: argparse.Namespace) -> int:
    """Run pytest with `--require-gpu` and write what it compared; gives 0 or 1.

    pytest's own report is `gpu-tests.xml`; PYTEST_ADDOPTS adds to its options, `-n 8` say.
    """
    report = options.output.resolve() / "gpu-tests.xml"
    with tempfile.TemporaryDirectory() as folder:
        matrix = Path(folder) / "matrix.json"
        words = [
            *(sys.executable, "-m", "pytest", "--require-gpu", "-q"),
            *(f"--junitxml={report}", f"--gpu-matrix={matrix}", *options.tests),
        ]
        done = subprocess.run(  # noqa: S603 - our own words
            words, cwd=ROOT, check=False, env=_one_thread_each()
        )
        rows = json.loads(matrix.read_text(encoding="utf-8")) if matrix.exists() else []
    if rows:
        write_results(options.output, "gpu-matrix", rows, tensorrt="not used", options=options)
    return int(done.returncode != 0)


def _one_thread_each() -> dict[str, str]:
    """Environment of pytest's workers: NumPy's float64 references with a thread each.

    A thread per core in each worker would be cores times workers of them.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**dict.fromkeys(names, "1"), **os.environ}


def sanitize(options: argparse.Namespace) -> int:
    """Run GPU tests under compute-sanitizer and write how many errors it saw.

    Args:
        options: of `gpu_host sanitize`.

    Returns:
        0, or 1 where a test failed, a tool saw an error, or a process ended without a summary.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [_sanitized(tool, options) for tool in options.tools]
    path = write_results(options.output, "sanitizer", rows, tensorrt="not used", options=options)
    sys.stdout.write(f"{json.dumps(rows, indent=2)}\n{path}\n")
    is_clean = all(
        row["errors"] == row["unfinished"] == row["exit_code"] == 0 < row["processes"]
        for row in rows
    )
    return 0 if is_clean else 1


def _sanitized(tool: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *("compute-sanitizer", "--tool", tool, "--target-processes", "all"),
            *("--report-api-errors", "no", "--log-file", f"{folder}/%p.log"),
            *(sys.executable, "-m", "pytest", "--require-gpu", "-q", *options.tests),
        ]
        done = subprocess.run(  # noqa: S603 - our own words
            words, cwd=ROOT, check=False, capture_output=True, text=True, env=_one_thread_each()
        )
        sys.stdout.write(done.stdout[-2000:] + done.stderr[-2000:])
        logs = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.log")]
    counts = [int(match[1]) for log in logs for match in _SUMMARY.finditer(log)]
    first = next((log for log in logs if (match := _SUMMARY.search(log)) and match[1] != "0"), "")
    return {
        "tool": tool,
        "tests": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "none ran",
        "selection": options.tests,
        "exit_code": done.returncode,
        "processes": len(counts),
        "unfinished": len(logs) - len(counts),
        "errors": sum(counts),
        "first_report": first[:2000],
    }


def build(options: argparse.Namespace, workspace: Path) -> Path:
    """Build an engine directory from the model that was given, or from a random toy."""
    model = options.model
    if model is None:
        write_toy(workspace / "toy", TOY_DIALECT)
        model = workspace / "toy" / "model.onnx"
    capacity = options.max_kv_cache_capacity
    config = BuildConfig(
        max_batch_size=options.max_batch_size,
        max_input_len=capacity // 2,
        max_kv_cache_capacity=capacity,
        kv_cache_dtype=options.kv_cache_dtype,
        dtype=options.dtype,
    )
    build_engine_directory(BuildRequest(model=model, target=workspace / "engine", config=config))
    return workspace / "engine"


def end_to_end(
    folder: Path, manifest: EngineManifest, options: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """Run an engine on all executors and compare.

    Returns:
        A row of the results file, and whether tokens and replays agree.
    """
    spec = manifest.spec
    prompts = make_prompts(spec.vocab_size, spec.max_input_len, spec.pool.max_batch_size)
    before = free_bytes(options.device)
    graphs = open_plan(folder, device=options.device)
    memory = before - free_bytes(options.device)
    replayed = decode(graphs, prompts, options.new_tokens)
    eager = decode(
        open_plan(folder, device=options.device, uses_graphs=False), prompts, options.new_tokens
    )
    reference = decode(load_engine(folder, "reference"), prompts, options.new_tokens, warm_up=False)
    difference, excused = first_difference(
        reference.generations, eager.generations, tolerance_for(spec)
    )
    same_bits = all(
        _same_bits(one, two)
        for one, two in zip(replayed.generations, eager.generations, strict=True)
    )
    row = {
        "model": manifest.source.name,
        "dialect": manifest.source.dialect,
        "layers": len(spec.layers),
        "executor": "tensorrt",
        "against": "the reference executor",
        "route": manifest.build.route,
        "num_pages": spec.pool.num_pages,
        "prompts": [len(prompt) for prompt in prompts],
        "new_tokens": options.new_tokens,
        "tokens_equal": difference is None,
        "first_difference": difference,
        **largest_difference(reference.generations, eager.generations),
        "replay_equals_eager": same_bits,
        **_spread("step_us_eager", eager.step_us),
        **_spread("step_us_graph", replayed.step_us),
        "enqueue_us_per_layer": eager.enqueue_us,
        "device_memory_bytes": memory,
        "counts": dataclasses.asdict(replayed.stats) if replayed.stats else None,
        "notes": [*replayed.notes, *reference.notes],
    }
    return row, same_bits and (difference is None or excused)


def _spread(name: str, times: tuple[float, ...]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {
        name: round(statistics.median(times), 1),
        f"{name}_min": round(min(times), 1),
        f"{name}_max": round(max(times), 1),
    }


def make_prompts(vocab_size: int, longest: int, count: int) -> list[list[int]]:
    """Random prompts around page boundaries, shortest first."""
    random = np.random.default_rng(0)
    lengths = [length for length in (1, 17, 127, 129, 255, 300) if length <= longest]
    chosen = (lengths * count)[:count] if len(lengths) < count else lengths[-count:]
    return [random.integers(0, vocab_size, length).tolist() for length in chosen]


def decode(
    executor: Executor, prompts: list[list[int]], new_tokens: int, *, warm_up: bool = True
) -> Decoded:
    """Run all prompts; with `warm_up` twice, to keep the run whose kernels and graphs are ready."""
    with (
        Session(executor, reuses_prefixes=False) as session,
        _timed_steps(executor) as steps,
        _timed_enqueue() as calls,
    ):
        if warm_up:
            session.generate(prompts, new_tokens)
            steps.clear()
            calls.clear()
        generations = session.generate(prompts, new_tokens, keep_logits=True)
        stats = getattr(executor, "stats", None)
        return Decoded(
            generations=generations,
            step_us=tuple(steps),
            enqueue_us=round(statistics.median(calls), 2) if calls else None,
            stats=stats() if stats else None,
            notes=executor.notes,
        )


@contextlib.contextmanager
def _timed_steps(executor: Any) -> Iterator[list[float]]:
    """Microseconds of each decode step."""
    times: list[float] = []
    original = executor.step

    def step(inputs: StepInputs) -> npt.NDArray[Any]:
        start = time.perf_counter()
        logits: npt.NDArray[Any] = original(inputs)
        if len(inputs.input_ids) == len(inputs.past_lens):
            times.append((time.perf_counter() - start) * 1e6)
        return logits

    executor.step = step
    try:
        yield times
    finally:
        del executor.step


@contextlib.contextmanager
def _timed_enqueue() -> Iterator[list[float]]:
    """Microseconds of each plugin call."""
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    times: list[float] = []
    original = PagedAttentionPlugin.enqueue

    def enqueue(*arguments: Any) -> None:
        start = time.perf_counter()
        original(*arguments)
        times.append((time.perf_counter() - start) * 1e6)

    PagedAttentionPlugin.enqueue = enqueue  # type: ignore[method-assign,assignment]
    try:
        yield times
    finally:
        PagedAttentionPlugin.enqueue = original  # type: ignore[method-assign]


def first_difference(
    reference: list[Generation], found: list[Generation], tolerance: Tolerance
) -> tuple[dict[str, Any] | None, bool]:
    """The first token that differs, over all prompts, and whether all such are near ties.

    `gap` is how far the reference's logits of the two tokens are apart, and `bound` the gap of
    a near tie.
    """
    first, excused = None, True
    for sequence, (want, have) in enumerate(zip(reference, found, strict=True)):
        pairs = enumerate(zip(want.tokens, have.tokens, strict=False))
        step = next((index for index, (left, right) in pairs if left != right), None)
        if step is None:
            continue
        row = _logits(want)[step]
        gap = float(row[want.tokens[step]] - row[have.tokens[step]])
        bound = tolerance.tie_rtol * float(np.abs(row).max())
        excused = excused and gap < bound
        if first is None or step < first["step"]:
            first = {"sequence": sequence, "step": step, "gap": gap, "bound": bound}
    return first, excused


def largest_difference(reference: list[Generation], found: list[Generation]) -> dict[str, float]:
    """How far logits are apart, over the steps up to a sequence's first other token.

    `max_logit_difference`, and the logit of largest magnitude in that row of the reference.
    """
    largest = (0.0, 0.0)
    for want, have in zip(reference, found, strict=True):
        for step, (row, other) in enumerate(zip(_logits(want), _logits(have), strict=True)):
            largest = max(largest, (float(np.abs(row - other).max()), float(np.abs(row).max())))
            if want.tokens[step] != have.tokens[step]:
                break
    return {"max_logit_difference": largest[0], "largest_logit_of_that_row": largest[1]}


def _same_bits(one: Generation, two: Generation) -> bool:
    return one.tokens == two.tokens and _logits(one).tobytes() == _logits(two).tobytes()


def _logits(generation: Generation) -> npt.NDArray[np.float32]:
    assert generation.logits is not None  # noqa: S101 - `keep_logits` was asked for
    return generation.logits


def free_bytes(ordinal: int) -> int:
    """Free memory of a device."""
    device = kept_device(ordinal)
    with device.current():
        return device.free_bytes()


def write_results(
    output: Path,
    kind: str,
    rows: list[dict[str, Any]],
    *,
    tensorrt: str,
    options: argparse.Namespace,
) -> Path:
    """Write `<kind>-<gpu>-<date>[-n].json`; an earlier file stays."""
    gpu, driver = gpu_and_driver(options.device)
    date = datetime.datetime.now(datetime.UTC).date()
    results = Results.model_validate(
        {
            "kind": kind,
            "commit": options.commit or commit(),
            "date": date,
            "gpu": gpu,
            "driver": driver,
            "cuda": cuda.nvrtc_version(),
            "tensorrt": tensorrt,
            "method": METHODS[kind],
            "rows": rows,
        }
    )
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    stem, number = f"{kind}-{slug}-{date:%Y%m%d}", 1
    path = output / f"{stem}.json"
    while path.exists():
        number += 1
        path = output / f"{stem}-{number}.json"
    results.write(path)
    return path
