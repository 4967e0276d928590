"""`paged-trt tune`: time the attention plans of an engine's steps on the present GPU."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.plugins.files import write_text
from paged_trt.plugins.kv import pages_for_tokens
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import AUTO, parse_attention_plan
from paged_trt.plugins.launch.precompile import start_compiling
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import require_tuned_place, write_tuned
from paged_trt.plugins.launch.tuner import TimePlan, Tuning, engine_requests, tune_request
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.plugins.manifest import read_manifest
from paged_trt.plugins.operands import StepShape
from paged_trt.scripts.error_output import plain
from paged_trt.scripts.files import require_writable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneRun:
    """What one run of the tuner gave.

    Attributes:
        tunings: one per request that was timed.
        skipped: reason of each request that was not.
    """

    tunings: list[Tuning]
    skipped: list[tuple[AttentionPlanRequest, str]]


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
        console.print(_plans_table(requests))
        return
    # Everything that needs a GPU, and its packages.
    from paged_trt.scripts.tune_device import keys_of, on_device, timing_source

    target = tuning_target(device)
    require_tuned_place(target)
    requests = [on_device(request, target) for request in requests]
    start_compiling(
        key for request in requests for plan in candidates(request)
        for key in keys_of(request, plan)
    ).result()  # fmt: skip
    with timing_source(device, requests) as time_plan:
        run = tune_all(requests, time_plan, limit_s=limit_s)
    if not run.tunings:
        raise UnsupportedError(f"no step was timed: {run.skipped[0][1]}")
    path = write_tuned([tuning.record() for tuning in run.tunings], target)
    console.print(tunings_table(run.tunings))
    for request, reason in run.skipped:
        console.print(plain(f"not timed: {describe(request)}: {reason}"), soft_wrap=True)
    click.echo(f"{path}: {len(run.tunings)} plans, used from the next load of an engine on")
    if json_file is not None:
        write_text(json_file, json.dumps(to_json(run), indent=1) + "\n")


def tune_all(
    requests: Sequence[AttentionPlanRequest], time_plan: TimePlan, *, limit_s: float | None = None
) -> TuneRun:
    """Time the candidates of every request that has more than one.

    Args:
        requests: in the order to time them.
        time_plan: gives the times.
        limit_s: seconds after which no further request is begun; None has no end.
    """
    begin = time.monotonic()
    tunings: list[Tuning] = []
    skipped: list[tuple[AttentionPlanRequest, str]] = []
    for request in requests:
        if limit_s is not None and time.monotonic() - begin > limit_s:
            skipped.append((request, f"the limit of {limit_s:g} s"))
            continue
        try:
            tunings.append(tune_request(request, time_plan))
        except (ConfigError, UnsupportedError) as error:
            # Too large for this device, or no kernel: other steps may fit.
            skipped.append((request, str(error)))
    return TuneRun(tunings=tunings, skipped=skipped)


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


def describe(request: AttentionPlanRequest) -> str:
    """A request in one line."""
    attention, step = request.attention, request.step
    window = "" if attention.window == FULL_WINDOW else f", window {attention.window}"
    tokens = "" if request.is_decode else f"T {step.num_tokens}, "
    return (
        f"{attention.num_q_heads}/{attention.num_kv_heads} x {attention.head_dim} "
        f"{request.kv_cache_dtype.value}{window}, {tokens}N {step.num_seqs}, M {step.table_width}"
    )


def _plans_table(requests: Sequence[AttentionPlanRequest]) -> Table:
    """What the planner would do, and what a tuner would time."""
    table = Table(title="Steps and their plans", title_justify="left")
    for name in ("layer and step", "plan", "why", "candidates"):
        table.add_column(name)
    planner = PolicyPlanner(explicit=None)
    for request in requests:
        planned = planner.plan(request)
        others = ", ".join(str(plan) for plan in candidates(request)[1:]) or "none"
        cells = (
            describe(request),
            f"{planned.plan} ({planned.source.value})",
            planned.reason,
            others,
        )
        table.add_row(*map(plain, cells))
    return table


def tunings_table(tunings: Sequence[Tuning]) -> Table:
    """Times of the heuristic's plan and of the fastest."""
    table = Table(title="Attention plans, median microseconds", title_justify="left")
    table.add_column("layer and step")
    for name in ("heuristic", "us", "fastest", "us", "speedup", "timed"):
        table.add_column(name, justify="right" if name in ("us", "speedup") else "left")
    for tuning in tunings:
        cells = (
            describe(tuning.request),
            tuning.heuristic,
            f"{tuning.microseconds[tuning.heuristic]:.2f}",
            tuning.chosen if tuning.chosen != tuning.heuristic else "the same",
            f"{tuning.microseconds[tuning.chosen]:.2f}",
            f"{tuning.speedup:.2f}",
            f"{len(tuning.microseconds)} plans"
            + (f", {len(tuning.failures)} failed" if tuning.failures else ""),
        )
        table.add_row(*map(plain, cells))
    return table


def to_json(run: TuneRun) -> dict[str, Any]:
    """Everything as JSON types."""
    return {
        "tunings": [
            {
                **tuning.record().model_dump(mode="json"),
                "all": {str(plan): value for plan, value in tuning.microseconds.items()},
                "failures": {str(plan): text for plan, text in tuning.failures.items()},
            }
            for tuning in run.tunings
        ],
        "skipped": [
            {"request": describe(request), "reason": reason} for request, reason in run.skipped
        ],
    }
