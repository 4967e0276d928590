"""`paged-trt calibrate`: sample prompts in, the scales of a quantised KV pool out."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paged_trt.builder.artifact import tokenizer_sources
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, SequenceError
from paged_trt.plugins.kv_scales import DTYPE_ENTRY, write_scales_file
from paged_trt.plugins.manifest import file_record
from paged_trt.plugins.version import version
from paged_trt.runtime.calibration import silent_heads
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.calibration import Calibration, calibrate
from paged_trt.scripts.calibration_prompts import BUILT_IN, read_prompt_file
from paged_trt.scripts.error_output import json_option, plain
from paged_trt.scripts.files import require_writable
from paged_trt.scripts.prompts import read_prompts


@click.command(name="calibrate")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Scales file to write."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["float8", "int8"]),
    default="float8",
    show_default=True,
    help="Element type of the pool that the scales are for.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    help="Convert the model first, as the build will.",
)
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path),
    help="Text file with one prompt a line [default: a small built-in set].",
)
@click.option(
    "--input-ids", "ids", multiple=True, help="Token ids such as 1,2,3 instead; repeat it."
)
@click.option("--chat", is_flag=True, help="Wrap each prompt in the model's chat template.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Folder with tokenizer.json [default: beside MODEL].",
)
@click.option(
    "--max-prompt-len",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Longer prompts are cut.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Greedy tokens of each prompt.",
)
@json_option
def command(
    model: Path,
    output: Path,
    kv_cache_dtype: str,
    dtype: str | None,
    prompt_file: Path | None,
    ids: tuple[str, ...],
    chat: bool,
    tokenizer: Path | None,
    max_prompt_len: int,
    new_tokens: int,
    as_json: bool,
) -> None:
    """Run sample prompts through MODEL on the CPU and write the scales of its KV pool.

    MODEL is what `paged-trt build` takes. Its rewrite runs in onnxruntime with an ordinary
    pool; every scale maps the largest magnitude of a head to the largest number of the type.
    Every fourth prompt is held out: it runs once more with the quantised pool, and the report
    says what that changed.

    \b
    Example:
      paged-trt calibrate model.onnx -o kv_scales.safetensors --kv-cache-dtype float8
      paged-trt build model.onnx -o engine-float8 --max-batch-size 4 --max-input-len 512 \\
          --max-kv-cache-capacity 1024 --kv-cache-dtype float8 \\
          --kv-scales kv_scales.safetensors
    """
    require_writable(output, option="-o")
    prompts = _prompts(model, tokenizer, prompt_file, ids=ids, chat=chat, longest=max_prompt_len)
    found = calibrate(model, prompts, DType(kv_cache_dtype), dtype=dtype, num_new_tokens=new_tokens)
    metadata = {
        "created_by": f"paged-trt {version()}",
        DTYPE_ENTRY: kv_cache_dtype,
        "model_sha256": file_record(model).sha256,
        "tokens": str(found.maxima.num_tokens),
    }
    write_scales_file(output, found.scales, metadata=metadata)
    if as_json:
        report = to_json(found, output, kv_cache_dtype)
        click.echo(json.dumps(report, indent=1, allow_nan=False))
        return
    show(found, kv_cache_dtype, Console())
    click.echo(
        f"{output}: scales of {len(found.scales)} layers from {found.num_prompts} prompts, "
        f"{found.maxima.num_tokens} tokens"
    )


def _prompts(
    model: Path,
    tokenizer: Path | None,
    prompt_file: Path | None,
    *,
    ids: tuple[str, ...],
    chat: bool,
    longest: int,
) -> list[tuple[int, ...]]:
    """Token ids of every prompt, cut to `longest`."""
    if prompt_file is not None and ids:
        raise ConfigError("`--prompts` and `--input-ids` exclude each other; pass one of the two")
    texts: Sequence[str] = ()
    found = None
    if not ids:
        texts = BUILT_IN if prompt_file is None else read_prompt_file(prompt_file)
        sources = tokenizer_sources(tokenizer, model)
        if not sources or sources[0].name != "tokenizer.json":
            raise ConfigError(
                f"there is no tokenizer.json beside {model}, so text cannot be read; pass "
                "`--tokenizer FOLDER`, or `--input-ids 1,2,3`"
            )
        found = Tokenizer(sources[0].parent)
    prompts = read_prompts(found, texts=texts, ids=ids, chat=chat)
    for index, prompt in enumerate(prompts):
        if not prompt.token_ids:
            raise SequenceError(f"prompt {index} has no token; take it out")
    return [prompt.token_ids[:longest] for prompt in prompts]


def show(found: Calibration, kv_cache_dtype: str, console: Console) -> None:
    """Print what quantising cost, and what to know of the scales."""
    title = f"{kv_cache_dtype} pool against {found.baseline_dtype.value}, held-out prompts"
    table = Table(title=title, title_justify="left")
    for name in ("prompt", "tokens", "max |d logits|", "of the tolerance", "greedy tokens"):
        table.add_column(name, justify="left" if name == "greedy tokens" else "right")
    for index, result in enumerate(found.results):
        difference = result.token_difference
        tokens = f"{result.num_steps} equal" if difference is None else (
            f"differ at step {difference.step}: gap {difference.gap:.3g}, tie below "
            f"{difference.bound:.3g}"
        )  # fmt: skip
        cells = (
            index,
            result.prompt_len,
            f"{result.max_difference:.4f} @{result.worst_step}",
            f"{result.max_difference / result.limit:.2f}" if result.limit else "-",
            tokens,
        )
        table.add_row(*map(plain, cells))
    console.print(table)
    console.print(plain(f"tolerance: {found.tolerance.reason}"), soft_wrap=True)
    for line in (*found.notes, *_silent(found)):
        console.print(plain(f"note: {line}"), soft_wrap=True)


def to_json(found: Calibration, output: Path, kv_cache_dtype: str) -> dict[str, Any]:
    """Everything as JSON types."""
    differences = [result.max_difference for result in found.results]
    largest = max(differences)
    return {
        "output": str(output),
        "kv_cache_dtype": kv_cache_dtype,
        "baseline_dtype": found.baseline_dtype.value,
        "layers": len(found.scales),
        "prompts": found.num_prompts,
        "tokens": found.maxima.num_tokens,
        "max_logit_difference": largest if math.isfinite(largest) else None,
        "tokens_equal": all(result.tokens_equal for result in found.results),
        "tolerance": dataclasses.asdict(found.tolerance),
        "held_out": [result.to_json() for result in found.results],
        "notes": [*found.notes, *_silent(found)],
    }


def _silent(found: Calibration) -> list[str]:
    heads = silent_heads(found.maxima)
    if not heads:
        return []
    return [
        f"{len(heads)} heads held nothing but zeros ({', '.join(heads[:3])}): their scales are a "
        "guess; calibrate with more prompts"
    ]
