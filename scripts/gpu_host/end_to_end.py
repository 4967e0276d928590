"""One engine end to end: tokens of the plan against the reference executor, and step times.

The same prompts are decoded on three executors: the plan with CUDA graphs, the plan step by step,
and the reference executor on the CPU. Greedy tokens must be equal up to a near tie, and both runs
of the plan must give the same logits bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from paged_trt.plugins import trt
from paged_trt.plugins.device import kept_device
from paged_trt.plugins.manifest import EngineManifest, read_manifest
from paged_trt.runtime.comparison import Tolerance, tolerance_for
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.results import Generation
from paged_trt.runtime.session import Session
from paged_trt.runtime.tensorrt_executor import ExecutorStats
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.gpu_host.host_results import results_path, write_results
from paged_trt.scripts.timed import TimedExecutor


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


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--label", default="", help="Part of the results file's name.")
@click.option("--new-tokens", type=int, default=32, show_default=True)
@click.option("--on-cpu", is_flag=True, help="The reference executor in the place of the plan.")
@click.option("--device", type=int, default=0)
@click.option("--commit", "tree")
def main(
    *,
    engine_dir: Path,
    output: Path,
    label: str,
    new_tokens: int,
    on_cpu: bool,
    device: int,
    tree: str | None,
) -> None:
    """Compare ENGINE_DIR's plan with the reference executor; exit 1 where they differ."""
    output.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(engine_dir)
    runner = Runner(engine_dir, device=device, on_cpu=on_cpu)
    row, agrees = end_to_end(runner, manifest, new_tokens)
    path = write_results(
        results_path(output, "e2e", device=device, label=label),
        "e2e",
        [row],
        tensorrt=f"{manifest.build.flavor} {trt.version()}",
        device=device,
        tree=tree,
    )
    click.echo(f"{json.dumps(row, indent=2)}\n{path}: {'agrees' if agrees else 'DIFFERS'}")
    sys.exit(0 if agrees else 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Runner:
    """Opens an engine directory.

    Attributes:
        engine_dir: the directory.
        device: CUDA device of the plan.
        on_cpu: the reference executor takes the place of the plan, where there is no GPU.
    """

    engine_dir: Path
    device: int
    on_cpu: bool

    def open(self, *, uses_graphs: bool) -> Executor:
        """An executor of the plan."""
        if self.on_cpu:
            return load_engine(self.engine_dir, "reference")
        return open_plan(
            self.engine_dir, device=self.device, uses_graphs=uses_graphs, pipelines=False
        )

    def free_bytes(self) -> int:
        """Free memory of the device; 0 on a CPU."""
        if self.on_cpu:
            return 0
        device = kept_device(self.device)
        with device.current():
            return device.free_bytes()


def end_to_end(
    runner: Runner, manifest: EngineManifest, new_tokens: int
) -> tuple[dict[str, Any], bool]:
    """Run an engine on all executors and compare.

    Returns:
        A row of the results file, and whether tokens and replays agree.
    """
    spec = manifest.spec
    prompts = make_prompts(spec.vocab_size, spec.max_input_len, spec.pool.max_batch_size)
    before = runner.free_bytes()
    graphs = runner.open(uses_graphs=True)
    memory = before - runner.free_bytes()
    replayed = decode(graphs, prompts, new_tokens)
    eager = decode(runner.open(uses_graphs=False), prompts, new_tokens)
    on_cpu = load_engine(runner.engine_dir, "reference")
    reference = decode(on_cpu, prompts, new_tokens, warm_up=False)
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
        "executor": graphs.name,
        "against": "the reference executor",
        "route": manifest.build.route,
        "num_pages": spec.pool.num_pages,
        "prompts": [len(prompt) for prompt in prompts],
        "new_tokens": new_tokens,
        "tokens_equal": difference is None,
        "first_difference": difference,
        **largest_difference(reference.generations, eager.generations),
        "replay_equals_eager": same_bits,
        **_spread("step_us_eager", eager.step_us),
        **_spread("step_us_graph", replayed.step_us),
        "enqueue_us_per_layer": eager.enqueue_us,
        "eager_us_per_layer": round(statistics.median(eager.step_us) / len(spec.layers), 1),
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
    timed = TimedExecutor(executor)
    with Session(timed, reuses_prefixes=False) as session, _timed_enqueue() as calls:
        if warm_up:
            session.generate(prompts, new_tokens)
            timed.decode_seconds.clear()
            calls.clear()
        generations = session.generate(prompts, new_tokens, keep_logits=True)
        stats = getattr(executor, "stats", None)
        return Decoded(
            generations=generations,
            step_us=tuple(1e6 * seconds for seconds in timed.decode_seconds),
            enqueue_us=round(statistics.median(calls), 2) if calls else None,
            stats=stats() if stats else None,
            notes=executor.notes,
        )


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


if __name__ == "__main__":
    end(main)
