"""`paged-trt serve`: an engine behind the OpenAI API."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import click

from paged_trt.plugins.errors import PackageMissingError
from paged_trt.runtime.engine import EXECUTORS, load_engine
from paged_trt.runtime.executor import PIPELINES_BY_DEFAULT
from paged_trt.scripts.error_output import printable
from paged_trt.scripts.prompts import require_tokenizer

_MODULES = ("fastapi", "uvicorn", "prometheus_client", "jinja2")


@click.command(name="serve")
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0 takes a free one.",
)
@click.option("--model-name", help="Name that clients give; the directory's when left out.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File that holds the key.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the key.")
@click.option("--allow-anyone", is_flag=True, help="Let other machines in without a key.")
@click.option("--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True)
@click.option(
    "--device", type=int, default=0, show_default=True, help="CUDA device that runs the plan."
)
@click.option(
    "--pipeline/--no-pipeline",
    default=PIPELINES_BY_DEFAULT,
    show_default=True,
    help="Hand a decode step over to the GPU before the tokens of the one before are read; a CPU "
    "runs one after the other.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Requests that may wait for a step to take them; one more gets status 429.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(min=1),
    default=4 * 2**20,
    show_default=True,
    help="Longest request body; a longer one gets status 413.",
)
@click.option(
    "--template-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Time that the model's chat template may take for one conversation.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Time that open requests have to end after SIGTERM or Ctrl-C.",
)
def command(
    engine_dir: Path,
    host: str,
    port: int,
    model_name: str | None,
    api_key_file: Path | None,
    api_key_env: str | None,
    allow_anyone: bool,
    executor: str,
    device: int,
    pipeline: bool,
    max_waiting: int,
    max_body_bytes: int,
    template_seconds: float,
    drain_seconds: float,
) -> None:
    """Serve the engine in ENGINE_DIR to clients of the OpenAI API.

    Completions and chat completions with streaming under /v1, /v1/models, /health and /metrics.
    Listens on this machine alone unless told otherwise, in plain HTTP.

    \b
    Example:
      paged-trt serve engine --port 8000
      curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
          -d '{"model": "engine", "prompt": "The capital of France is"}'
    """
    _require_extra()
    from paged_trt.scripts.server.app import make_app
    from paged_trt.scripts.server.listen import bind, check_reach, read_key, run_server
    from paged_trt.scripts.server.service import LocalService

    key = read_key(file=api_key_file, variable=api_key_env)
    check_reach(host, key=key, allows_anyone=allow_anyone)
    # Whatever can be wrong is found before the weights are loaded.
    tokenizer = require_tokenizer(engine_dir)
    name = engine_dir.resolve().name if model_name is None else model_name
    with (
        bind(host, port) as bound,
        contextlib.closing(
            load_engine(engine_dir, executor, device=device, pipelines=pipeline)
        ) as engine,
    ):
        click.echo(f"executor: {engine.name}", err=True)
        for note in engine.notes:
            click.echo(printable(f"note: {note}"), err=True)
        engine.warm_up()
        service = LocalService(
            engine,
            tokenizer,
            model_name=name,
            max_waiting=max_waiting,
            template_seconds=template_seconds,
        )
        app = make_app(
            service,
            key=key,
            is_local=key is None and not allow_anyone,
            max_body_bytes=max_body_bytes,
            drain_seconds=drain_seconds,
        )
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{bound.getsockname()[1]}"
        run_server(
            app,
            service,
            bound,
            drain_seconds=drain_seconds,
            on_start=lambda: click.echo(f"`{name}` is served at {address}/v1", err=True),
        )


def _require_extra() -> None:
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise PackageMissingError(
            f"serving needs {', '.join(missing)}, which this environment lacks; "
            '`pip install "paged-trt[serve]"`'
        )
