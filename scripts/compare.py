"""`paged-trt compare`: engines against the model that they were built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.path_hints import MANIFEST_NAME, MODEL_SUFFIX
from paged_trt.runtime.compare import CompareOptions, compare_engines
from paged_trt.runtime.engine import EXECUTORS
from paged_trt.scripts.compare_files import ReportFiles
from paged_trt.scripts.compare_table import show, show_side_by_side
from paged_trt.scripts.prompts import open_tokenizer, read_prompts

EXIT_DIFFERENT = 1


def parse_prompt_lens(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """`1,127,128` as a tuple."""
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"`{value}` is no list of integers such as 1,127,128") from None


@click.command(name="compare")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("engine_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--executor",
    type=click.Choice(EXECUTORS),
    default="auto",
    show_default=True,
    help="What runs the engine; auto is TensorRT where there is a GPU.",
)
@click.option(
    "--device", type=int, default=0, show_default=True, help="CUDA device that runs the plan."
)
@click.option(
    "--new-tokens", type=int, default=16, show_default=True, help="Greedy tokens per prompt."
)
@click.option(
    "--prompt-lens",
    metavar="N,N,...",
    callback=parse_prompt_lens,
    help="Tokens of each prompt; left out, 1 and lengths around one and two pages.",
)
@click.option("--prompt", "texts", multiple=True, help="Text to continue; repeat it for a batch.")
@click.option(
    "--input-ids", "ids", multiple=True, help="Token ids such as 1,2,3; repeat it for a batch."
)
@click.option("--chat", is_flag=True, help="Wrap each --prompt in the model's chat template.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the token ids.")
@click.option("--atol", type=float, help="Absolute tolerance of the logits.")
@click.option(
    "--rtol",
    type=float,
    help="Tolerance of the logits as a part of the largest logit of the row. With neither "
    "option, the project's tolerance for the engine's types.",
)
@click.option(
    "--layers",
    is_flag=True,
    help="Also compare what each layer stores and computes with the engine's own model in "
    "onnxruntime; quantised pools are compared so in any case.",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the report there."
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path),
    help="Also write one page that opens without a network there.",
)
@click.option(
    "--png",
    "png_file",
    type=click.Path(path_type=Path),
    help="Also write histograms of the differences there.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    engine_dirs: tuple[Path, ...],
    new_tokens: int,
    prompt_lens: tuple[int, ...] | None,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    chat: bool,
    json_file: Path | None,
    html_file: Path | None,
    png_file: Path | None,
    **options: Any,
) -> None:
    """Decode the same prompts with MODEL in onnxruntime and with each ENGINE_DIR, and compare.

    MODEL is the ONNX model that the engines were built from. It runs one sequence at a time with
    an ordinary cache; an engine runs ragged batches on shuffled pages, prefilled whole and in
    chunks. The exit code is 1 where they differ by more than rounding.

    \b
    Example:
      paged-trt compare model.onnx engine
      paged-trt compare model.onnx engine --prompt-lens 127,129 --new-tokens 32 --json out.json
      paged-trt compare model.onnx engine-float16 engine-int8 --layers --html report.html
    """
    _require_order(model, engine_dirs)
    # Before the run, not after minutes of it.
    files = ReportFiles(json=json_file, html=html_file, png=png_file)
    files.require_places()
    prompts = _prompts(engine_dirs[0], prompt_lens, texts=texts, ids=ids, chat=chat)
    reports = compare_engines(
        model,
        engine_dirs,
        CompareOptions(
            num_new_tokens=new_tokens, prompt_lens=prompt_lens, prompts=prompts, **options
        ),
    )
    console = Console()
    for report in reports:
        if len(reports) > 1:
            click.echo(f"\n{report.engine}")
        show(report, console, layers=options["layers"])
    if len(reports) > 1:
        show_side_by_side(reports, console)
    files.write(reports)
    if not all(report.passed for report in reports):
        ctx.exit(EXIT_DIFFERENT)


def _require_order(model: Path, engine_dirs: tuple[Path, ...]) -> None:
    """Refuse an engine directory in the place of the model, where the model comes behind it."""
    models = [each for each in engine_dirs if each.suffix == MODEL_SUFFIX and each.is_file()]
    if models and (model / MANIFEST_NAME).is_file():
        engines = [str(each) for each in (model, *engine_dirs) if each not in models]
        raise ConfigError(
            f"the model comes first: `paged-trt compare {models[0]} {' '.join(engines)}`"
        )


def _prompts(
    engine_dir: Path,
    prompt_lens: tuple[int, ...] | None,
    *,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    chat: bool,
) -> list[tuple[int, ...]] | None:
    """Token ids of the prompts that were given; None where random ones are wanted."""
    if not texts and not ids and not chat:
        return None
    if prompt_lens is not None:
        raise ConfigError(
            "`--prompt-lens` makes random prompts; pass it, or `--prompt` and `--input-ids`"
        )
    prompts = read_prompts(open_tokenizer(engine_dir), texts=texts, ids=ids, chat=chat)
    return [prompt.token_ids for prompt in prompts]
