"""`paged-trt run`: prompts in, text out, as one ragged batch."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.session import Generation, Session
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.prompts import Prompt, open_tokenizer, read_prompts

EXECUTORS = ("auto", "tensorrt", "reference")


@click.command(name="run")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--prompt", "texts", multiple=True, help="Text to continue; repeat it for a batch.")
@click.option(
    "--input-ids", "ids", multiple=True, help="Token ids such as 1,2,3; repeat it for a batch."
)
@click.option("--chat", is_flag=True, help="Wrap each --prompt in the model's chat template.")
@click.option("--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True)
@click.option(
    "--device", type=int, default=0, show_default=True, help="CUDA device that runs the plan."
)
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Write JSON to standard output.")
def command(
    engine_dir: Path,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    chat: bool,
    executor: str,
    device: int,
    max_new_tokens: int,
    as_json: bool,
) -> None:
    """Continue prompts with the engine in ENGINE_DIR, greedily, all in one ragged batch.

    \b
    Example:
      paged-trt run engine --prompt "The capital of France is" --max-new-tokens 16
      paged-trt run engine --input-ids 1,2,3 --input-ids 4,5
    """
    if not texts and not ids:
        raise ConfigError("there is nothing to run; pass `--prompt TEXT` or `--input-ids 1,2,3`")
    tokenizer = open_tokenizer(engine_dir)
    prompts = read_prompts(tokenizer, texts=texts, ids=ids, chat=chat)
    engine = load_engine(engine_dir, executor, device=device)
    with Session(engine, eos_token_ids=tokenizer.eos_token_ids if tokenizer else ()) as session:
        notes = Console(stderr=True, highlight=False)
        notes.print(f"executor: {engine.name}", style="dim")
        for note in engine.notes:
            notes.print(f"note: {note}", style="dim")
        streamed = len(prompts) == 1 and not as_json
        stream = _Streamer(tokenizer) if streamed else None
        generations = session.generate(
            [prompt.token_ids for prompt in prompts], max_new_tokens, on_token=stream
        )
    if stream is not None:
        click.echo(stream.finish())
    elif as_json:
        click.echo(json.dumps(_report(prompts, generations, tokenizer, engine.name), indent=2))
    else:
        _show(prompts, generations, tokenizer)


class _Streamer:
    """Writes text, or ids without a tokenizer, as it comes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._text = tokenizer.stream() if tokenizer else None
        self._separator = ""

    def __call__(self, index: int, token: int) -> None:
        if self._text is not None:
            click.echo(self._text.push(token), nl=False)
        else:
            click.echo(f"{self._separator}{token}", nl=False)
            self._separator = ","

    def finish(self) -> str:
        return self._text.finish() if self._text else ""


def _text(generation: Generation, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ",".join(map(str, generation.tokens))
    return tokenizer.decode(generation.tokens)


def _show(
    prompts: list[Prompt], generations: list[Generation], tokenizer: Tokenizer | None
) -> None:
    for prompt, generation in zip(prompts, generations, strict=True):
        click.echo(click.style(f"> {prompt.label}", bold=True))
        click.echo(_text(generation, tokenizer).strip())
        click.echo()


def _report(
    prompts: list[Prompt],
    generations: list[Generation],
    tokenizer: Tokenizer | None,
    executor: str,
) -> dict[str, object]:
    return {
        "executor": executor,
        "sequences": [
            {
                "prompt": prompt.text,
                "input_ids": list(prompt.token_ids),
                "tokens": list(generation.tokens),
                "text": _text(generation, tokenizer) if tokenizer else None,
                "finish_reason": generation.finish_reason.value,
            }
            for prompt, generation in zip(prompts, generations, strict=True)
        ],
    }
