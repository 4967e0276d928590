"""`paged-trt bench e2e`: a whole model through pages against the same model without."""

from __future__ import annotations

import datetime
import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np

from paged_trt.plugins import cuda
from paged_trt.plugins.manifest import EngineManifest, read_manifest
from paged_trt.runtime.compare import CompareOptions, ComparisonReport, compare_engine
from paged_trt.runtime.engine import EXECUTORS, load_engine
from paged_trt.runtime.session import Session
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.prompts import open_tokenizer, read_prompts
from paged_trt.scripts.results import Results, commit
from paged_trt.scripts.timed import TimedExecutor

METHOD = (
    "greedy decode of the prompts as one ragged batch; tokens and logits of every step against "
    "the un-rewritten model in onnxruntime, one sequence at a time with a dense cache; step "
    "times by the host clock around Executor.step, median, minimum and maximum of the decode "
    "steps of one run after one warm-up run"
)


@click.command(name="e2e")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--prompt", "texts", multiple=True, required=True, help="Repeat it for a batch.")
@click.option("--chat", is_flag=True, help="Wrap each prompt in the chat template.")
@click.option("--new-tokens", type=int, default=64, show_default=True)
@click.option("--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def command(
    model: Path,
    engine_dir: Path,
    texts: tuple[str, ...],
    chat: bool,
    new_tokens: int,
    executor: str,
    output: Path,
) -> None:
    """Compare ENGINE_DIR with MODEL on the prompts, time its steps, write a results file.

    \b
    Example:
      paged-trt bench e2e model.onnx engine --prompt "Hello" -o results.json
    """
    manifest = read_manifest(engine_dir)
    prompts = read_prompts(open_tokenizer(engine_dir), texts=texts, ids=(), chat=chat)
    ids = [prompt.token_ids for prompt in prompts]
    options = CompareOptions(executor=executor, num_new_tokens=new_tokens, prompts=ids)
    report = compare_engine(model, engine_dir, options)
    seconds = _decode_seconds(engine_dir, executor, ids, new_tokens)
    row = _row(manifest, report, seconds, prompts=list(texts), new_tokens=new_tokens)
    gpu, driver = gpu_and_driver()
    results = Results(
        kind="e2e",
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=gpu,
        driver=driver,
        cuda=cuda.nvrtc_version() if report.executor == "tensorrt" else "none",
        tensorrt=f"{manifest.build.flavor} {manifest.build.tensorrt_version}",
        method=METHOD,
        rows=[row],
    )
    results.write(output)
    click.echo(f"{output}: {row['verdict']}")


def _decode_seconds(
    engine_dir: Path, executor: str, prompts: list[tuple[int, ...]], new_tokens: int
) -> list[float]:
    timed = TimedExecutor(load_engine(engine_dir, executor, pipelines=False))
    with Session(timed, reuses_prefixes=False) as session:
        session.generate(prompts, new_tokens)
        timed.decode_seconds.clear()
        session.generate(prompts, new_tokens)
    return timed.decode_seconds


def _row(
    manifest: EngineManifest,
    report: ComparisonReport,
    seconds: list[float],
    *,
    prompts: list[str],
    new_tokens: int,
) -> dict[str, Any]:
    sequences = [each for _, iteration in report.iterations for each in iteration]
    differences = [each.token_difference for each in sequences if each.token_difference]
    microseconds = [1e6 * value for value in seconds]
    return {
        "model": manifest.source.name,
        "dialect": manifest.source.dialect,
        "layers": len(manifest.spec.layers),
        "executor": report.executor,
        "against": "the un-rewritten model in onnxruntime",
        "route": manifest.build.route,
        "prompts": prompts,
        "new_tokens": new_tokens,
        "iterations": [name for name, _ in report.iterations],
        "tokens_compared": sum(each.steps_compared for each in sequences),
        "tokens_equal": not differences,
        "first_difference": (
            {"step": differences[0].step, "gap": differences[0].gap, "bound": differences[0].bound}
            if differences
            else None
        ),
        "max_logit_difference": float(np.max([each.max_difference for each in sequences])),
        "logit_tolerance": float(np.min([each.limit for each in sequences])),
        "step_us_eager": statistics.median(microseconds),
        "step_us_eager_min": min(microseconds),
        "step_us_eager_max": max(microseconds),
        "num_pages": manifest.spec.pool.num_pages,
        "verdict": "agrees" if report.passed else "differs",
    }
