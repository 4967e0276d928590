"""The HTTP app: routes, key, errors; streaming by server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_trt.scripts.server.answers import Answer, ChatAnswer, CompletionAnswer
from paged_trt.scripts.server.failures import SERVER_ERROR, ApiError
from paged_trt.scripts.server.gate import Gate, refusal
from paged_trt.scripts.server.pieces import Piece, Started
from paged_trt.scripts.server.protocol import ChatCompletionRequest, CompletionRequest
from paged_trt.scripts.server.service import Service

DEFAULT_MAX_BODY_BYTES: Final = 4 * 2**20
_LOG: Final = logging.getLogger("paged_trt")
_Items = AsyncGenerator[Started | Piece, None]


def make_app(
    service: Service,
    *,
    key: str | None,
    is_local: bool = False,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    drain_seconds: float = 0.0,
) -> ASGIApp:
    """The app of one service.

    Args:
        service: answers; the app closes it when it ends.
        key: what clients send as `Authorization: Bearer KEY`; None lets everybody in.
        is_local: take only requests to this machine's own names, such as localhost.
        max_body_bytes: longest request body.
        drain_seconds: time that open requests have to end when the app ends.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.aclose(seconds=drain_seconds)

    routes = _Routes(service)
    app = FastAPI(
        openapi_url=None,
        lifespan=lifespan,
        max_body_size=max_body_bytes,
        exception_handlers={
            ApiError: _refuse,
            RequestValidationError: _refuse_body,
            HTTPException: _refuse_http,
            Exception: _fail,
        },
    )
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", routes.chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", routes.models)
    app.add_api_route("/v1/models/{name:path}", routes.model)
    app.add_api_route("/health", routes.health)
    app.add_api_route("/metrics", routes.metrics)
    return Gate(app, key=key, is_local=is_local, max_body_bytes=max_body_bytes)


class _Routes:
    """What the app answers.

    Args:
        service: answers.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        self._require_model(body.model)
        items = self._service.answer(body)
        return await _respond(request, CompletionAnswer(body, await _started(items)), items)

    async def chat_completions(self, request: Request, body: ChatCompletionRequest) -> Response:
        self._require_model(body.model)
        items = self._service.answer(body)
        return await _respond(request, ChatAnswer(body, await _started(items)), items)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self._service.model_name)]}

    async def model(self, name: str) -> dict[str, Any]:
        self._require_model(name)
        return {"id": name, "object": "model", "created": self._started, "owned_by": "paged-trt"}

    async def health(self) -> Response:
        return Response(status_code=200 if self._service.is_healthy else 503)

    async def metrics(self) -> Response:
        content, kind = self._service.metrics()
        return Response(content, media_type=kind)

    def _require_model(self, name: str) -> None:
        if name != self._service.model_name:
            raise ApiError(
                404,
                f"the model `{name}` is not here; this server has `{self._service.model_name}`",
                param="model",
                code="model_not_found",
            )


class EventStream(StreamingResponse):
    """Server-sent events; when it ends, however early, its request is cancelled.

    Args:
        content: the events, as text.
        items: what the events are made of, closed at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[str], items: _Items) -> None:
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that is gone ends them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A content that was never begun would not close them.
            await self._items.aclose()


async def _started(items: _Items) -> Started:
    first = await anext(items)
    assert isinstance(first, Started)  # noqa: S101 - what a service promises
    return first


async def _respond(request: Request, answer: Answer, items: _Items) -> Response:
    body = answer.request
    if body.stream:
        events = _events(answer, items, includes_usage=body.stream_options.include_usage)
        return EventStream(events, items)
    return await _unless_gone(request, _whole(answer, items))


async def _whole(answer: Answer, items: _Items) -> Response:
    async with contextlib.aclosing(items):
        pieces = [item async for item in items if isinstance(item, Piece)]
    return JSONResponse(answer.whole(pieces))


async def _events(answer: Answer, items: _Items, *, includes_usage: bool) -> AsyncIterator[str]:
    try:
        opening = answer.opening()
        if opening is not None:
            yield _event(opening)
        async for item in items:
            if isinstance(item, Piece):
                yield _event(answer.chunk(item))
                # Many pieces may wait: between them the loop must see that the client is gone.
                await asyncio.sleep(0)
                if item.finish_reason is not None and includes_usage:
                    yield _event(answer.usage_chunk(item))
    except ApiError as error:
        yield _event(error.body)
    except Exception as error:
        _LOG.exception("an answer failed", extra={"event": "answer_failed"})
        yield _event(_unknown(error).body)
    else:
        yield "data: [DONE]\n\n"


async def _unless_gone(request: Request, answering: Any) -> Response:
    """The answer; it is cancelled where the client goes away first."""
    answer = asyncio.create_task(answering)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads the 499, which is how proxies log it.
        return answer.result() if answer.done() else Response(status_code=499)
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.wait({answer, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101 - it is registered for this class
    return refusal(error)


async def _refuse_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
    first, *others = error.errors()
    path = [str(part) for part in first["loc"][1:]]
    # A parameter of several types has an error for each.
    reasons = {first["msg"]: None, **{each["msg"]: None for each in others if _same(each, first)}}
    param = path[0] if path and first["type"] != "json_invalid" else None
    is_unknown = first["type"] == "extra_forbidden"
    if is_unknown:
        message = f"`{'.'.join(path)}` is no parameter of this server; leave it out"
    elif param is None:
        message = f"the body is no valid request: {first['msg']}"
    else:
        message = f"`{'.'.join(path)}` is not supported or not valid: {' / '.join(reasons)}"
    code = "unknown_parameter" if is_unknown else None
    return JSONResponse(ApiError(400, message, param=param, code=code).body, 400)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["loc"][1:2] == other["loc"][1:2])


async def _refuse_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    body = ApiError(error.status_code, str(error.detail)).body
    return JSONResponse(body, error.status_code, error.headers)


async def _fail(_: Request, error: Exception) -> Response:
    return JSONResponse(_unknown(error).body, 500)


def _unknown(error: Exception) -> ApiError:
    # The text may hold paths of this machine; the log has it.
    return ApiError(500, f"the server failed: {type(error).__name__}", kind=SERVER_ERROR)
