"""`paged-trt bench serve`: latencies and throughput under requests that arrive at random."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from paged_trt.plugins import cuda
from paged_trt.plugins.manifest import EngineManifest, read_manifest
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.engine import EXECUTORS, load_engine
from paged_trt.runtime.executor import Executor
from paged_trt.scripts.load import Load, put_load
from paged_trt.scripts.load_plot import plot_loads
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.results import Results, commit
from paged_trt.scripts.traffic import (
    SERVICES,
    Limits,
    Traffic,
    TrafficOptions,
    make_traffic,
    trace_source,
)

METHOD = (
    "requests arrive as a Poisson process; prompt and answer lengths are drawn, one without the "
    "other, from the percentiles of {source}; a prompt over the engine's limits is cut to its "
    "first tokens and an answer to the room left, both counted; token ids are random, greedy "
    "decoding without end tokens; host clock in the event loop that reads the streams of an "
    "AsyncSession in this process (HTTP and tokenising are not in it), from the arrival that the "
    "process gives, after warm_up and one request; each rate on a new session whose cache is empty"
)
_PERCENTILES = {"": 50, "_p90": 90, "_p99": 99}


@click.command(name="serve")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--trace", type=click.Choice(SERVICES), default="conv", show_default=True)
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    required=True,
    help="Mean requests per second; repeat it for several runs.",
)
@click.option("--requests", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--length-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Multiplies all lengths of the trace, for an engine of small capacity.",
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="First tokens that all prompts share.",
)
@click.option("--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True)
@click.option("--device", type=int, default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Also write this PNG.")
def command(
    engine_dir: Path,
    trace: str,
    rates: tuple[float, ...],
    requests: int,
    seed: int,
    length_scale: float,
    shared_prefix: int,
    executor: str,
    device: int,
    output: Path,
    plot: Path | None,
) -> None:
    """Put load on ENGINE_DIR with the lengths of the Azure LLM inference trace 2023.

    \b
    Example:
      paged-trt bench serve engine --rate 4 --rate 16 --requests 100 -o results.json --plot load.png
    """
    manifest = read_manifest(engine_dir)
    options = [
        TrafficOptions(
            service=trace,
            rate=rate,
            num_requests=requests,
            seed=seed,
            length_scale=length_scale,
            shared_prefix_tokens=shared_prefix,
        )
        for rate in rates
    ]
    traffic = [make_traffic(each, _limits(manifest)) for each in options]
    engine = load_engine(engine_dir, executor, device=device)
    pipelined = getattr(engine, "launcher", None) is not None
    common = {"executor": engine.name, "pipelined": pipelined, **_engine(manifest)}
    rows: list[dict[str, Any]] = []
    try:
        engine.warm_up()
        for each, made in zip(options, traffic, strict=True):
            load = asyncio.run(_measure(engine, made))
            rows.append({**common, **_asked(each), **_row(made, load)})
            # An interrupt of a later rate takes nothing from those that are done.
            results = _results(manifest, engine, rows, device=device)
            results.write(output)
            click.echo(_line(rows[-1]))
    finally:
        engine.close()
    if plot is not None:
        plot_loads(results, plot)
    click.echo(f"{output}: written")


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['rate']:g} requests/s: {row['tokens_per_s']:.1f} tokens/s, first token "
        f"{row['first_token_ms']:.1f} ms, next {row['inter_token_ms']:.1f} ms (medians), "
        f"{row['failed']} failed"
    )


def _limits(manifest: EngineManifest) -> Limits:
    spec = manifest.spec
    return Limits(
        max_input_len=spec.max_input_len,
        max_kv_cache_capacity=spec.pool.max_kv_cache_capacity,
        vocab_size=spec.vocab_size,
    )


def _engine(manifest: EngineManifest) -> dict[str, Any]:
    return {
        "model": manifest.source.name,
        "layers": len(manifest.spec.layers),
        "route": manifest.build.route,
        "max_batch_size": manifest.spec.pool.max_batch_size,
        "num_pages": manifest.spec.pool.num_pages,
    }


def _asked(options: TrafficOptions) -> dict[str, Any]:
    return {
        "trace": f"azure-llm-2023-{options.service}",
        "rate": options.rate,
        "seed": options.seed,
        "length_scale": options.length_scale,
        "shared_prefix_tokens": options.shared_prefix_tokens,
    }


async def _measure(engine: Executor, traffic: Traffic) -> Load:
    await _run(engine, Traffic(
        arrivals=traffic.arrivals[:1], num_prompts_cut=0, num_answers_cut=0
    ))  # fmt: skip
    return await _run(engine, traffic)


async def _run(engine: Executor, traffic: Traffic) -> Load:
    # A session of a core leaves the executor open for the next one.
    session = AsyncSession(EngineCore(engine))
    try:
        return await put_load(session, traffic.arrivals)
    finally:
        await session.aclose()


def _row(traffic: Traffic, load: Load) -> dict[str, Any]:
    done = [request for request in load.requests if request.is_complete]
    stats = load.stats
    return {
        "requests": len(load.requests),
        "failed": len(load.requests) - len(done),
        "prompts_cut": traffic.num_prompts_cut,
        "answers_cut": traffic.num_answers_cut,
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": load.num_tokens,
        "seconds": load.seconds,
        "requests_per_s": len(done) / load.seconds,
        "tokens_per_s": load.num_tokens / load.seconds,
        **_spread("first_token_ms", [request.first_token for request in done]),
        **_spread("inter_token_ms", [gap for each in done for gap in each.between_tokens]),
        "pages_in_use": [list(each) for each in load.pages[:: len(load.pages) // 200 + 1]],
        "pages_in_use_max": max(count for _, count in load.pages),
        "pages_in_use_mean": load.mean_pages,
        "prefix_hit_rate": stats.cached_tokens / max(stats.prompt_tokens, 1),
        "preemptions": stats.preemptions,
        "prefill_steps": stats.prefill_steps,
        "mixed_steps": stats.mixed_steps,
        "decode_steps": stats.decode_steps,
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Median, 90th and 99th percentile in milliseconds, and all 101."""
    percentiles = (1e3 * np.percentile(seconds, range(101))).tolist()
    return {
        **{name + suffix: percentiles[at] for suffix, at in _PERCENTILES.items()},
        f"{name}_percentiles": percentiles,
    }


def _results(
    manifest: EngineManifest, engine: Executor, rows: list[dict[str, Any]], *, device: int
) -> Results:
    gpu, driver = gpu_and_driver(device)
    return Results(
        kind="serve",
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=gpu,
        driver=driver,
        cuda=cuda.nvrtc_version() if engine.name == "tensorrt" else "none",
        tensorrt=f"{manifest.build.flavor} {manifest.build.tensorrt_version}",
        method=METHOD.format(source=trace_source()),
        rows=rows,
    )
