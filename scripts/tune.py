"""`paged-trt tune`: time the attention plans of an engine's steps on the present GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, ExecutionError, PagedTrtError, UnsupportedError
from paged_trt.plugins.files import write_text
from paged_trt.plugins.kv import pages_for_tokens
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import AUTO, parse_attention_plan
from paged_trt.plugins.launch.precompile import start_compiling
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned_file import require_tuned_place, write_tuned
from paged_trt.plugins.launch.tuner import TimePlan, Tuning, engine_requests, tune_request
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.plugins.manifest import read_manifest
from paged_trt.plugins.operands import StepShape
from paged_trt.scripts.error_output import plain
from paged_trt.scripts.files import require_writable
from paged_trt.scripts.tune_report import (
    TuneRun,
    plans_table,
    problem_lines,
    to_json,
    tunings_table,
)


def _numbers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """`1,8,32` as a tuple of positive numbers."""
    try:
        found = None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        found = (0,)
    if found is not None and min(found) < 1:
        raise click.BadParameter(f"`{value}` is no list of positive integers such as 1,8,32")
    return found


def _heads(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`32/8` as query and key heads."""
    if value is None:
        return None
    query, slash, keys = value.partition("/")
    if not (slash and query.isascii() and query.isdigit() and keys.isascii() and keys.isdigit()):
        raise click.BadParameter(f"`{value}` is no head count such as 32/8")
    return int(query), int(keys)


@click.command(name="tune")
@click.argument("engine_dir", type=click.Path(path_type=Path), required=False)
@click.option("--heads", callback=_heads, metavar="Q/KV", help="Without ENGINE_DIR: heads.")
@click.option("--head-dim", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--value-head-dim", type=click.IntRange(min=1), help="[default: head-dim]")
@click.option("--window", type=int, default=FULL_WINDOW, help="Visible keys; all by default.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    default="bfloat16",
    show_default=True,
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", "float16", "bfloat16", "float8", "int8"]),
    default="auto",
    show_default=True,
)
@click.option("--batch", callback=_numbers, metavar="N,N,...", help="Sequences of the steps.")
@click.option("--tokens", callback=_numbers, metavar="N,N,...", help="Most keys of a sequence.")
@click.option("--device", type=int, default=0, show_default=True, help="CUDA device.")
@click.option("--limit-s", type=float, help="Stop after so many seconds; what was timed is kept.")
@click.option("--dry-run", is_flag=True, help="Show the steps and their plans; no GPU is needed.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the times there."
)
def command(
    engine_dir: Path | None,
    device: int,
    limit_s: float | None,
    dry_run: bool,
    json_file: Path | None,
    **shapes: Any,
) -> None:
    """Time the attention plans of ENGINE_DIR's decode steps on this GPU and keep the fastest.

    Engines that run on this GPU find the plans when they are loaded, as long as driver and
    kernels stay what they are. An engine built with `--attention-plan` does not look for them,
    unless the plan is `gather`.
    The file lies in the kernel cache (PAGED_TRT_CACHE_DIR); deleting it is safe.

    \b
    Example:
      paged-trt tune engine
      paged-trt tune --heads 32/8 --batch 1,8 --tokens 4096,16384 --dry-run
    """
    require_writable(json_file, option="--json")
    requests = _requests(engine_dir, shapes)
    console = Console()
    if dry_run:
        console.print(plans_table(requests))
        return
    run, path = _tune(requests, device, limit_s)
    _finish(run, path, json_file, console)


def _tune(
    requests: Sequence[AttentionPlanRequest], device: int, limit_s: float | None
) -> tuple[TuneRun, Path]:
    """Time every request on a device; also gives the file that keeps the plans."""
    # Everything that needs a GPU, and its packages.
    from paged_trt.scripts.tune_device import keys_of, on_device, timing_source

    target = tuning_target(device)
    path = require_tuned_place(target)
    requests = [on_device(request, target) for request in requests]
    start_compiling(
        key for request in requests for plan in candidates(request)
        for key in keys_of(request, plan)
    ).result()  # fmt: skip
    run = TuneRun()
    try:
        with timing_source(device, requests) as timer:
            tune_all(
                requests,
                timer,
                run=run,
                keep=lambda tuning: write_tuned([tuning.record()], target),
                is_usable=timer.is_usable,
                limit_s=limit_s,
            )
    except BaseException as error:
        # A device that stopped working cannot be given back either; the run has the reason.
        if not (isinstance(error, ExecutionError) and run.failed):
            if run.tunings:
                click.echo(f"{path}: {len(run.tunings)} plans were timed and are kept", err=True)
            raise
    return run, path


def _finish(run: TuneRun, path: Path, json_file: Path | None, console: Console) -> None:
    """Show what a run gave, write the times, and raise where a step or a plan failed."""
    if json_file is not None:
        write_text(json_file, json.dumps(to_json(run), indent=1) + "\n")
    if run.tunings:
        console.print(tunings_table(run.tunings))
    for line in problem_lines(run):
        console.print(plain(line), soft_wrap=True)
    if run.tunings:
        click.echo(f"{path}: {len(run.tunings)} plans, used from the next load of an engine on")
    error = run.error()
    if error is not None:
        raise error
    if not run.tunings:
        raise UnsupportedError(f"no step was timed: {run.skipped[0][1]}")


def tune_all(
    requests: Sequence[AttentionPlanRequest],
    time_plan: TimePlan,
    *,
    run: TuneRun,
    keep: Callable[[Tuning], object],
    is_usable: Callable[[], bool],
    limit_s: float | None = None,
) -> None:
    """Time the candidates of every request; a step that fails does not end the others.

    Args:
        requests: in the order to time them.
        time_plan: gives the times.
        run: where results go, so that they are there whatever ends the run.
        keep: takes each result at once, so that it outlives the process.
        is_usable: whether the device still works; asked after a failure.
        limit_s: seconds after which no further request is begun; None has no end.
    """
    begin = time.monotonic()
    stop = ""
    for request in requests:
        if limit_s is not None and time.monotonic() - begin > limit_s:
            stop = stop or f"the limit of {limit_s:g} s"
        if stop:
            run.skipped.append((request, stop))
            continue
        try:
            tuning = tune_request(request, time_plan)
            failures = list(tuning.failures.values())
        except (ConfigError, UnsupportedError) as error:
            # Too large for this device, or no kernel: other steps may fit.
            run.skipped.append((request, str(error)))
            continue
        except PagedTrtError as error:
            tuning, failures = None, [error]
        lost = bool(failures) and not is_usable()
        if lost:
            stop = "the device stopped working at the step that failed"
        if tuning is None or lost:
            # Plans behind the loss were not timed: which one is the fastest is not known.
            run.failed.append((request, failures[0]))
            continue
        keep(tuning)
        run.tunings.append(tuning)


def _requests(engine_dir: Path | None, shapes: dict[str, Any]) -> list[AttentionPlanRequest]:
    if engine_dir is not None:
        if shapes["heads"] is not None:
            raise ConfigError("`--heads` describes a layer without an engine; leave it out")
        manifest = read_manifest(engine_dir)
        explicit = parse_attention_plan(manifest.build.attention_plan or AUTO)
        if not PolicyPlanner(explicit=explicit).uses_tuned:
            raise ConfigError(
                f"{engine_dir} was built with `--attention-plan {manifest.build.attention_plan}`, "
                "which switches tuning off; rebuild it without"
            )
        every = engine_requests(manifest.spec, arch=None, num_multiprocessors=None)
        found = [request for request in every if len(candidates(request)) > 1]
        if not found:
            raise ConfigError(f"every decode step of {engine_dir} has one plan only: none to tune")
        return found
    missing = [f"`--{name}`" for name in ("heads", "batch", "tokens") if shapes[name] is None]
    if missing:
        raise ConfigError(f"pass an ENGINE_DIR, or {', '.join(missing)} as well")
    return _given_requests(shapes)


def _given_requests(shapes: dict[str, Any]) -> list[AttentionPlanRequest]:
    activation = DType(shapes["dtype"])
    kv = shapes["kv_cache_dtype"]
    attention = AttentionSpec(
        num_q_heads=shapes["heads"][0],
        num_kv_heads=shapes["heads"][1],
        head_dim=shapes["head_dim"],
        value_head_dim=shapes["value_head_dim"] or shapes["head_dim"],
        softmax_scale=float(shapes["head_dim"]) ** -0.5,
        window=shapes["window"],
    )
    return [
        AttentionPlanRequest(
            arch=None,
            attention=attention,
            activation_dtype=activation,
            kv_cache_dtype=activation if kv == "auto" else DType(kv),
            step=StepShape(num_tokens=batch, num_seqs=batch, table_width=pages_for_tokens(tokens)),
        )
        for batch in shapes["batch"]
        for tokens in shapes["tokens"]
    ]
