"""`paged-trt polygraphy`: what `polygraphy run` needs to check an engine."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from paged_trt.plugins.manifest import MODEL_FILE, PLAN_FILE
from paged_trt.runtime.polygraphy_files import write_polygraphy_files
from paged_trt.scripts.compare import parse_prompt_lens


@click.command(name="polygraphy")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="New folder to write."
)
@click.option(
    "--prompt-lens",
    metavar="N,N,...",
    callback=parse_prompt_lens,
    help="Tokens of each prompt; left out, 1 and lengths around one and two pages.",
)
@click.option(
    "--new-tokens", type=int, default=3, show_default=True, help="Tokens after each prompt."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of tokens and pages.")
def command(
    *,
    engine_dir: Path,
    output: Path,
    prompt_lens: tuple[int, ...] | None,
    new_tokens: int,
    seed: int,
) -> None:
    """Write a model and a data loader with which `polygraphy run` checks ENGINE_DIR.

    The model is the engine's own, rewritten once more so that it has no pools: it computes each
    step from the whole history. The commands that are printed compare the two, and make golden
    files on a CPU that `--paged-trt` is checked against on a machine with a GPU.

    \b
    Example:
      paged-trt polygraphy engine -o check
    """
    files = write_polygraphy_files(
        engine_dir, output, prompt_lens=prompt_lens, num_new_tokens=new_tokens, seed=seed
    )
    click.echo(f"{output}: {files.num_steps} steps")
    inputs, outputs = str(output / "inputs"), str(output / "outputs")
    loader = ["--data-loader-script", str(files.loader)]
    # The runners find the engine by the file of it that is named.
    model, plan = str(engine_dir / MODEL_FILE), str(engine_dir / PLAN_FILE)
    for title, words in (
        (
            "the engine's model against one that carries no pools, on a CPU",
            [
                *(str(files.model), "--onnxrt", "--paged-ref", "--paged-engine", str(engine_dir)),
                *(*loader, *files.options),
            ],
        ),
        (
            "golden files, on a CPU",
            [model, "--paged-ref", *loader, "--save-inputs", inputs, "--save-outputs", outputs],
        ),
        (
            "the plan against them, on a GPU",
            [
                *(plan, "--paged-trt", "--load-inputs", inputs, "--load-outputs", outputs),
                *files.options,
            ],
        ),
    ):
        words = ["polygraphy", "run", *words]
        click.echo(f"\n# {title}\n{shlex.join(words)}")
