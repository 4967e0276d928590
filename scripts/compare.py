"""`paged-trt compare`: an engine against the model that it was built from."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.compare import CompareOptions, ComparisonReport, compare_engine
from paged_trt.runtime.comparison import SequenceResult
from paged_trt.runtime.engine import EXECUTORS
from paged_trt.scripts.files import write_text
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
@click.argument("engine_dir", type=click.Path(path_type=Path))
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
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the report there."
)
@click.pass_context
def command(
    ctx: click.Context,
    *,
    model: Path,
    engine_dir: Path,
    executor: str,
    device: int,
    new_tokens: int,
    prompt_lens: tuple[int, ...] | None,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    chat: bool,
    seed: int,
    atol: float | None,
    rtol: float | None,
    json_file: Path | None,
) -> None:
    """Decode the same prompts with MODEL in onnxruntime and with ENGINE_DIR, and compare.

    MODEL is the ONNX model that the engine was built from. It runs one sequence at a time with
    an ordinary cache; the engine runs ragged batches on shuffled pages, prefilled whole and in
    chunks. The exit code is 1 where they differ by more than rounding.

    \b
    Example:
      paged-trt compare model.onnx engine
      paged-trt compare model.onnx engine --prompt-lens 127,129 --new-tokens 32 --json out.json
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        # Before the run, not after minutes of it.
        raise ConfigError(f"{json_file.parent} is no directory; create it first")
    if json_file is not None and json_file.is_dir():
        raise ConfigError(f"{json_file} is a directory; pass the name of a file to `--json`")
    prompts = _prompts(engine_dir, prompt_lens, texts=texts, ids=ids, chat=chat)
    report = compare_engine(
        model,
        engine_dir,
        CompareOptions(
            executor=executor,
            device=device,
            num_new_tokens=new_tokens,
            prompt_lens=prompt_lens,
            prompts=prompts,
            seed=seed,
            atol=atol,
            rtol=rtol,
        ),
    )
    show(report, Console())
    if json_file is not None:
        write_json(report, json_file)
    if not report.passed:
        ctx.exit(EXIT_DIFFERENT)


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


def show(report: ComparisonReport, console: Console) -> None:
    """Print the table, then what was run, what was not, and the verdict.

    A difference is printed as `value @step`, the step where it is largest for its tolerance.
    """
    console.print(_table(report))
    for label, lines in (
        ("token difference", _token_differences(report)),
        ("tolerance", [_tolerance(report)]),
        ("source", [_source(report)]),
        ("note", report.notes),
        ("failed step", report.failures),
        ("not run", report.not_run),
    ):
        for line in lines:
            # Text, not markup: paths and messages may hold brackets.
            console.print(Text(f"{label}: {line}"), soft_wrap=True)
    console.print(Text(_verdict(report)), soft_wrap=True)


def write_json(report: ComparisonReport, path: Path) -> None:
    """Write the report as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(path, json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n")


def _table(report: ComparisonReport) -> Table:
    table = Table(
        title="Engine against model",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits 80 columns
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("iteration", no_wrap=True)
    for name in ("seq", "prompt", "steps", "max |d logits|", "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, results in report.iterations:
        for index, result in enumerate(results):
            table.add_row(name, str(index), *_cells(result))
    return table


def _cells(result: SequenceResult) -> tuple[str, ...]:
    return (
        str(result.prompt_len),
        f"{result.steps_compared}/{result.num_steps}",
        f"{result.max_difference:.3g} @{result.worst_step}",
        f"{result.limit:.3g}",
        "equal" if result.tokens_equal else "excused" if result.excused else "differ",
        "[green]✓[/green]" if result.passed else "[red]differs[/red]",
    )


def _token_differences(report: ComparisonReport) -> list[str]:
    return [
        f"{name}, sequence {index}, {result.token_difference}"
        for name, results in report.iterations
        for index, result in enumerate(results)
        if result.token_difference is not None
    ]


def _tolerance(report: ComparisonReport) -> str:
    tolerance = report.tolerance
    return (
        f"{tolerance.atol:.3g} + {tolerance.rtol:.3g} * largest |logit|; tokens tie below "
        f"{tolerance.tie_rtol:.3g} * largest |logit| ({tolerance.reason})"
    )


def _source(report: ComparisonReport) -> str:
    found, built = report.source_sha256
    if report.same_source:
        return f"the engine was built from this file (sha256 {found[:12]})"
    return f"the engine was built from another file (sha256 {built[:12]}, this one is {found[:12]})"


def _verdict(report: ComparisonReport) -> str:
    sequences = [result for _, results in report.iterations for result in results]
    agreed = sum(result.passed for result in sequences)
    excused = sum(result.excused for result in sequences)
    return (
        f"{'agrees' if report.passed else 'differs'}: {agreed} of {len(sequences)} sequences "
        f"agree ({excused} with an excused tie), engine run by the {report.executor} executor"
    )
