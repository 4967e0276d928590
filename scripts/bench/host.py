"""`paged-trt bench host`: what the host adds to a decode step of a full batch."""

from __future__ import annotations

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
from paged_trt.plugins.manifest import EngineManifest, read_manifest
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
    "minimum and maximum"
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
      paged-trt bench host engine --batch 64 -o results.json
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
    timed = TimedExecutor(load_engine(engine_dir, executor, device=device), notes_waits=True)
    prompts = _prompts(manifest.spec.vocab_size, batch, prompt_len)
    row = _measure(manifest, timed, prompts, new_tokens=new_tokens, steps=steps)
    gpu, driver = gpu_and_driver(device)
    results = Results(
        kind="host",
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=gpu,
        driver=driver,
        cuda=cuda.nvrtc_version() if timed.name == "tensorrt" else "none",
        tensorrt=f"{manifest.build.flavor} {manifest.build.tensorrt_version}",
        method=METHOD,
        rows=[row],
    )
    results.write(output)
    click.echo(f"{output}: {row['step_us']:.0f} us a step, runtime {row['runtime_us']:.0f} us")


def _measure(
    manifest: EngineManifest,
    timed: TimedExecutor,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    steps: int,
) -> dict[str, Any]:
    core = EngineCore(timed)
    with Session(core) as session:
        for prompt in prompts:
            session.add(prompt, new_tokens)
        while core.stats().decode_steps < _WARM_UP_STEPS:
            session.step()
        timed.decode_seconds.clear()
        timed.wait_seconds.clear()
        before = _graphs(timed)
        whole = []
        for _ in range(steps):
            begin = time.perf_counter()
            session.step()
            whole.append(time.perf_counter() - begin)
        after, stats = _graphs(timed), core.stats()
    core.close()
    total = np.asarray(whole) * 1e6
    runtime = total - np.asarray(timed.decode_seconds) * 1e6
    # Where the model runs on the host too, its part cannot be told.
    on_device: dict[str, Any] = {}
    if before is not None and after is not None:
        on_device = {
            **_spread("host_us", total - np.asarray(timed.wait_seconds) * 1e6),
            "host_share": round(1 - float(np.sum(timed.wait_seconds) / np.sum(whole)), 4),
            "graph_hit_rate": (after - before) / steps,
        }
    return {
        "model": manifest.source.name,
        "layers": len(manifest.spec.layers),
        "executor": timed.name,
        "batch": len(prompts),
        "prompt_len": len(prompts[-1]),
        "steps": steps,
        "greedy_in_engine": manifest.spec.greedy_in_engine,
        **_spread("step_us", total),
        **_spread("runtime_us", runtime),
        **on_device,
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
