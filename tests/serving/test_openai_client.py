"""The official OpenAI client against the server, over the toy engine on the reference executor."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2", "openai"):
    pytest.importorskip(name, reason=f"{name} of the extra `serve` or the group `test` is missing")

import openai
from polling import PATIENCE_SECONDS, wait_until
from serving.toy_server import (
    MODEL,
    ToyServer,
    greedy_texts,
    note_cancel,
    pages_are_free,
    write_toy_engine,
)
from session.gated_executor import gate_steps

from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.tokenizer import Tokenizer
from paged_trt.scripts.server.service import LocalService

PROMPT = "The capital of France is"
MESSAGES: Any = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]},
]
RENDERED = "system: Be short.\nuser: Hello\n!\nassistant:|"


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def server(engine_dir: Path) -> Iterator[ToyServer]:
    executor = load_engine(engine_dir, "reference")
    service = LocalService(executor, Tokenizer(engine_dir), model_name=MODEL)
    with ToyServer(service) as running:
        yield running
        wait_until(lambda: pages_are_free(service))


@pytest.fixture(scope="module")
def client(server: ToyServer) -> openai.OpenAI:
    return server.client()


def greedy_text(engine_dir: Path, prompt: str, count: int) -> str:
    return greedy_texts(engine_dir, [prompt], count)[0]


def test_a_completion_is_what_a_session_generates(client: openai.OpenAI, engine_dir: Path) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == greedy_text(engine_dir, PROMPT, 24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_a_prompt_of_token_ids_is_that_of_its_text(client: openai.OpenAI, engine_dir: Path) -> None:
    ids = Tokenizer(engine_dir).encode(PROMPT)
    answers = [
        client.completions.create(model=MODEL, prompt=prompt, temperature=0)
        for prompt in (PROMPT, ids)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[1].usage is not None
    assert answers[1].usage.completion_tokens == 16


def test_a_stream_gives_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len(reasons) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_goes_through_the_template(client: openai.OpenAI, engine_dir: Path) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=20, temperature=0
    )
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content == greedy_text(engine_dir, RENDERED, 20)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RENDERED)


def test_a_streamed_conversation_gives_the_same_text(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_without_a_limit_a_conversation_fills_the_engine(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "a" * 360}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    # Long enough to begin in one token and to end in another.
    stop = text[15:33]
    assert len(stop) > 4
    for stops in (stop, [text[-1] * 200, stop]):
        answer = client.completions.create(**options, stop=stops)
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(**options, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_many_clients_get_what_each_gets_alone(server: ToyServer, engine_dir: Path) -> None:
    prompts = [f"{'shared ' * 20}prompt {index}" for index in range(12)]

    def ask(index: int) -> str:
        options: Any = {"model": MODEL, "prompt": prompts[index], "temperature": 0}
        with server.client() as client:
            if index % 2:
                return client.completions.create(**options).choices[0].text
            stream = client.completions.create(**options, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, range(len(prompts))))
    assert texts == greedy_texts(engine_dir, prompts, 16)


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_client_that_goes_away_frees_its_pages(
    server: ToyServer, is_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.service.session
    wait_until(lambda: pages_are_free(server.service))
    before = session.stats()
    was_cancelled = note_cancel(session, monkeypatch)
    gate = gate_steps(session.core.executor, monkeypatch)
    # Enough for the first chunks: some tokens are parts of a character.
    gate.close(free_steps=30)
    options: Any = {"model": MODEL, "max_tokens": 400, "temperature": 0, "stream": True}
    with server.client() as client:
        if is_chat:
            stream: Any = client.chat.completions.create(messages=MESSAGES, **options)
        else:
            stream = client.completions.create(prompt=PROMPT, **options)
        chunks = list(itertools.islice(stream, 3))
        assert len(chunks) == 3
        stream.close()
    assert was_cancelled.wait(PATIENCE_SECONDS)
    gate.open()
    wait_until(lambda: pages_are_free(server.service))
    stats = session.stats()
    assert stats.cancelled == before.cancelled + 1
    # It may be gone before the gate is reached; the step that waits there ends first.
    assert stats.new_tokens - before.new_tokens <= 31


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="`other` is not here"):
        client.models.retrieve("other")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has `toy`") as caught:
        client.completions.create(model="other", prompt=PROMPT)
    assert caught.value.code == "model_not_found"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"385 tokens.*384") as caught:
        client.completions.create(model=MODEL, prompt="a" * 385)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"make 600.*512") as caught:
        client.completions.create(model=MODEL, prompt="a" * 100, max_tokens=500)
    assert caught.value.code == "context_length_exceeded"
    # The default limit gives way.
    options: Any = {"model": MODEL, "prompt": "a" * 384, "temperature": 0}
    assert client.completions.create(**options).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"n": 2}, "n", "Input should be 1"),
        ({"best_of": 3}, "best_of", "Input should be 1"),
        ({"echo": True}, "echo", "Input should be False"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "less than or equal to 0"),
        ({"logit_bias": {"5": 10}}, "logit_bias", "at most 0 items"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "16"}, "max_tokens", "valid integer"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"suffix": "end"}, "suffix", "no parameter of this server"),
        ({"extra_body": {"min_p": 0.1}}, "min_p", "no parameter of this server"),
        ({"prompt": ["one", "two"]}, "prompt", "prompt"),
        ({"prompt": [1, -1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": [1, 512]}, None, "outside the vocabulary of 512"),
        ({"prompt": ""}, None, "0 tokens"),
        ({"stream_options": {"x": 1}}, "stream_options", "no parameter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], param: str | None, message: str
) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, **options}
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.completions.create(**arguments)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 5}, "pass one"),
        ({"top_logprobs": 3}, "needs `logprobs`"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "`tools`"),
        ({"response_format": {"type": "json_object"}}, "`response_format.type`"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "`messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "`messages.0.content",
        ),
        ({"messages": []}, "`messages`"),
    ],
)
def test_what_a_conversation_cannot_have_is_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **options})


def test_what_cannot_change_an_answer_is_ignored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, temperature=0, n=1, user="me", store=False,
        metadata={"a": "b"}, tools=[], frequency_penalty=0, presence_penalty=0.0, stop=None,
        response_format={"type": "text"}, logit_bias={},
    )  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_a_seed_makes_the_same_text_and_others_make_others(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=20, temperature=1.5, top_p=0.99, seed=seed
        )
        return answer.choices[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_what_is_not_named_is_drawn_anew(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=2).choices[0].text
        for _ in range(4)
    }
    assert len(texts) > 1


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert answer.usage is not None
    assert len(found.tokens) == len(found.token_logprobs) == answer.usage.completion_tokens
    for token, value, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert value <= 0
        assert top[token] == max(top.values())
        assert value == pytest.approx(top[token])
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[0] == 0


def test_logprobs_of_a_conversation_come_with_its_chunks(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert len(whole.content) == 12
    assert all(len(each.top_logprobs) == 2 for each in whole.content)
    assert all(each.top_logprobs[0].token == each.token for each in whole.content)
    chunks = list(client.chat.completions.create(**options, stream=True))
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [each.token for each in streamed] == [each.token for each in whole.content]
