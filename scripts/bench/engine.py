"""`paged-trt bench engine`: step times of a whole engine, and the part that our kernels take."""

from __future__ import annotations

import dataclasses
import datetime
import re
import statistics
import time
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from paged_trt.plugins import cuda
from paged_trt.plugins.errors import ConfigError, ExecutionError
from paged_trt.plugins.manifest import EngineManifest, read_manifest
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.decoders import open_decoder
from paged_trt.runtime.engine import EXECUTORS, load_engine
from paged_trt.scripts.engine_timing import (
    MICROSECONDS,
    WARM_UP_STEPS,
    Cell,
    KernelTimes,
    StepTimes,
    Times,
    fill_steps,
    time_kernels,
    time_steps,
)
from paged_trt.scripts.files import require_writable
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.results import Results, commit

METHOD: Final = (
    "random prompts of kv_len tokens each, prefilled and decoded through a Session. decode_us: "
    "host clock around Executor.step of a decode step, median, minimum and maximum of the counted "
    "steps; session_us: the rest of Session.step (scheduling, arrays, sampling); prefill_us: sum "
    "over the chunks of all prompts, second of two rounds. On TensorRT: replay_us, "
    "replay_without_ours_us and ours_alone_us are CUDA graphs replayed 50 times back to back (the "
    "step, the step without our launches, our launches alone on the engine's own addresses, where "
    "small pools stay in the L2 cache), median, minimum and maximum of 7 rounds by the host clock; "
    "host_us = decode_us - replay_us; ours_share = (replay_us - replay_without_ours_us) / "
    "replay_us; ours_in_step_to_alone = (replay_us - replay_without_ours_us) / ours_alone_us. "
    "onnxruntime: the reference executor on the CPU of this machine, same steps; with --model also "
    "the un-rewritten model there, one sequence after the other, the sum over the batch"
)
ON_A_CPU: Final = (
    "the reference executor ran: onnxruntime on this CPU runs the op's specification, so no kernel "
    "of ours ran and times say nothing about a GPU"
)
TARGET: Final = 1.05
"""Most that our kernels may cost inside a replayed step, in units of what they cost alone."""


def _parse_cells(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Cell]:
    """`4x512` as a cell."""
    cells = []
    for text in values:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise click.BadParameter(f"`{text}` is no BATCHxTOKENS such as 4x512")
        cells.append(Cell(batch=int(match[1]), kv_len=int(match[2])))
    return cells


@click.command(name="engine")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True)
@click.option("--device", type=int, default=0, show_default=True, help="CUDA device of the plan.")
@click.option(
    "--cell",
    "cells",
    multiple=True,
    metavar="BATCHxTOKENS",
    callback=_parse_cells,
    help="Sequences and tokens of each prompt; repeat it. Left out: one sequence and a full "
    "batch, as long as the engine takes.",
)
@click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The un-rewritten model, to time it in onnxruntime as well.",
)
@click.option("--no-onnxruntime", is_flag=True, help="Leave the comparison with onnxruntime out.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def command(
    engine_dir: Path,
    *,
    executor: str,
    device: int,
    cells: list[Cell],
    steps: int,
    model: Path | None,
    no_onnxruntime: bool,
    output: Path,
) -> None:
    """Time prefill and decode of ENGINE_DIR, and our kernels' part of them; write results.

    On a GPU it says what part of a replayed decode step our kernels take, and how that compares
    with the same kernels alone. Without one it times the reference executor, and says so.

    \b
    Example:
      paged-trt bench engine engine --cell 1x512 --cell 4x512 -o results.json
    """
    require_writable(output, option="-o")
    manifest = read_manifest(engine_dir)
    wanted = cells or default_cells(manifest.spec, steps)
    for cell in wanted:
        _require_fits(manifest.spec, cell, steps)
    name = _executor_name(engine_dir, executor, device)
    rows = []
    for cell in wanted:
        row = _measure(engine_dir, manifest, name, cell, steps, device=device)
        if not no_onnxruntime:
            row |= _against(engine_dir, name, cell, steps, model)
        rows.append(row)
        click.echo(_line(row))
    gpu, driver = gpu_and_driver(device)
    on_gpu = name == "tensorrt"
    Results(
        kind="engine",
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=gpu,
        driver=driver,
        cuda=cuda.nvrtc_version() if on_gpu else "none",
        tensorrt=f"{manifest.build.flavor} {manifest.build.tensorrt_version}",
        method=METHOD,
        peers={} if no_onnxruntime else {"onnxruntime": _onnxruntime_version()},
        rows=rows,
    ).write(output)
    click.echo(f"{output}: {len(rows)} rows")


def default_cells(spec: EngineSpec, steps: int) -> list[Cell]:
    """One sequence and a full batch, as long as the engine takes with room to decode."""
    room = spec.pool.max_kv_cache_capacity - steps - WARM_UP_STEPS - 2
    length = min(spec.max_input_len, room)
    if length < 1:
        raise ConfigError(
            f"`--steps` {steps} leaves no room for a prompt in max_kv_cache_capacity="
            f"{spec.pool.max_kv_cache_capacity}; pass fewer steps"
        )
    cells = [
        Cell(batch=batch, kv_len=length) for batch in dict.fromkeys((1, spec.pool.max_batch_size))
    ]
    return [
        dataclasses.replace(cell, kv_len=max(1, min(length, room - fill_steps(spec, cell))))
        for cell in cells
    ]


def _require_fits(spec: EngineSpec, cell: Cell, steps: int) -> None:
    total = cell.kv_len + steps + WARM_UP_STEPS + 2 + fill_steps(spec, cell)
    for name, value, limit in (
        ("sequences", cell.batch, spec.pool.max_batch_size),
        ("prompt tokens", cell.kv_len, spec.max_input_len),
        ("tokens with all steps", total, spec.pool.max_kv_cache_capacity),
    ):
        if value > limit:
            raise ConfigError(
                f"cell {cell.batch}x{cell.kv_len} has {value} {name} and the engine takes "
                f"{limit}; pass a smaller `--cell` or fewer `--steps`"
            )


def _executor_name(engine_dir: Path, executor: str, device: int) -> str:
    """`reference` or `tensorrt`, once for all cells."""
    if executor != "auto":
        return executor
    opened = load_engine(engine_dir, executor, device=device)
    name = opened.name
    opened.close()
    return name


def _measure(
    engine_dir: Path, manifest: EngineManifest, name: str, cell: Cell, steps: int, *, device: int
) -> dict[str, Any]:
    spec = manifest.spec
    layer = spec.layers[0]
    times = time_steps(engine_dir, name, cell, steps, device=device)
    row: dict[str, Any] = {
        "model": manifest.source.name,
        "layers": len(spec.layers),
        "num_q_heads": layer.num_q_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "value_head_dim": layer.value_head_dim,
        "q_dtype": spec.activation_dtype.value,
        "kv_dtype": spec.kv_cache_dtype.value,
        "executor": name,
        "route": manifest.build.route,
        "batch": cell.batch,
        "kv_len": cell.kv_len,
        "steps": steps,
        **times.prefill.row("prefill_us"),
        **times.decode.row("decode_us"),
        **times.session.row("session_us"),
        "notes": list(times.notes),
    }
    if name != "tensorrt":
        return row | {"ours_share": None, "notes": [*times.notes, ON_A_CPU]}
    return row | kernel_columns(times, time_kernels(engine_dir, cell, device=device))


def kernel_columns(times: StepTimes, kernels: KernelTimes) -> dict[str, Any]:
    """What only a GPU has."""
    replay, others, alone = (
        statistics.median(each.values)
        for each in (kernels.step, kernels.others, kernels.ours_alone)
    )
    ours = replay - others
    notes = list(times.notes)
    if ours > TARGET * alone:
        notes.append(
            f"our kernels cost {ours / alone:.2f} of their own time inside the step, over the "
            f"target of {TARGET}"
        )
    return {
        **kernels.step.row("replay_us"),
        **kernels.others.row("replay_without_ours_us"),
        **kernels.ours_alone.row("ours_alone_us"),
        "host_us": round(statistics.median(times.decode.values) - replay, 2),
        "ours_share": round(ours / replay, 4),
        "ours_in_step_to_alone": round(ours / alone, 4),
        "plan": sorted(set(kernels.plans)),
        "notes": notes,
    }


def _against(
    engine_dir: Path, name: str, cell: Cell, steps: int, model: Path | None
) -> dict[str, Any]:
    """The same steps in onnxruntime on this machine's CPU."""
    peers: dict[str, Any] = {}
    if name == "tensorrt":
        times = time_steps(engine_dir, "reference", cell, steps, device=0)
        peers["onnxruntime_paged"] = {
            **times.prefill.row("prefill_us"),
            **times.decode.row("decode_us"),
        }
    if model is not None:
        peers["onnxruntime_dense"] = _time_dense(model, engine_dir, cell, steps)
    return {"peers_us": peers}


def _time_dense(model: Path, engine_dir: Path, cell: Cell, steps: int) -> dict[str, float]:
    vocabulary = read_manifest(engine_dir).spec.vocab_size
    decoder = open_decoder(model)
    random = np.random.default_rng(0)
    prefill, decode = 0.0, np.zeros(steps)
    for _ in range(cell.batch):
        decoder.start(cell.kv_len + steps + 1)
        begin = time.perf_counter()
        row = decoder.step(random.integers(0, vocabulary, cell.kv_len))
        prefill += time.perf_counter() - begin
        for number in range(steps):
            begin = time.perf_counter()
            row = decoder.step(_best(row))
            decode[number] += time.perf_counter() - begin
    return {
        **Times(values=(MICROSECONDS * prefill,)).row("prefill_us"),
        **Times(values=tuple((MICROSECONDS * decode).tolist())).row("decode_us"),
    }


def _best(logits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if not np.isfinite(logits).all():
        raise ExecutionError("the model's logits are no numbers; pass the model of the engine")
    return np.asarray([np.argmax(logits.astype(np.float32))], np.int64)


def _onnxruntime_version() -> str:
    import onnxruntime

    return f"{onnxruntime.__version__}, CPUExecutionProvider"


def _line(row: dict[str, Any]) -> str:
    share = row["ours_share"]
    ours = (
        "no kernel of ours ran"
        if share is None
        else f"ours {share:.1%} of a replay, {row['ours_in_step_to_alone']:.2f} of them alone"
    )
    names = {
        "onnxruntime_paged": "the reference executor",
        "onnxruntime_dense": "the un-rewritten model in onnxruntime",
    }
    peers = "".join(
        f"; {names[name]}: decode {peer['decode_us']:,.0f} us"
        for name, peer in row.get("peers_us", {}).items()
    )
    return (
        f"{row['batch']} x {row['kv_len']}: prefill {row['prefill_us']:,.0f} us, decode "
        f"{row['decode_us']:,.0f} us ({row['executor']}), session {row['session_us']:,.0f} us, "
        f"{ours}{peers}"
    )
