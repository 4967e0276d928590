"""Requests from asyncio: one engine thread runs the steps, events reach each event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, Protocol

from paged_trt.plugins.errors import PagedTrtError, SequenceError
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.requests import FinishName, GenerationRequest, TokenEvent
from paged_trt.runtime.results import SessionStats, StepResult
from paged_trt.runtime.sequences import FinishReason, LiveSequence, check_prompt

_LOG: Final = logging.getLogger("paged_trt")
_NAMES: Final[dict[FinishReason, FinishName]] = {
    FinishReason.EOS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "error",
}


class Observer(Protocol):
    """Is told of every event, in the order of the events of each request; it must not raise."""

    def opened(self, request: GenerationRequest) -> None:
        """A request was submitted."""
        ...

    def event(self, event: TokenEvent) -> None:
        """A request got a token, or ended."""
        ...


class _Stream:
    """A request that has not ended, and where its events go."""

    def __init__(self, request: GenerationRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self.sequence: LiveSequence | None = None


class TokenEvents(AsyncIterator[TokenEvent]):
    """Iterates over the events of one request; closing or losing it cancels the request.

    Not a generator: one that is closed before its first event would run no line of itself.
    """

    def __init__(self, stream: _Stream, cancel: Callable[[_Stream], None]) -> None:
        self._stream = stream
        self._cancel = cancel
        self._has_ended = False

    async def __anext__(self) -> TokenEvent:
        """The next event; the request is cancelled where the wait for it is."""
        if self._has_ended:
            raise StopAsyncIteration
        try:
            event = await self._stream.events.get()
        except BaseException:
            await self.aclose()
            raise
        self._has_ended = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Cancel the request; nothing to do where it has ended."""
        if not self._has_ended:
            self._has_ended = True
            self._cancel(self._stream)

    def __del__(self) -> None:
        """Cancel in the event loop: here any lock may be held. A closed loop reads no events."""
        if not self._has_ended:
            with contextlib.suppress(RuntimeError):
                self._stream.loop.call_soon_threadsafe(self._cancel, self._stream)


class AsyncSession:
    """Streams of tokens for many clients of one engine core.

    Every request ends with exactly one event that has a `finish_reason`, whatever happens. The
    methods may be called from any thread; a stream is read in the event loop that opened it.
    None of them waits for a step but `aclose`.

    Args:
        engine: an executor, which gets a core of its own and is closed with the session; or a
            core, which stays open.
        eos_token_ids: tokens that end every text.
        observer: is told of requests and events, such as `Metrics`.
    """

    def __init__(
        self,
        engine: Executor | EngineCore,
        *,
        eos_token_ids: Iterable[int] = frozenset(),
        observer: Observer | None = None,
    ) -> None:
        self._owns_core = not isinstance(engine, EngineCore)
        self._core = engine if isinstance(engine, EngineCore) else EngineCore(engine)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._observer = observer
        self._changed = threading.Condition()
        self._open: dict[str, _Stream] = {}
        self._cancelled: list[_Stream] = []
        self._results: collections.deque[tuple[_Stream, StepResult]] = collections.deque()
        self._is_closing = self._drains = False
        self._thread = threading.Thread(target=self._run, name="paged-trt-engine", daemon=True)
        self._thread.start()

    @property
    def core(self) -> EngineCore:
        """What this session is a client of."""
        return self._core

    def stream(self, request: GenerationRequest) -> TokenEvents:
        """Submit a request and iterate over its events; closing the iterator cancels it.

        Call it in a running event loop.

        Raises:
            SequenceError: the engine cannot serve the request, another one of this id is open,
                or the session is closed.
            QueueFullError: as many requests wait as may wait.
            UnsupportedError: the engine cannot sample in this way, or runs no adapters.
        """
        prompt = check_prompt(self._core.spec, request.prompt_tokens, request.max_new_tokens)
        stream = _Stream(request, asyncio.get_running_loop())
        with self._changed:
            if self._is_closing:
                raise SequenceError("the session is closed; make another one")
            if request.request_id in self._open:
                raise SequenceError(
                    f"request `{request.request_id}` is open already; give each its own id"
                )
            stream.sequence = self._core.submit(
                prompt,
                request.max_new_tokens,
                sampling=request.sampling,
                stop_token_ids=self._eos_token_ids | request.stop_token_ids,
                adapter=request.adapter,
                deliver=lambda result: self._results.append((stream, result)),
            )
            self._open[request.request_id] = stream
            if self._observer is not None:
                self._observer.opened(request)
            self._changed.notify()
        return TokenEvents(stream, self._cancel)

    def cancel(self, request_id: str) -> None:
        """End a request; its stream ends with `cancelled`. Nothing to do where it has ended."""
        with self._changed:
            stream = self._open.get(request_id)
            if stream is not None:
                self._cancelled.append(stream)
                self._changed.notify()

    def stats(self) -> SessionStats:
        """Pages, sequences and steps of the core."""
        return self._core.stats()

    async def aclose(self, *, drains: bool = False) -> None:
        """Take no more requests, end the open ones, and stop; a second call waits as well.

        Args:
            drains: let open requests run to their end first; otherwise they are cancelled.
        """
        with self._changed:
            self._drains = drains and not self._is_closing
            self._is_closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _cancel(self, stream: _Stream) -> None:
        with self._changed:
            # Another request may have its id by now.
            if self._open.get(stream.request.request_id) is stream:
                self._cancelled.append(stream)
                self._changed.notify()

    def _run(self) -> None:
        """The engine thread."""
        error: PagedTrtError | None = None
        try:
            while self._wait_for_work():
                # The tokens of a step are sent while the device runs the next one.
                if not self._core.step(meanwhile=self._send_results) or not self._core.has_work:
                    self._send_results()
        except PagedTrtError as closed:
            # Somebody else closed the core.
            error = closed
        except BaseException as unknown:
            error = SequenceError(f"the engine thread ended: {type(unknown).__name__}: {unknown}")
            _LOG.exception("the engine thread ended", extra={"event": "engine_thread_ended"})
        finally:
            self._end_all(error)

    def _wait_for_work(self) -> bool:
        """Take the cancellations, and wait where nothing is open; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._is_closing)
            cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._core.cancel(each.sequence for each in cancelled if each.sequence is not None)
            self._send_results()
            self._finish([(each, _end(each, "cancelled")) for each in cancelled])
        with self._changed:
            return not self._is_closing or (self._drains and bool(self._open))

    def _send_results(self) -> None:
        events = []
        while self._results:
            stream, result = self._results.popleft()
            events.append((stream, _event(stream, result)))
        self._finish(events)

    def _finish(self, events: list[tuple[_Stream, TokenEvent]]) -> None:
        """Send events; a request that has ended already gets none."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, TokenEvent]]] = {}
        with self._changed:
            for stream, event in events:
                if self._open.get(event.request_id) is not stream:
                    continue
                if event.finish_reason is not None:
                    del self._open[event.request_id]
                    _log_end(stream.request, event)
                if self._observer is not None:
                    self._observer.event(event)
                by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, batch in by_loop.items():
            # A loop that is closed has nobody who waits for the events.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_put, batch)

    def _end_all(self, error: PagedTrtError | None) -> None:
        """No request stays open, and no page stays taken."""
        with self._changed:
            self._is_closing, self._drains = True, False
            streams = list(self._open.values())
        self._core.cancel(each.sequence for each in streams if each.sequence is not None)
        self._send_results()
        reason: FinishName = "cancelled" if error is None else "error"
        self._finish([(each, _end(each, reason, error)) for each in streams])
        if self._owns_core:
            self._core.close()


def _put(events: list[tuple[_Stream, TokenEvent]]) -> None:
    for stream, event in events:
        stream.events.put_nowait(event)


def _event(stream: _Stream, result: StepResult) -> TokenEvent:
    return TokenEvent(
        request_id=stream.request.request_id,
        token=None if result.error is not None else result.token,
        logprob=result.logprob,
        top_logprobs=result.top_logprobs,
        finish_reason=None if result.finished is None else _NAMES[result.finished],
        error=result.error,
        num_cached_tokens=result.num_cached_tokens,
    )


def _end(stream: _Stream, reason: FinishName, error: PagedTrtError | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=stream.request.request_id, token=None, finish_reason=reason, error=error
    )


def _log_end(request: GenerationRequest, event: TokenEvent) -> None:
    _LOG.info(
        "request %s ended: %s",
        request.request_id,
        event.finish_reason,
        extra={
            "event": "request_ended",
            "request_id": request.request_id,
            "finish_reason": event.finish_reason,
            "prompt_tokens": len(request.prompt_tokens),
            "cached_tokens": event.num_cached_tokens,
            "error": None if event.error is None else str(event.error),
        },
    )
