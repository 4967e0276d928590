"""`paged-trt bench rewrite`: time and memory of rewriting a large model with external data."""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.example_models.config import Dialect, LlamaConfig
from paged_trt.scripts.example_models.llama import write_llama
from paged_trt.scripts.results import Results, commit

METHOD: Final = (
    "a Llama with random weights is written with external data; a fresh process loads, surveys, "
    "rewrites and saves it. Seconds by the host clock, median, minimum and maximum of the runs; "
    "memory is the process's largest resident set (VmHWM), mapped file pages included, the largest "
    "of the runs"
)
_LAYER: Final = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_positions=4096,
    bos_token_id=1,
    eos_token_id=2,
)
_GIGABYTE: Final = 10**9
_COPIES: Final = 2.2
"""Disk that a run needs, in sizes of the model: it, its rewrite, and some to spare."""
_ROW: Final = ("seconds_load_and_survey", "seconds_rewrite", "seconds_save")


@click.command(name="rewrite")
@click.option("--gigabytes", type=float, default=8.0, show_default=True, help="Size of the model.")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder for the model, which is deleted afterwards [default: the system's].",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def command(gigabytes: float, runs: int, work: Path | None, output: Path) -> None:
    """Write a large model, rewrite it in fresh processes, write a results file.

    \b
    Example:
      paged-trt bench rewrite --gigabytes 8 -o results.json
    """
    config = _config_of_size(gigabytes)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        _require_disk(Path(folder), gigabytes)
        source = Path(folder) / "model.onnx"
        write_llama(source, config, _Weights(config), dialect=Dialect.ATTENTION23_PAST)
        rows = [_measure(source, dtype, runs) for dtype in ("float16", "bfloat16")]
    results = Results(
        kind="rewrite",
        commit=commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=f"none ({platform.processor() or platform.machine()})",
        driver="none",
        cuda="none",
        tensorrt="none",
        method=METHOD,
        rows=rows,
    )
    results.write(output)
    for row in rows:
        click.echo(f"{row['dtype']}: {row['peak_bytes']:,} bytes, {row['seconds']:.1f} s")


class _Weights(Mapping[str, npt.NDArray[Any]]):
    """Random weights, each made when it is asked for."""

    def __init__(self, config: LlamaConfig) -> None:
        self._shapes = config.weight_shapes()

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        shape = self._shapes[name]
        row = np.random.default_rng(len(name)).standard_normal(shape[-1]).astype(np.float16)
        return np.broadcast_to(row, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _config_of_size(gigabytes: float) -> LlamaConfig:
    """As many layers as fill that many bytes of float16."""

    def size(config: LlamaConfig) -> int:
        elements = sum(int(np.prod(shape)) for shape in config.weight_shapes().values())
        return elements * DType.FLOAT16.itemsize

    one, two = size(_LAYER), size(dataclasses.replace(_LAYER, num_layers=2))
    layers = 1 + round((gigabytes * _GIGABYTE - one) / (two - one))
    if layers < 1:
        raise ConfigError(f"`--gigabytes` {gigabytes} is under {one / _GIGABYTE:.1f}, one layer")
    return dataclasses.replace(_LAYER, num_layers=layers)


def _require_disk(folder: Path, gigabytes: float) -> None:
    free, needed = shutil.disk_usage(folder).free, int(_COPIES * gigabytes * _GIGABYTE)
    if free < needed:
        raise ConfigError(
            f"{folder} has {free:,} bytes free and {needed:,} are needed; pass another `--work`, "
            "or a smaller `--gigabytes`"
        )


def _measure(source: Path, dtype: str, runs: int) -> dict[str, Any]:
    found = []
    # A fresh process each: memory of the one before would count.
    context = multiprocessing.get_context("spawn")
    for _ in range(runs):
        with context.Pool(1) as pool:
            found.append(pool.apply(_rewrite_once, (source, dtype)))
    seconds = [sum(run[name] for name in _ROW) for run in found]
    return {
        "model_bytes": sum(file.stat().st_size for file in source.parent.glob(f"{source.name}*")),
        "dtype": dtype,
        "runs": runs,
        "peak_bytes": max(run["peak_bytes"] for run in found),
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        **{name: statistics.median(run[name] for run in found) for name in _ROW},
    }


def _rewrite_once(source: Path, dtype: str) -> dict[str, float]:
    times = [time.perf_counter()]
    model = load_model(source)
    facts = survey(model)
    times.append(time.perf_counter())
    config = BuildConfig(
        max_batch_size=4, max_input_len=1024, max_kv_cache_capacity=4096, dtype=dtype
    )
    rewrite(model, facts=facts, spec=resolve(config, facts))
    times.append(time.perf_counter())
    with tempfile.TemporaryDirectory(dir=source.parent) as target:
        save_model(model, Path(target))
        times.append(time.perf_counter())
    seconds = np.diff(times).tolist()
    return {**dict(zip(_ROW, seconds, strict=True)), "peak_bytes": _peak_bytes()}


def _peak_bytes() -> int:
    """Largest resident set of this process; `getrusage` would count its parent's, too."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("this system has no VmHWM in /proc/self/status; run on Linux")
