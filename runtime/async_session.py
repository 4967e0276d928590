"""Requests from asyncio: one engine thread runs the steps, events reach each event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterable

from paged_trt.plugins.errors import ExecutionError, PagedTrtError, SequenceError
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.requests import FinishName, GenerationRequest, TokenEvent
from paged_trt.runtime.results import SessionStats, StepResult
from paged_trt.runtime.sequences import FinishReason, check_prompt
from paged_trt.runtime.session import Session

_NAMES: dict[FinishReason, FinishName] = {
    FinishReason.EOS: "stop",
    FinishReason.LENGTH: "length",
}


@dataclasses.dataclass(slots=True, eq=False)
class _Open:
    """A request that has not ended."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[TokenEvent]
    is_cancelled: bool = False

    def send(self, event: TokenEvent) -> None:
        # A loop that is closed has nobody who waits for the event.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)


class AsyncSession:
    """Streams of tokens for many clients over one executor.

    Every request ends with exactly one event that has a `finish_reason`. Its methods may be
    called from any thread; streams are read in the event loop that opened them.

    Args:
        executor: runs the model; `aclose` closes it.
        eos_token_ids: tokens that end every text.
    """

    def __init__(self, executor: Executor, *, eos_token_ids: Iterable[int] = frozenset()) -> None:
        self._session = Session(executor, eos_token_ids=eos_token_ids)
        self._spec = executor.spec
        self._changed = threading.Condition(threading.RLock())
        self._open: dict[str, _Open] = {}
        self._waiting: collections.deque[_Open] = collections.deque()
        self._running: dict[int, _Open] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="paged-trt-engine", daemon=True)
        self._thread.start()

    def stream(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Submit a request and iterate over its events; closing the iterator cancels it.

        Call it in a running event loop.

        Raises:
            SequenceError: the engine cannot serve the request, another one of this id is open,
                or the session is closed.
        """
        check_prompt(self._spec, request.prompt_tokens, request.max_new_tokens)
        opened = _Open(request, asyncio.get_running_loop(), asyncio.Queue())
        with self._changed:
            if self._is_closing:
                raise SequenceError("the session is closed; make another one")
            if request.request_id in self._open:
                raise SequenceError(
                    f"request `{request.request_id}` is open already; give each its own id"
                )
            self._open[request.request_id] = opened
            self._waiting.append(opened)
            self._changed.notify()
        return self._events(opened)

    def cancel(self, request_id: str) -> None:
        """End a request; its stream ends with `cancelled`. Nothing to do where it has ended."""
        with self._changed:
            if request_id in self._open:
                self._open[request_id].is_cancelled = True
                self._changed.notify()

    def stats(self) -> SessionStats:
        """Pages, sequences and steps."""
        return self._session.stats()

    async def aclose(self) -> None:
        """Cancel every open request, then close the executor; a second call does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    async def _events(self, opened: _Open) -> AsyncIterator[TokenEvent]:
        try:
            while True:
                event = await opened.queue.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self.cancel(opened.request.request_id)

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._step()
        finally:
            for opened in list(self._open.values()):
                self._finish(opened, "cancelled")
            self._session.close()

    def _take_orders(self) -> bool:
        """Wait for work; False where the session is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._open)
            if self._is_closing:
                return False
            for sequence_id, opened in list(self._running.items()):
                if opened.is_cancelled:
                    self._session.release(sequence_id)
                    del self._running[sequence_id]
                    self._finish(opened, "cancelled")
            while self._waiting and len(self._running) < self._spec.pool.max_batch_size:
                self._start(self._waiting.popleft())
        return True

    def _start(self, opened: _Open) -> None:
        if opened.is_cancelled:
            self._finish(opened, "cancelled")
            return
        request = opened.request
        sequence_id = self._session.add(request.prompt_tokens, request.max_new_tokens)
        self._running[sequence_id] = opened

    def _step(self) -> None:
        try:
            results = self._session.step()
        except PagedTrtError as error:
            self._fail(error)
        except Exception as error:
            wrapped = ExecutionError(f"a step failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._fail(wrapped)
        else:
            for result in results:
                self._send(result)

    def _send(self, result: StepResult) -> None:
        opened = self._running[result.sequence_id]
        reason = None if result.finished is None else _NAMES[result.finished]
        if result.token in opened.request.stop_token_ids:
            if reason is None:
                self._session.release(result.sequence_id)
            reason = "stop"
        if reason is not None:
            del self._running[result.sequence_id]
        self._finish(opened, reason, token=result.token)

    def _fail(self, error: PagedTrtError) -> None:
        for sequence_id, opened in list(self._running.items()):
            with contextlib.suppress(SequenceError):
                self._session.release(sequence_id)
            self._finish(opened, "error", error=error)
        self._running.clear()

    def _finish(
        self,
        opened: _Open,
        reason: FinishName | None,
        *,
        token: int | None = None,
        error: PagedTrtError | None = None,
    ) -> None:
        if reason is not None:
            with self._changed:
                self._open.pop(opened.request.request_id, None)
        opened.send(
            TokenEvent(
                request_id=opened.request.request_id,
                token=token,
                finish_reason=reason,
                error=error,
            )
        )
