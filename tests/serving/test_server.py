"""The server over an executor that recites a text: stops, keys, limits, faults, shutting down."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2", "openai"):
    pytest.importorskip(name, reason=f"{name} of the extra `serve` or the group `test` is missing")

import openai
from polling import PATIENCE_SECONDS, wait_until
from prometheus_client.parser import text_string_to_metric_families
from serving.toy_server import (
    MODEL,
    Reciter,
    ToyServer,
    note_cancel,
    pages_are_free,
    reciting,
)

from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.server.service import LocalService

KEY = "a-key-of-the-tests"
TEXT = "One, two, three. Grüße, 世界! 👩‍🚀 END and more"
ASK: Any = {"model": MODEL, "prompt": "say it|", "max_tokens": 100, "temperature": 0}
CHAT: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "say it"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_toy(folder, Dialect("attention23-past"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}|"
    )
    return folder


@pytest.fixture
def serve(tokenizer_dir: Path) -> Callable[..., ToyServer]:
    def make(text: str = TEXT, *, key: str | None = None, **options: Any) -> ToyServer:
        names = {"max_body_bytes", "is_local"} & options.keys()
        app = {name: options.pop(name) for name in names}
        return ToyServer(reciting(text, tokenizer_dir, **options), key=key, **app)

    return make


def executor_of(server: ToyServer) -> Reciter:
    executor = server.service.session.core.executor
    assert isinstance(executor, Reciter)
    return executor


def connect(server: ToyServer) -> http.client.HTTPConnection:
    address = server.url.removeprefix("http://")
    return http.client.HTTPConnection(address, timeout=PATIENCE_SECONDS)


def request(
    server: ToyServer,
    path: str = "/v1/completions",
    *,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
    """Status, JSON and headers of a raw request."""
    connection = connect(server)
    try:
        method = "GET" if body is None else "POST"
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else {}, answer.headers
    finally:
        connection.close()


def streamed(client: openai.OpenAI, **options: Any) -> list[tuple[str, str | None]]:
    stream = client.completions.create(**{**ASK, **options}, stream=True)
    return [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in stream]


def test_a_text_ends_at_its_end_token_which_is_not_shown(serve: Callable[..., ToyServer]) -> None:
    with serve() as server, server.client() as client:
        answer = client.completions.create(**ASK)
        assert answer.choices[0].text == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(TEXT.encode()) + 1


def test_no_chunk_holds_part_of_a_character(serve: Callable[..., ToyServer]) -> None:
    with serve() as server, server.client() as client:
        pieces = streamed(client)
        assert "".join(text for text, _ in pieces) == TEXT
        assert not any("\N{REPLACEMENT CHARACTER}" in text for text, _ in pieces)
        assert all(text for text, reason in pieces if reason is None)
        # The limit falls inside the three bytes of a character.
        cut = len(TEXT[: TEXT.index("世")].encode()) + 2
        assert "".join(text for text, _ in streamed(client, max_tokens=cut)).startswith(
            TEXT[: TEXT.index("世")] + "\N{REPLACEMENT CHARACTER}"
        )


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("END", TEXT[: TEXT.index("END")]),
        (["more", "END"], TEXT[: TEXT.index("END")]),
        (["three", "two"], "One, "),
        ("世界", "One, two, three. Grüße, "),
        ("One", ""),
        # It begins and does not go on, at the end of the text too.
        ("more!", TEXT),
        ("two, thr33", TEXT),
    ],
)
def test_a_stop_string_is_never_shown(
    serve: Callable[..., ToyServer], stop: str | list[str], expected: str
) -> None:
    with serve() as server, server.client() as client:
        assert client.completions.create(**ASK, stop=stop).choices[0].text == expected
        pieces = streamed(client, stop=stop)
        assert "".join(text for text, _ in pieces) == expected
        assert pieces[-1][1] == "stop"
        wait_until(lambda: pages_are_free(server.service))


def test_a_key_is_asked_for_everywhere_but_for_health(serve: Callable[..., ToyServer]) -> None:
    with serve(key=KEY) as server:
        assert server.client(KEY).completions.create(**ASK).choices[0].text == TEXT
        for wrong in ("wrong", KEY + "x", KEY[:-1]):
            with pytest.raises(openai.AuthenticationError) as caught:
                server.client(wrong).completions.create(**ASK)
            assert caught.value.code == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/nowhere", "/v1/chat/completions"):
            status, answer, headers = request(server, path)
            assert status == 401
            assert answer["error"]["code"] == "invalid_api_key"
            assert headers["WWW-Authenticate"] == "Bearer"
        assert request(server, "/health")[0] == 200


def test_a_page_in_a_browser_reaches_no_server_without_a_key(
    serve: Callable[..., ToyServer],
) -> None:
    with serve(is_local=True) as server:
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
            assert request(server, "/v1/models", headers={"Host": host})[0] == 200
        for host in ("evil.example", "localhost.evil.example:8000", "[::1", "192.0.2.1", ""):
            status, answer, _ = request(server, "/v1/models", headers={"Host": host})
            assert status == 403, host
            assert answer["error"]["code"] == "host_not_allowed"
        # What a page may send to another site without being asked is no JSON.
        plain = {"Content-Type": "text/plain"}
        assert request(server, body=json.dumps(ASK).encode(), headers=plain)[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"x" * 2000, 413, "2000 bytes and this server takes 1000"),
        (b"{", 400, "no valid request"),
        (b"[]", 400, "no valid request"),
        (b'{"model": "toy", "prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"model": "toy", "prompt": "\\ud800"}', 400, "no UTF-8 text"),
        (b'{"model": "toy", "prompt": "a", "\\ud800": 1}', 400, "unable to parse"),
        (b'{"model": "\\ud800", "prompt": "a"}', 404, "the model `\\ud800` is not here"),
        (b"[" * 900, 400, "no valid request"),
        (b'{"model": "toy", "prompt": "a", "more": 1}', 400, "no parameter of this server"),
    ],
)
def test_a_body_that_is_no_request_is_refused_in_the_form_of_the_api(
    serve: Callable[..., ToyServer], body: bytes, status: int, message: str
) -> None:
    with serve(max_body_bytes=1000) as server:
        found, answer, _ = request(server, body=body)
        assert found == status, answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert message in answer["error"]["message"]
        assert request(server, "/nowhere")[1]["error"]["message"] == "Not Found"
        assert request(server, "/v1/completions")[0] == 405
        assert request(server, "/docs")[0] == 404


def test_a_body_of_unknown_length_is_counted(serve: Callable[..., ToyServer]) -> None:
    with serve(max_body_bytes=1000) as server:
        connection = connect(server)
        headers = {"Content-Type": "application/json"}
        parts = iter([b" " * 600] * 2)
        connection.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        assert json.loads(answer.read())["error"]["message"] == "Content Too Large"
        connection.close()


class Certain(Reciter):
    """Gives every token but the right one no probability at all."""

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        logits = super().step(inputs)
        logits[logits == 0] = -np.inf
        return logits


def test_a_token_of_no_probability_has_a_logprob_that_json_can_hold(tokenizer_dir: Path) -> None:
    service = LocalService(Certain(TEXT), Tokenizer(tokenizer_dir), model_name=MODEL)
    with ToyServer(service) as server, server.client() as client:
        answer = client.completions.create(**{**ASK, "max_tokens": 1}, logprobs=3)
        _, chunk = client.chat.completions.create(
            **CHAT, max_completion_tokens=1, logprobs=True, top_logprobs=3, stream=True
        )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.top_logprobs is not None
    assert sorted(found.top_logprobs[0].values()) == [-9999, -9999, 0]
    streamed_logprobs = chunk.choices[0].logprobs
    assert streamed_logprobs is not None
    assert streamed_logprobs.content is not None
    assert [top.logprob for top in streamed_logprobs.content[0].top_logprobs] == [0, -9999, -9999]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_the_client_chose_is_never_cut(
    name: str, serve: Callable[..., ToyServer]
) -> None:
    with serve() as server, server.client() as client:
        options: Any = {name: 10_000}
        with pytest.raises(openai.BadRequestError, match="ask for fewer tokens") as caught:
            client.chat.completions.create(**CHAT, **options)
        assert caught.value.code == "context_length_exceeded"


def test_a_full_queue_refuses_one_more(serve: Callable[..., ToyServer]) -> None:
    with serve(max_batch_size=1, max_waiting=1) as server, server.client() as client:
        executor = executor_of(server)
        executor.gate.close()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(client.completions.create, **ASK)
            wait_until(lambda: server.service.session.stats().pages_in_use == 1)
            second = pool.submit(client.completions.create, **ASK)
            wait_until(lambda: server.service.session.stats().waiting == 1)
            with pytest.raises(openai.RateLimitError, match="1 sequences wait") as caught:
                client.completions.create(**ASK)
            assert caught.value.response.headers["Retry-After"] == "1"
            assert caught.value.code == "PTRT-S002"
            executor.gate.open()
            assert first.result().choices[0].text == TEXT
            assert second.result().choices[0].text == TEXT


def test_a_client_that_does_not_wait_for_its_answer_frees_its_pages(
    serve: Callable[..., ToyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server:
        was_cancelled = note_cancel(server.service.session, monkeypatch)
        executor = executor_of(server)
        executor.gate.close()
        body = json.dumps(ASK).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            wait_until(lambda: server.service.session.stats().pages_in_use == 1)
        assert was_cancelled.wait(PATIENCE_SECONDS)
        executor.gate.open()
        wait_until(lambda: pages_are_free(server.service))
        assert server.service.session.stats().cancelled == 1


def test_clients_that_go_away_at_once_leave_nothing(serve: Callable[..., ToyServer]) -> None:
    with serve(max_waiting=100) as server:
        body = json.dumps({**ASK, "stream": True}).encode()
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
                raw.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r"
                    + f"\nContent-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
        wait_until(lambda: pages_are_free(server.service))
        assert server.client().completions.create(**ASK).choices[0].text == TEXT


def test_an_engine_that_fails_says_so_and_turns_unhealthy(serve: Callable[..., ToyServer]) -> None:
    with serve() as server, server.client() as client:
        executor = executor_of(server)
        executor.failure = ExecutionError("the device is gone")
        for _ in range(3):
            assert request(server, "/health")[0] == 200
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                client.completions.create(**ASK)
        assert request(server, "/health")[0] == 503
        executor.failure = None
        assert client.completions.create(**ASK).choices[0].text == TEXT
        assert request(server, "/health")[0] == 200
        assert pages_are_free(server.service)


def test_an_engine_thread_that_ended_turns_the_server_unhealthy(
    serve: Callable[..., ToyServer],
) -> None:
    with serve() as server, server.client() as client:
        executor_of(server).failure = SystemExit()
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**ASK)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(**ASK)
        assert caught.value.status_code == 503
        assert request(server, "/health")[0] == 503


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(
    serve: Callable[..., ToyServer],
) -> None:
    with serve() as server, server.client() as client:
        executor_of(server).failing_step = 6
        stream = iter(client.completions.create(**ASK, stream=True))
        assert [next(stream).choices[0].text for _ in range(6)] == list(TEXT[:6])
        with pytest.raises(openai.APIError, match="the device is gone"):
            next(stream)
        wait_until(lambda: pages_are_free(server.service))


def test_a_template_that_loops_hangs_no_server(tokenizer_dir: Path, tmp_path: Path) -> None:
    for path in tokenizer_dir.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'loop' %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% endif %}{{ messages[0].content }}|"
    )
    service = LocalService(
        Reciter(TEXT), Tokenizer(tmp_path), model_name=MODEL, template_seconds=0.5
    )
    with ToyServer(service) as server, server.client() as client:
        loops: Any = {**CHAT, "messages": [{"role": "user", "content": "loop"}]}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            looping = pool.submit(client.chat.completions.create, **loops)
            assert client.completions.create(**ASK).choices[0].text == TEXT
            with pytest.raises(openai.BadRequestError, match=r"took over 0\.5 s"):
                looping.result()
        # The limit is short for what never comes, and this must come.
        service._template._seconds = PATIENCE_SECONDS  # type: ignore[union-attr]
        assert client.chat.completions.create(**CHAT).choices[0].message.content == TEXT


def test_a_model_without_a_template_has_no_conversations(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    for path in tokenizer_dir.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    service = LocalService(Reciter(TEXT), Tokenizer(tmp_path), model_name=MODEL)
    with ToyServer(service) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
            client.chat.completions.create(**CHAT)
        assert client.completions.create(**ASK).choices[0].text == TEXT


def scraped(server: ToyServer) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    connection = connect(server)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(
    serve: Callable[..., ToyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve() as server, server.client() as client:
        client.completions.create(**ASK)
        was_cancelled = note_cancel(server.service.session, monkeypatch)
        gate = executor_of(server).gate
        gate.close(free_steps=len("One, two"))
        streamed(client, stop="two")
        assert was_cancelled.wait(PATIENCE_SECONDS)
        gate.open()
        # A request that is cancelled is told of after its pages are free.
        wait_until(lambda: ("paged_trt_requests_total", "cancelled") in scraped(server))
        samples = scraped(server)
        assert samples["paged_trt_requests_total", "stop"] == 1
        assert samples["paged_trt_requests_total", "cancelled"] == 1
        assert samples["paged_trt_time_to_first_token_seconds_count",] == 2
        assert samples["paged_trt_inter_token_seconds_count",] >= len(TEXT.encode())
        assert samples["paged_trt_pages_in_use",] == 0
        assert samples["paged_trt_new_tokens_total",] > len(TEXT.encode())


@pytest.mark.parametrize("seconds", [PATIENCE_SECONDS, 0.0])
def test_shutting_down_ends_every_request_with_its_text_or_an_error(
    serve: Callable[..., ToyServer], seconds: float
) -> None:
    with serve(max_batch_size=1) as server, server.client() as client:
        executor = executor_of(server)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            executor.gate.close()
            stream = pool.submit(streamed, client)
            whole = [pool.submit(client.completions.create, **ASK) for _ in range(2)]
            wait_until(lambda: server.service.session.stats().sequences == 3)
            closing = threading.Thread(target=close, args=(server, seconds))
            closing.start()
            wait_until(lambda: not server.service.is_healthy)
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(**ASK)
            assert caught.value.status_code == 503
            assert request(server, "/health")[0] == 503
            session = server.service.session
            wait_until(lambda: session._is_closing and session._drains == (seconds > 0))
            executor.gate.open()
            closing.join(PATIENCE_SECONDS)
            if seconds:
                assert "".join(text for text, _ in stream.result()) == TEXT
                assert [each.result().choices[0].text for each in whole] == [TEXT, TEXT]
            else:
                for each in (stream, *whole):
                    with pytest.raises(openai.APIError, match="shutting down"):
                        each.result()
        assert executor.is_closed


def close(server: ToyServer, seconds: float) -> None:
    server.run(server.service.aclose(seconds=seconds))
