"""Streams: tokens, cancellation, failures, shutdown; each request ends with exactly one reason."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from polling import PATIENCE_SECONDS, wait_until
from session.gated_executor import Gated
from session.history_executor import HistoryExecutor, continuation
from session.paged_toy import VOCAB, make_spec, prompt_of

from paged_trt.plugins.errors import (
    ConfigError,
    ExecutionError,
    QueueFullError,
    SequenceError,
    UnsupportedError,
)
from paged_trt.runtime.async_session import AsyncSession, TokenEvents
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.requests import GenerationRequest, SamplingSpec, TokenEvent
from paged_trt.runtime.session import Session

SPEC = make_spec(max_batch_size=4)


def request(name: str, prompt: list[int], count: int = 4, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_tokens=tuple(prompt), max_new_tokens=count, **options
    )


async def collect(stream: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    events = [event async for event in stream]
    assert [event.finish_reason is not None for event in events] == [
        *[False] * (len(events) - 1),
        True,
    ]
    return events


def run(
    main: Callable[[AsyncSession], Awaitable[None]],
    engine: HistoryExecutor | EngineCore | None = None,
    **options: Any,
) -> None:
    """Run a test in a session, close it, and see that nothing is left."""
    core = engine if isinstance(engine, EngineCore) else EngineCore(engine or HistoryExecutor(SPEC))

    async def whole() -> None:
        session = AsyncSession(core, **options)
        try:
            await asyncio.wait_for(main(session), PATIENCE_SECONDS)
        finally:
            await session.aclose()
        stats = session.stats()
        assert (stats.pages_in_use, stats.sequences) == (0, 0)
        core.batch.registry.check()

    asyncio.run(whole())


def tokens_of(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(event.token for event in events if event.token is not None)


def test_many_clients_get_their_own_tokens() -> None:
    async def main(session: AsyncSession) -> None:
        prompts = [prompt_of(300, seed=seed % 3)[: 5 + 11 * seed] for seed in range(20)]
        streams = [session.stream(request(f"{i}", each, 6)) for i, each in enumerate(prompts)]
        for prompt, events in zip(
            prompts, await asyncio.gather(*map(collect, streams)), strict=True
        ):
            assert tokens_of(events) == continuation(prompt, 6, VOCAB)
            assert events[-1].finish_reason == "length"
        stats = session.stats()
        assert stats.finished == 20
        assert stats.cached_tokens > 0

    run(main)


def test_stop_tokens_of_the_session_and_of_a_request() -> None:
    prompt = prompt_of(9)
    tokens = continuation(prompt, 8, VOCAB)

    async def main(session: AsyncSession) -> None:
        events = await collect(session.stream(request("a", prompt, 8)))
        assert tokens_of(events) == tokens[:4]
        stop = frozenset({tokens[1]})
        events = await collect(session.stream(request("b", prompt, 8, stop_token_ids=stop)))
        assert tokens_of(events) == tokens[:2]
        assert events[-1].finish_reason == "stop"

    assert len(set(tokens[:4])) == 4
    run(main, eos_token_ids=[tokens[3]])


@pytest.mark.parametrize("how", ["cancel", "close", "task"])
def test_a_client_that_leaves_frees_its_pages(how: str) -> None:
    executor = Gated(SPEC, free_steps=1)

    async def main(session: AsyncSession) -> None:
        stream = session.stream(request("leaver", prompt_of(200), 180))
        other = asyncio.create_task(collect(session.stream(request("other", [1, 2], 100))))
        assert (await anext(stream)).finish_reason is None
        if how == "cancel":
            session.cancel("leaver")
            session.cancel("nobody")
        elif how == "close":
            await stream.aclose()
        else:
            reader = asyncio.create_task(collect(stream))
            # Once it runs it waits: no second token comes through the gate.
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        executor.gate.open()
        if how == "cancel":
            assert (await collect(stream))[-1].finish_reason == "cancelled"
        assert tokens_of(await other) == continuation([1, 2], 100, VOCAB)
        assert session.stats().cancelled == 1
        # Its id can be used again.
        assert len(await collect(session.stream(request("leaver", [1], 2)))) == 2

    run(main, executor)


@pytest.mark.parametrize("how", ["close", "lose"])
def test_a_stream_that_nobody_began_to_read_is_cancelled(how: str) -> None:
    executor = Gated(SPEC)

    async def main(session: AsyncSession) -> None:
        stream = session.stream(request("leaver", prompt_of(200), 180))
        if how == "close":
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        del stream
        await asyncio.sleep(0)
        executor.gate.open()
        await collect(session.stream(request("other", [1], 2)))
        assert session.stats().cancelled == 1
        assert session.stats().sequences == 0

    run(main, executor)


def test_a_waiting_request_can_be_cancelled() -> None:
    executor = Gated(SPEC)

    async def main(session: AsyncSession) -> None:
        streams = [session.stream(request(f"{i}", [i + 1], 2)) for i in range(6)]
        await asyncio.to_thread(executor.gate.wait_for_step)
        session.cancel("5")
        executor.gate.open()
        events = await asyncio.gather(*map(collect, streams))
        assert [each[-1].finish_reason for each in events] == ["length"] * 5 + ["cancelled"]
        assert tokens_of(events[5]) == ()

    run(main, executor)


def test_what_cannot_be_served_is_refused_at_once() -> None:
    executor = Gated(SPEC)

    async def main(session: AsyncSession) -> None:
        with pytest.raises(SequenceError, match="a prompt of 0 tokens"):
            session.stream(request("a", []))
        with pytest.raises(SequenceError, match="over max_kv_cache_capacity=384"):
            session.stream(request("a", [1], 384))
        with pytest.raises(UnsupportedError, match="runs no adapters; leave out `poet`"):
            session.stream(request("a", [1], adapter="poet"))
        streams = [session.stream(request("0", [1]))]
        await asyncio.to_thread(executor.gate.wait_for_step)
        with pytest.raises(SequenceError, match="request `0` is open already"):
            session.stream(request("0", [1]))
        streams += [session.stream(request(f"{i}", [1])) for i in range(1, 5)]
        with pytest.raises(QueueFullError, match="4 sequences wait and max_waiting=4"):
            session.stream(request("5", [1]))
        executor.gate.open()
        await asyncio.gather(*map(collect, streams))
        await session.aclose()
        with pytest.raises(SequenceError, match="the session is closed"):
            session.stream(request("7", [1]))

    run(main, EngineCore(executor, max_waiting=4))


@pytest.mark.parametrize("failure", [ExecutionError("broken"), ZeroDivisionError("odd")])
def test_a_failing_step_ends_its_requests_and_later_ones_go_on(failure: Exception) -> None:
    executor = HistoryExecutor(SPEC)

    async def main(session: AsyncSession) -> None:
        executor.failure = failure
        streams = [session.stream(request(f"{i}", [i + 1], 3)) for i in range(6)]
        for events in await asyncio.gather(*map(collect, streams)):
            assert [event.finish_reason for event in events] == ["error"]
            assert isinstance(events[0].error, ExecutionError)
            assert str(failure) in str(events[0].error)
        assert session.stats().failed == 6
        executor.failure = None
        again = await collect(session.stream(request("again", [7], 3)))
        assert tokens_of(again) == continuation([7], 3, VOCAB)

    run(main, executor)


def test_closing_ends_every_open_request() -> None:
    executor = Gated(SPEC)

    async def main(session: AsyncSession) -> None:
        streams = [session.stream(request(f"{i}", [i + 1], 300)) for i in range(8)]
        await asyncio.to_thread(executor.gate.wait_for_step)
        closing = asyncio.create_task(session.aclose())
        # The task says that it closes before it waits for anything.
        await asyncio.sleep(0)
        executor.gate.open()
        events = await asyncio.gather(*map(collect, streams))
        assert {each[-1].finish_reason for each in events} == {"cancelled"}
        await closing

    run(main, executor)


def test_draining_lets_open_requests_finish() -> None:
    async def main(session: AsyncSession) -> None:
        streams = [session.stream(request(f"{i}", [i + 1], 30)) for i in range(8)]
        await session.aclose(drains=True)
        events = await asyncio.gather(*map(collect, streams))
        assert {each[-1].finish_reason for each in events} == {"length"}

    run(main)


def test_the_end_of_a_request_is_logged_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    async def main(session: AsyncSession) -> None:
        with caplog.at_level(logging.INFO, logger="paged_trt"):
            await collect(session.stream(request("a", prompt_of(200), 2)))
            await collect(session.stream(request("b", prompt_of(200), 2)))

    run(main)
    fields = ("request_id", "finish_reason", "prompt_tokens", "cached_tokens", "error")
    assert [
        tuple(getattr(record, field) for field in fields)
        for record in caplog.records
        if getattr(record, "event", None) == "request_ended"
    ] == [("a", "length", 200, 0, None), ("b", "length", 200, 128, None)]


def test_a_core_that_somebody_else_closes_ends_them_with_an_error() -> None:
    executor = Gated(SPEC, free_steps=1)
    core = EngineCore(executor)

    async def main(session: AsyncSession) -> None:
        stream = session.stream(request("a", [1], 380))
        await anext(stream)
        await asyncio.to_thread(executor.gate.wait_for_step)
        closing = threading.Thread(target=core.close, daemon=True)
        closing.start()
        wait_until(lambda: core._lock.is_waited_for)
        executor.gate.open()
        events = await collect(stream)
        # The token of the step that ran when it came, and no further one.
        assert len(tokens_of(events)) == 1
        assert events[-1].finish_reason == "error"
        assert "closed" in str(events[-1].error)
        await asyncio.to_thread(closing.join)

    run(main, core)


def test_sigterm_with_requests_in_flight() -> None:
    executor = Gated(SPEC, free_steps=1)

    async def main(session: AsyncSession) -> None:
        loop = asyncio.get_running_loop()
        closing: list[asyncio.Task[None]] = []
        loop.add_signal_handler(
            signal.SIGTERM, lambda: closing.append(loop.create_task(session.aclose()))
        )
        try:
            streams = [session.stream(request(f"{i}", [i + 1], 350)) for i in range(9)]
            await anext(streams[0])
            os.kill(os.getpid(), signal.SIGTERM)
            while not session._is_closing:
                await asyncio.sleep(0)
            executor.gate.open()
            events = await asyncio.gather(*map(collect, streams))
            assert {each[-1].finish_reason for each in events} == {"cancelled"}
            await closing[0]
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    run(main, executor)


def test_ten_thousand_requests_wait_and_end() -> None:
    async def main(session: AsyncSession) -> None:
        streams = [session.stream(request(f"{i}", [i % 90 + 1], 1)) for i in range(10_000)]
        for index in range(0, 10_000, 7):
            session.cancel(f"{index}")
        events = await asyncio.gather(*map(collect, streams))
        for index, each in enumerate(events):
            if each[-1].finish_reason == "length":
                assert tokens_of(each) == continuation([index % 90 + 1], 1, VOCAB)
            else:
                assert each[-1].finish_reason == "cancelled"
        stats = session.stats()
        assert stats.finished + stats.cancelled == 10_000
        assert stats.finished >= 10_000 - len(range(0, 10_000, 7))

    run(main, HistoryExecutor(make_spec(max_batch_size=64)))


def test_an_event_loop_that_is_gone_disturbs_nobody() -> None:
    executor = Gated(SPEC)
    core = EngineCore(executor)
    session = AsyncSession(core)

    async def leave() -> TokenEvents:
        return session.stream(request("gone", [1], 5))

    stream = asyncio.run(leave())
    executor.gate.open()

    async def stay() -> None:
        events = await collect(session.stream(request("here", [2], 5)))
        assert tokens_of(events) == continuation([2], 5, VOCAB)
        await session.aclose()

    asyncio.run(stay())
    assert core.stats().finished == 2
    assert core.stats().pages_in_use == 0
    # Its loop cannot be told, and need not.
    asyncio.run(stream.aclose())


def test_sessions_of_one_core_share_steps_pages_and_prefixes() -> None:
    """Two threads that generate, and streams, on one engine."""
    core = EngineCore(HistoryExecutor(SPEC))
    failures: list[BaseException] = []

    def generate(seed: int) -> None:
        try:
            session = Session(core)
            for length in (200, 129, 300):
                prompts = [prompt_of(300, seed=seed)[:length], prompt_of(40, seed=seed)]
                results = session.generate(prompts, 20)
                for prompt, result in zip(prompts, results, strict=True):
                    assert result.tokens == continuation(prompt, 20, VOCAB)
            session.close()
        except BaseException as error:
            failures.append(error)

    async def main(session: AsyncSession) -> None:
        threads = [threading.Thread(target=generate, args=(seed % 2,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for index in range(10):
            prompt = prompt_of(300, seed=index % 2)[: 130 + index]
            events = await collect(session.stream(request(f"{index}", prompt, 10)))
            assert tokens_of(events) == continuation(prompt, 10, VOCAB)
        for thread in threads:
            await asyncio.to_thread(thread.join)

    run(main, core)
    assert not failures
    assert core.stats().cached_tokens > 0
    assert core.stats().finished == 4 * 6 + 10
    assert not core.executor.is_closed  # type: ignore[attr-defined]


def test_the_engine_thread_sleeps_where_nothing_is_open() -> None:
    async def main(session: AsyncSession) -> None:
        await collect(session.stream(request("a", [1], 2)))
        core = session.core
        steps: list[int] = []
        step = core.step
        core.step = lambda **options: steps.append(1) or step(**options)  # type: ignore
        await asyncio.sleep(0.05)
        assert not steps
        await collect(session.stream(request("a", [1], 2)))
        assert steps

    run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "`temperature` must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "`temperature` must be a finite number"),
        ({"temperature": True}, "`temperature` must be a finite number, got True"),
        ({"top_p": 0.0}, "`top_p` must be over 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "`top_p` must be over 0 and at most 1, got 1.1"),
        ({"top_k": -1}, "`top_k` must be an int from 0"),
        ({"top_k": 1.0}, "`top_k` must be an int from 0"),
        ({"seed": -1}, "`seed` must be an int from 0"),
        ({"num_logprobs": 21}, "`num_logprobs` must be an int from 0 to 20, got 21"),
    ],
)
def test_sampling_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingSpec(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_id": ""}, "`request_id` must be a text"),
        ({"stop_token_ids": frozenset({-1})}, "`stop_token_ids` must be an int from 0"),
    ],
)
def test_a_request_is_checked(options: dict[str, Any], message: str) -> None:
    whole = {"request_id": "a", "prompt_tokens": (1,), "max_new_tokens": 1, **options}
    with pytest.raises(ConfigError, match=message):
        GenerationRequest(**whole)
    assert GenerationRequest(**{**whole, "request_id": "a", "stop_token_ids": [3]}).stop_token_ids
