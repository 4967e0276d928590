"""From requests of the API to pieces of text: the part of the server that holds the engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Protocol

from paged_trt.plugins.errors import ConfigError, QueueFullError, SequenceError
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.metrics import Metrics
from paged_trt.runtime.requests import GenerationRequest, TokenEvent
from paged_trt.runtime.sequences import check_prompt
from paged_trt.runtime.template_process import DEFAULT_SECONDS, TemplateProcess
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.server.failures import (
    SERVER_ERROR,
    ApiError,
    api_error,
    engine_errors,
    shutting_down,
)
from paged_trt.scripts.server.pieces import Assembler, Piece, Started
from paged_trt.scripts.server.protocol import AnyRequest, CompletionRequest

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DEFAULT_MAX_WAITING = 1024
FAILURES_OF_A_SICK_ENGINE = 3
"""Requests that fail in the engine, one after the other without a token between."""


class Service(Protocol):
    """What the app asks for answers: an engine in this process, or others elsewhere."""

    @property
    def model_name(self) -> str:
        """Name of the one model."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether a request would be run."""
        ...

    def answer(self, request: AnyRequest) -> AsyncGenerator[Started | Piece, None]:
        """`Started` once the engine took the request, then pieces up to the finish reason.

        Closing the generator, at any moment, cancels the request.

        Raises:
            ApiError: the request cannot be answered, or not to its end.
        """
        ...

    def metrics(self) -> tuple[bytes, str]:
        """Metrics in Prometheus' text format, and its content type.

        Raises:
            ApiError: they are elsewhere.
        """
        ...

    async def aclose(self, *, seconds: float) -> None:
        """Take no more requests, let the open ones end, and close the engine.

        Args:
            seconds: after which open requests are ended with an error.
        """
        ...


class LocalService:
    """Answers with an engine in this process.

    Args:
        executor: runs the model; `aclose` closes it.
        tokenizer: of the engine's directory.
        model_name: name that requests give.
        max_waiting: requests that may wait for a step to take them; at least 1.
        template_seconds: time that the chat template may take for one conversation.

    Raises:
        ManifestError: a tokenizer file is not what it claims to be.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_waiting: int = DEFAULT_MAX_WAITING,
        template_seconds: float = DEFAULT_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        template = tokenizer.chat_template
        self._template = (
            None if template is None else TemplateProcess(template, seconds=template_seconds)
        )
        self._core = EngineCore(executor, max_waiting=max_waiting)
        self._metrics = Metrics(self._core)
        self.session = AsyncSession(
            self._core, eos_token_ids=tokenizer.eos_token_ids, observer=self._metrics
        )
        self._failures = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def model_name(self) -> str:
        """Name of the one model."""
        return self._model_name

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken, and the last ones did not all fail in the engine."""
        return self._closing is None and self._failures < FAILURES_OF_A_SICK_ENGINE

    @property
    def metric_registry(self) -> CollectorRegistry:
        """Where the metrics are registered."""
        return self._metrics.registry

    def metrics(self) -> tuple[bytes, str]:
        """Metrics in Prometheus' text format, and its content type."""
        return self._metrics.text()

    async def answer(self, request: AnyRequest) -> AsyncGenerator[Started | Piece, None]:
        """`Started` once the engine took the request, then pieces up to the finish reason.

        Raises:
            ApiError: the request cannot be answered, or not to its end.
        """
        with engine_errors():
            generation = self._generation(request, await self._prompt(request))
            events = self._submit(generation)
        try:
            yield Started(
                request_id=generation.request_id, num_prompt_tokens=len(generation.prompt_tokens)
            )
            assembler = Assembler(self._tokenizer, request.stops)
            async for event in events:
                self._check(event)
                piece = assembler.push(event)
                if piece is not None:
                    yield piece
                    if piece.finish_reason is not None:
                        return
        finally:
            # Nothing to do where it has ended by itself.
            self.session.cancel(generation.request_id)

    async def aclose(self, *, seconds: float) -> None:
        """Take no more requests, let the open ones end, and close the engine.

        Args:
            seconds: after which open requests are ended with an error; 0 in a later call ends
                them at once.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(seconds))
        elif not seconds:
            await self.session.aclose()
        await asyncio.shield(self._closing)

    async def _close(self, seconds: float) -> None:
        drained = asyncio.create_task(self.session.aclose(drains=True))
        done, _ = await asyncio.wait({drained}, timeout=seconds)
        if not done:
            await self.session.aclose()
        await drained
        if self._template is not None:
            await self._template.aclose()
        await asyncio.to_thread(self._core.close)

    async def _prompt(self, request: AnyRequest) -> tuple[int, ...]:
        if isinstance(request, CompletionRequest):
            if not isinstance(request.prompt, str):
                return tuple(request.prompt)
            return await self._encode(request.prompt, is_rendered=False)
        if self._template is None:
            raise ConfigError("this model has no chat template; use /v1/completions")
        messages = [message.for_template() for message in request.messages]
        text = await self._template.render(self._tokenizer.chat_variables(messages))
        # The template writes the special tokens itself.
        return await self._encode(text, is_rendered=True)

    async def _encode(self, text: str, *, is_rendered: bool) -> tuple[int, ...]:
        # A long text takes seconds, in which no other request may wait.
        ids = await asyncio.to_thread(
            self._tokenizer.encode, text, add_special_tokens=not is_rendered
        )
        return tuple(ids)

    def _generation(self, request: AnyRequest, prompt: tuple[int, ...]) -> GenerationRequest:
        spec = self._core.spec
        room = spec.pool.max_kv_cache_capacity - len(prompt)
        wanted = request.max_new_tokens
        is_asked = not {"max_tokens", "max_completion_tokens"}.isdisjoint(request.model_fields_set)
        if wanted is None or (wanted > room and not is_asked):
            wanted = max(1, min(wanted or room, room))
        try:
            check_prompt(spec, prompt, wanted)
        except SequenceError as error:
            is_long = len(prompt) > spec.max_input_len or wanted > room
            code = "context_length_exceeded" if is_long else None
            raise ApiError(400, str(error), code=code) from error
        kind = "cmpl" if isinstance(request, CompletionRequest) else "chatcmpl"
        return GenerationRequest(
            request_id=f"{kind}-{uuid.uuid4().hex}",
            prompt_tokens=prompt,
            max_new_tokens=wanted,
            sampling=request.sampling,
        )

    def _submit(self, generation: GenerationRequest) -> AsyncIterator[TokenEvent]:
        # The server may have begun to shut down since the request came.
        if self._closing is not None:
            raise shutting_down()
        try:
            return self.session.stream(generation)
        except QueueFullError:
            raise
        except SequenceError as error:
            # The request itself is known to be good: the engine thread has ended.
            self._failures = FAILURES_OF_A_SICK_ENGINE
            raise ApiError(503, str(error), kind=SERVER_ERROR, code=error.code) from error

    def _check(self, event: TokenEvent) -> None:
        """Raise where the request ended without a token."""
        if event.token is not None:
            self._failures = 0
        elif event.error is not None:
            error = api_error(event.error)
            self._failures += error.status >= 500
            raise error from event.error
        else:
            raise shutting_down()
