"""A server in a thread, over the toy engine or over an executor that recites a text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import openai
import pytest
import uvicorn
from engine_dirs import write_engine_dir
from polling import PATIENCE_SECONDS, wait_until
from session.gated_executor import StepGate
from session.history_executor import HistoryExecutor
from session.paged_toy import make_spec

from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.session import Session
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import TOY, write_toy
from paged_trt.scripts.server.app import make_app
from paged_trt.scripts.server.listen import bind
from paged_trt.scripts.server.service import LocalService

MODEL = "toy"
END_OF_PROMPT = "|"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:" + END_OF_PROMPT + "{% endif %}"
)


def write_toy_engine(folder: Path, **limits: Any) -> Path:
    """An engine directory with a byte tokenizer and a chat template, named as the model is."""
    write_toy(folder / "source", Dialect("attention23-past"))
    return write_engine_dir(
        folder / "source" / "model.onnx", folder / MODEL, chat_template=TEMPLATE, **limits
    )


class Reciter(HistoryExecutor):
    """Answers every prompt that ends with `|` with one text, and then the end token.

    Steps go through `gate`, and from step `failing_step` on every one fails. Tokens are bytes.
    """

    name = "reciter"

    def __init__(self, text: str, *, capacity: int = 384, max_batch_size: int = 3) -> None:
        spec = make_spec(capacity=capacity, max_batch_size=max_batch_size)
        super().__init__(dataclasses.replace(spec, vocab_size=TOY.vocab_size))
        self._tokens = [*text.encode(), TOY.eos_token_id]
        self.gate = StepGate()
        self.failing_step: int | None = None

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        self.gate.go_through()
        if self.failing_step is not None and len(self.shapes) >= self.failing_step:
            self.failure = ExecutionError("the device is gone")
        logits = super().step(inputs)
        logits[:] = 0
        for row in range(len(inputs.past_lens)):
            history = self._history(inputs, row)
            if END_OF_PROMPT.encode()[0] in history:
                said = len(history) - 1 - history[::-1].index(END_OF_PROMPT.encode()[0])
                said = len(history) - 1 - said
                logits[row, self._tokens[min(said, len(self._tokens) - 1)]] = 50.0
        return logits

    def _history(self, inputs: StepInputs, row: int) -> list[int]:
        offsets = inputs.query_start_offsets
        length = int(inputs.past_lens[row]) + int(offsets[row + 1] - offsets[row])
        pages = inputs.page_table[row]
        return [int(token) for token in self.pool[pages[pages >= 0]].ravel()[:length]]


class ToyServer:
    """Serves until its `with` ends."""

    def __init__(self, service: LocalService, *, key: str | None = None, **options: Any) -> None:
        self.service = service
        self._bound = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        app = make_app(service, key=key, **options)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> ToyServer:
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive())
        assert self._server.started
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        self._bound.close()
        assert not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the server's event loop, and wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def _serve(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._server.serve([self._bound]))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def client(self, key: str = "none") -> openai.OpenAI:
        return client_of(f"{self.url}/v1", key)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """The official client of the API at an address."""
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE_SECONDS)


def reciting(text: str, tokenizer_of: Path, **options: Any) -> LocalService:
    """A service that answers with `text`."""
    limits = {name: options.pop(name) for name in ("capacity", "max_batch_size") if name in options}
    executor = Reciter(text, **limits)
    return LocalService(executor, Tokenizer(tokenizer_of), **{"model_name": MODEL, **options})


def note_cancel(session: AsyncSession, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once a request was cancelled: what the server does with one that nobody reads."""
    cancel, was_called = session.cancel, threading.Event()

    def noting(request_id: str) -> None:
        cancel(request_id)
        was_called.set()

    monkeypatch.setattr(session, "cancel", noting)
    return was_called


def pages_are_free(service: LocalService) -> bool:
    stats = service.session.stats()
    return stats.pages_in_use == 0 and stats.sequences == 0


def greedy_texts(engine_dir: Path, prompts: Sequence[str], count: int) -> list[str]:
    """What a plain session generates for each prompt alone."""
    tokenizer = Tokenizer(engine_dir)
    with Session(load_engine(engine_dir, "reference")) as session:
        found = [session.generate([tokenizer.encode(prompt)], count)[0] for prompt in prompts]
    return [tokenizer.decode(generation.tokens) for generation in found]
