"""Puts traffic on a session, and notes when each token came."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from paged_trt.plugins.errors import ExecutionError, PagedTrtError
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.requests import GenerationRequest
from paged_trt.runtime.results import SessionStats
from paged_trt.scripts.traffic import Arrival

_PAGE_PERIOD: Final = 0.02
"""Seconds between two looks at the pages in use."""


@dataclasses.dataclass(slots=True)
class RequestTimes:
    """When the tokens of one request came, in seconds since the begin of the run.

    Attributes:
        arrival: when it arrived, by the traffic: a late submission counts as waiting.
        tokens: when each token came.
        is_complete: whether it got all its tokens.
        error: what ended it before.
    """

    arrival: float
    tokens: list[float] = dataclasses.field(default_factory=list)
    is_complete: bool = False
    error: PagedTrtError | None = None

    @property
    def first_token(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.tokens[0] - self.arrival

    @property
    def between_tokens(self) -> list[float]:
        """Seconds from each token to the next."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was measured under one traffic.

    Attributes:
        requests: in the order of their arrival.
        pages: `(seconds, pages in use)`, at each token and between.
        stats: of the session, after the run.
    """

    requests: Sequence[RequestTimes]
    pages: Sequence[tuple[float, int]]
    stats: SessionStats

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        last = max(request.tokens[-1] for request in self.requests if request.tokens)
        return last - self.requests[0].arrival

    @property
    def mean_pages(self) -> float:
        """Pages in use, averaged over the time."""
        seconds, pages = np.transpose(self.pages)
        return float(np.average(pages[:-1], weights=np.diff(seconds)))

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(request.tokens) for request in self.requests)


async def put_load(session: AsyncSession, arrivals: Sequence[Arrival]) -> Load:
    """Submit each request at its time, and read all streams to their ends.

    Args:
        session: without end tokens, so that each answer has the length that its arrival says.
        arrivals: the traffic.

    Raises:
        ExecutionError: no request got all its tokens.
    """
    times = [RequestTimes(arrival.seconds) for arrival in arrivals]
    clock = _PageClock(session)
    watching = asyncio.create_task(clock.run())
    async with asyncio.TaskGroup() as group:
        for index, (arrival, each) in enumerate(zip(arrivals, times, strict=True)):
            group.create_task(_follow(session, arrival, each, clock=clock, name=f"bench-{index}"))
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    if not any(each.is_complete for each in times):
        raise ExecutionError(f"no request got all its tokens; the first one: {times[0].error}")
    return Load(requests=times, pages=clock.pages, stats=session.stats())


class _PageClock:
    """Tells the time since it was made, and notes the pages in use whenever it does."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._begin = time.perf_counter()
        self.pages: list[tuple[float, int]] = []

    def read(self) -> float:
        """Seconds since the begin."""
        seconds = time.perf_counter() - self._begin
        self.pages.append((seconds, self._session.stats().pages_in_use))
        return seconds

    async def run(self) -> None:
        """Note the pages between tokens too."""
        while True:
            self.read()
            await asyncio.sleep(_PAGE_PERIOD)


async def _follow(
    session: AsyncSession, arrival: Arrival, times: RequestTimes, *, clock: _PageClock, name: str
) -> None:
    await asyncio.sleep(arrival.seconds - clock.read())
    request = GenerationRequest(
        request_id=name, prompt_tokens=arrival.prompt, max_new_tokens=arrival.num_new_tokens
    )
    async for event in session.stream(request):
        if event.token is not None:
            times.tokens.append(clock.read())
        times.is_complete = event.finish_reason == "length"
        times.error = event.error
