"""`paged-trt run`: prompts in, text out, as one ragged batch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.manifest import read_manifest
from paged_trt.runtime.engine import EXECUTORS, load_engine
from paged_trt.runtime.requests import SamplingSpec
from paged_trt.runtime.session import Generation, Session
from paged_trt.runtime.snapshot import SessionRecorder
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.error_output import json_option, plain
from paged_trt.scripts.files import require_writable
from paged_trt.scripts.prompts import Prompt, open_tokenizer, read_prompts


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
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token."
)
@click.option("--top-k", type=int, default=0, help="Likeliest tokens to draw from.  [all]")
@click.option("--top-p", type=float, default=1.0, help="Their share of probability.  [all]")
@click.option("--seed", type=int, help="Draws the same tokens again.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="Write who held which page to this JSON file, for `paged-trt inspect --session`.",
)
@json_option
def command(
    engine_dir: Path,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    chat: bool,
    executor: str,
    device: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Continue prompts with the engine in ENGINE_DIR, all in one ragged batch.

    \b
    Example:
      paged-trt run engine --prompt "The capital of France is" --max-new-tokens 16
      paged-trt run engine --input-ids 1,2,3 --input-ids 4,5
      paged-trt run engine --prompt "Hello" --record session.json
    """
    require_writable(record, option="--record")
    if not texts and not ids:
        raise ConfigError("there is nothing to run; pass `--prompt TEXT` or `--input-ids 1,2,3`")
    sampling = SamplingSpec(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    tokenizer = open_tokenizer(engine_dir)
    prompts = read_prompts(tokenizer, texts=texts, ids=ids, chat=chat)
    engine = load_engine(engine_dir, executor, device=device)
    recorder = None
    if record is not None:
        sha256 = read_manifest(engine_dir).geometry_sha256
        engine = recorder = SessionRecorder(engine, record, geometry_sha256=sha256)
    with Session(engine, eos_token_ids=tokenizer.eos_token_ids if tokenizer else ()) as session:
        if recorder is not None:
            recorder.take = session.snapshot
        notes = Console(stderr=True, highlight=False)
        notes.print(f"executor: {engine.name}", style="dim")
        unused = _unused(temperature, top_k=top_k, top_p=top_p, seed=seed)
        for note in (*engine.notes, *unused):
            notes.print(plain(f"note: {note}"), style="dim", soft_wrap=True)
        stream = None if as_json else _stream(prompts, tokenizer)
        with stream or contextlib.nullcontext():
            generations = session.generate(
                [prompt.token_ids for prompt in prompts],
                max_new_tokens,
                on_token=stream,
                sampling=sampling,
            )
    if as_json:
        click.echo(json.dumps(_report(prompts, generations, tokenizer, engine.name), indent=2))
    elif isinstance(stream, _BatchStream):
        _show(prompts, generations, tokenizer)


def _unused(temperature: float, *, top_k: int, top_p: float, seed: int | None) -> list[str]:
    """A note on options that choose among draws where nothing is drawn."""
    given = {"--top-k": top_k != 0, "--top-p": top_p != 1, "--seed": seed is not None}
    names = " and ".join(f"`{option}`" for option, is_given in given.items() if is_given)
    if temperature != 0 or not names:
        return []
    return [
        f"{names} changed nothing: `--temperature 0` takes the likeliest token; pass "
        "`--temperature 1`, or less, to draw"
    ]


class _Text:
    """Text of one sequence as its tokens come; ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = tokenizer.stream() if tokenizer else None
        self._separator = ""

    def push(self, token: int) -> str:
        """What `token` adds."""
        if self._stream is not None:
            return self._stream.push(token)
        piece = f"{self._separator}{token}"
        self._separator = ","
        return piece

    def finish(self) -> str:
        """What an incomplete character at the end adds."""
        return self._stream.finish() if self._stream else ""


class _OneStream:
    """Writes the text of a single sequence as it comes."""

    def __init__(self, text: _Text) -> None:
        self._text = text

    def __call__(self, index: int, token: int) -> None:
        click.echo(self._text.push(token), nl=False)

    def __enter__(self) -> _OneStream:
        return self

    def __exit__(self, *_: object) -> None:
        # After an interrupt too: the shell's prompt starts on a line of its own.
        click.echo(self._text.finish())


class _BatchStream:
    """Shows all sequences of a batch growing, on a terminal; silent where there is none."""

    def __init__(self, prompts: list[Prompt], tokenizer: Tokenizer | None) -> None:
        self._labels = [prompt.label for prompt in prompts]
        self._streams = [_Text(tokenizer) for _ in prompts]
        self._texts = ["" for _ in prompts]
        self._live = Live(console=Console(), transient=True, auto_refresh=False)

    def __call__(self, index: int, token: int) -> None:
        self._texts[index] += self._streams[index].push(token)
        table = Table(show_header=False, box=None)
        for label, text in zip(self._labels, self._texts, strict=True):
            table.add_row(Text(label, style="bold"), Text(text.strip()))
        self._live.update(table, refresh=self._live.console.is_terminal)

    def __enter__(self) -> _BatchStream:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._live.console.is_terminal:
            # Live prints what it shows last where it cannot redraw; the caller prints it too.
            self._live.update("")
        self._live.stop()


def _stream(prompts: list[Prompt], tokenizer: Tokenizer | None) -> _OneStream | _BatchStream:
    if len(prompts) == 1:
        return _OneStream(_Text(tokenizer))
    return _BatchStream(prompts, tokenizer)


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
