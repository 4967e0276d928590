"""`paged-trt bench host`: what the host adds to a decode step of a full batch."""

from __future__ import annotations

import contextlib
import datetime
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from paged_trt.plugins import cuda
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.manifest import read_manifest
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.engine import EXECUTORS, load_engine
from paged_trt.runtime.session import Session
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.results import Results, commit
from paged_trt.scripts.timed import TimedExecutor

METHOD = (
    "one core, a full batch of random prompts that share their first half, greedy; after the "
    "prefill and some steps that are not counted, each decode step by the host clock: step_us "
    "around EngineCore.step, runtime_us the same without Executor.step, host_us the same without "
    "the time that the executor waited for the device after it had handed over its work; median, "
    "minimum and maximum; host_share is the median of host_us by that of step_us; on a GPU all of "
    "it ran once before, on the same executor and with an empty cache, so that every context, "
    "kernel and graph was there; a row with pipelined true: each step is handed over before the "
    "tokens of the one before are read, so that work of the host and of the device overlap"
)
_WARM_UP_STEPS = 20


@click.command(name="host")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--batch", type=int, help="Sequences of the batch. [max_batch_size]")
@click.option("--prompt-len", type=int, default=200, show_default=True, help="Longest prompt.")
@click.option("--steps", type=int, default=200, show_default=True, help="Steps to count.")
@click.option("--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True)
@click.option("--device", type=int, default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def command(
    engine_dir: Path,
    batch: int | None,
    prompt_len: int,
    steps: int,
    executor: str,
    device: int,
    output: Path,
) -> None:
    """Time decode steps of a full batch in ENGINE_DIR, the host's part of them apart.

    \b
    Example:
      paged-trt bench host engine --steps 100 -o results.json
    """
    manifest = read_manifest(engine_dir)
    pool = manifest.spec.pool
    batch = pool.max_batch_size if batch is None else batch
    if not 1 <= batch <= pool.max_batch_size:
        raise ConfigError(f"`--batch` must be from 1 to {pool.max_batch_size}, got {batch}")
    # While the last prompts run, the first sequences decode already.
    new_tokens = steps + _WARM_UP_STEPS + batch * prompt_len // manifest.spec.max_num_tokens + 2
    if min(prompt_len, steps) < 2 or prompt_len + new_tokens > pool.max_kv_cache_capacity:
        raise ConfigError(
            f"`--prompt-len` {prompt_len} and `--steps` {steps} make sequences of "
            f"{prompt_len + new_tokens} tokens, those before the count included; both must be 2 "
            f"or more, and all fit the engine's {pool.max_kv_cache_capacity}"
        )
    prompts = _prompts(manifest.spec.vocab_size, batch, prompt_len)
    gpu, driver = gpu_and_driver(device)
    rows: list[dict[str, Any]] = []
    for pipelines in (False, True):
        timed = TimedExecutor(load_engine(engine_dir, executor, device=device, pipelines=pipelines))
        with contextlib.closing(timed):
            row = measure(timed, prompts, new_tokens=new_tokens, steps=steps, pipelines=pipelines)
        about = {"model": manifest.source.name, "layers": len(manifest.spec.layers)}
        rows.append({**about, "pipelined": pipelines, **row})
        # After each way: what was measured is not lost where the next one fails.
        Results(
            kind="host",
            commit=commit(),
            date=datetime.datetime.now(tz=datetime.UTC).date(),
            gpu=gpu,
            driver=driver,
            cuda=cuda.nvrtc_version() if timed.name == "tensorrt" else "none",
            tensorrt=f"{manifest.build.flavor} {manifest.build.tensorrt_version}",
            method=METHOD,
            rows=rows,
        ).write(output)
    plain, pipelined = rows
    click.echo(
        f"{output}: {plain['step_us']:.0f} us a step, runtime {plain['runtime_us']:.0f} us; "
        f"pipelined {pipelined['step_us']:.0f} us a step"
    )


def measure(
    timed: TimedExecutor,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    steps: int,
    pipelines: bool,
) -> dict[str, Any]:
    """Times of decode steps, and who ran them; the executor stays open.

    Args:
        timed: runs the model.
        prompts: of the batch.
        new_tokens: of each prompt; enough for the steps.
        steps: to count.
        pipelines: as of EngineCore.
    """
    if timed.bucketed_shapes:
        # The steps that count make no context, kernel or graph: they are all there.
        Session(EngineCore(timed, pipelines=pipelines)).generate(prompts, new_tokens)
    core = EngineCore(timed, pipelines=pipelines)
    with Session(core) as session:
        for prompt in prompts:
            session.add(prompt, new_tokens)
        while core.stats().decode_steps < _WARM_UP_STEPS:
            session.step()
        timed.decode_seconds.clear()
        before = _graphs(timed)
        whole, waited = [], [timed.waited()]
        for _ in range(steps):
            begin = time.perf_counter()
            session.step()
            whole.append(time.perf_counter() - begin)
            waited.append(timed.waited())
        after, stats = _graphs(timed), core.stats()
    total, wait = np.asarray(whole) * 1e6, np.diff(waited) * 1e6
    found = _spread("step_us", total)
    if len(timed.decode_seconds) == steps:
        found |= _spread("runtime_us", total - np.asarray(timed.decode_seconds) * 1e6)
    # Where the model runs on the host too, its part cannot be told.
    if before is not None and after is not None:
        found |= _spread("host_us", total - wait)
        found["host_share"] = round(found["host_us"] / found["step_us"], 4)
        found["graph_hit_rate"] = (after - before) / steps
    return {
        "executor": timed.name,
        "batch": len(prompts),
        "prompt_len": len(prompts[-1]),
        "steps": steps,
        "greedy_in_engine": core.spec.greedy_in_engine,
        **found,
        "cached_tokens": stats.cached_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "notes": list(timed.notes),
    }


def _prompts(vocab_size: int, batch: int, longest: int) -> list[list[int]]:
    """Ragged prompts, from half of the longest to the longest, with one beginning."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab_size, longest // 2).tolist()
    lengths = np.linspace(longest // 2, longest, batch).astype(int)
    return [
        shared + rng.integers(0, vocab_size, max(1, length - len(shared))).tolist()
        for length in lengths.tolist()
    ]


def _graphs(timed: TimedExecutor) -> int | None:
    read = getattr(timed, "stats", None)
    return int(read().graph_replays) if read is not None else None


def _spread(name: str, times: npt.NDArray[np.float64]) -> dict[str, float]:
    values = times.tolist()
    return {
        name: round(statistics.median(values), 1),
        f"{name}_min": round(min(values), 1),
        f"{name}_max": round(max(values), 1),
    }
