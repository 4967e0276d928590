"""`paged-trt build`: an ONNX model in, an engine directory out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from paged_trt.builder.config import BuildConfig
from paged_trt.builder.pipeline import BuildRequest, PagePlan, build_engine_directory, plan_build
from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.build_check import check_build, require_checkable
from paged_trt.scripts.cli import configure_logging
from paged_trt.scripts.compare import EXIT_DIFFERENT
from paged_trt.scripts.error_output import plain

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float8", "int8")


@click.command(name="build")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Engine directory to write.")
@click.option("--max-batch-size", type=int, required=True, help="Sequences of one step.")
@click.option("--max-input-len", type=int, required=True, help="Longest prompt, in tokens.")
@click.option(
    "--max-kv-cache-capacity",
    type=int,
    required=True,
    help="Tokens that one sequence may hold, prompt and answer.",
)
@click.option(
    "--max-num-tokens",
    type=int,
    help="Most token rows of one step [default: max-input-len]; longer prompts go in chunks.",
)
@click.option(
    "--retained-pages", type=int, help="Pages on top of the minimum, for reuse across requests."
)
@click.option("--kv-pool-pages", type=int, help="The whole page count, instead of the minimum.")
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(KV_CACHE_DTYPES),
    default="auto",
    show_default=True,
    help="Element type of the KV pool; auto is the model's own.",
)
@click.option(
    "--kv-scales",
    type=click.Path(path_type=Path),
    help="Per-head scales (safetensors) of a float8 or int8 pool.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16"]),
    help="Convert the model's weights and activations to this type first.",
)
@click.option(
    "--logits",
    type=click.Choice(["last", "all"]),
    default="last",
    show_default=True,
    help="Token rows that get logits: the last of each sequence, or all.",
)
@click.option(
    "--greedy-in-engine",
    is_flag=True,
    help="Also choose the next tokens in the engine: greedy steps then copy no logits.",
)
@click.option(
    "--layer-outputs",
    is_flag=True,
    help="Also give each layer's attention output, for `compare --layers` on the engine itself; "
    "not for serving.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Folder with tokenizer.json [default: beside MODEL].",
)
@click.option(
    "--attention-plan",
    help="Fix the plan: direct, balanced, cluster:BLOCKS, counter:BLOCKS or split:TOKENS; gather: "
    "of prefill steps over a float8 or int8 pool.",
)
@click.option(
    "--float16-sums",
    is_flag=True,
    help="Let TensorRT sum float16 products in float16: less exact, and rarely faster.",
)
@click.option("--no-reference", is_flag=True, help="Leave model.onnx out of the engine directory.")
@click.option("--dry-run", is_flag=True, help="Show the page plan and all bytes; build nothing.")
@click.option(
    "--save-onnx", type=click.Path(path_type=Path), help="Also write the rewritten model here."
)
@click.option("--force", is_flag=True, help="Replace the engine directory that is there.")
@click.option(
    "--check",
    is_flag=True,
    help="Then compare model and rewritten model in onnxruntime; exit 1 where they differ.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show TensorRT's log.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    output: Path | None,
    tokenizer: Path | None,
    no_reference: bool,
    dry_run: bool,
    save_onnx: Path | None,
    force: bool,
    check: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Turn MODEL into a paged engine.

    MODEL is an ordinary ONNX language model with a KV cache; its weights may lie beside it.
    Everything is checked before anything is written.

    \b
    Example:
      paged-trt build model.onnx -o engine --max-batch-size 4 \\
          --max-input-len 512 --max-kv-cache-capacity 1024 --dry-run
      paged-trt build model.onnx -o engine --max-batch-size 4 \\
          --max-input-len 512 --max-kv-cache-capacity 1024 --check
    """
    if output is None and not dry_run:
        raise ConfigError("`-o ENGINE_DIR` is missing; pass it, or `--dry-run` to build nothing")
    if check:
        require_checkable(model, reference=not no_reference, dry_run=dry_run)
    config = BuildConfig(**options)
    request = BuildRequest(
        model=model,
        target=output,
        config=config,
        tokenizer=tokenizer,
        reference=not no_reference,
        save_onnx=save_onnx,
        force=force,
    )
    console = Console(stderr=not dry_run)
    if dry_run:
        console.print(page_plan_table(plan_build(request)))
        return
    if verbose:
        configure_logging("DEBUG")
    manifest = build_engine_directory(
        request, on_plan=lambda plan: console.print(page_plan_table(plan))
    )
    click.echo(
        f"{output}: {manifest.spec.pool.num_pages} pages, {len(manifest.spec.layers)} layers"
    )
    if check and output is not None and not check_build(model, output, console):
        ctx.exit(EXIT_DIFFERENT)


def page_plan_table(plan: PagePlan) -> Table:
    """What a build is going to hold, in pages and bytes."""
    spec = plan.spec
    table = Table(title="Page plan", show_header=False, title_justify="left")
    rows: list[tuple[str, str]] = [
        ("model", f"{plan.model_name}, dialect {plan.dialect}"),
        ("attention layers", str(len(spec.layers))),
        ("pages, minimum", str(spec.pool.minimum_pages)),
        ("pages, retained", str(spec.pool.retained_pages)),
        ("pages of every pool", str(spec.pool.num_pages)),
        ("page-table width", str(spec.pool.max_pages_per_seq)),
        ("activations, KV cache", f"{spec.activation_dtype.value}, {spec.kv_cache_dtype.value}"),
        ("bytes, KV pools", f"{plan.pool_bytes:,}"),
        ("bytes, KV cache of one token", f"{plan.kv_bytes_per_token:,}"),
        ("bytes, page table", f"{plan.page_table_bytes:,}"),
        ("bytes, weights", f"{plan.weight_bytes:,}"),
        ("bytes, attention workspace bound", f"{plan.workspace_bytes:,}"),
        *([("bytes, layer outputs", f"{plan.layer_output_bytes:,}")] if spec.layer_outputs else []),
        ("bytes, sum", f"{plan.total_bytes:,}"),
    ]
    for row in rows:
        # Text, not markup: a file's name may hold brackets.
        table.add_row(*map(plain, row))
    return table
