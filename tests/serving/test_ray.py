"""The Ray Serve application: two replicas on the reference executor, on this machine."""

from __future__ import annotations

import itertools
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("ray.serve", "fastapi", "uvicorn", "prometheus_client", "jinja2", "openai"):
    pytest.importorskip(name, reason=f"{name} of the extra `ray` is missing", exc_type=ImportError)

import openai
import ray
from polling import PATIENCE_SECONDS, wait_until
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from serving.toy_server import MODEL, greedy_texts, write_toy_engine

from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.scripts.server.ray_app import build, prefix_router

pytestmark = pytest.mark.filterwarnings("ignore")
KEY = "a-key-of-the-tests"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


METRICS_PORT = free_port()


def has_prefix_router() -> bool:
    try:
        prefix_router()
    except UnsupportedError:
        return False
    return True


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def client(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_text(KEY)
    port = free_port()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _metrics_export_port=METRICS_PORT,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    arguments = {
        "engine_dir": str(engine_dir),
        "executor": "reference",
        "replicas": "2",
        "gpus_per_replica": "0",
        "prefix_aware": str(has_prefix_router()),
        "api_key_file": str(key_file),
    }
    serve.run(build(arguments), name="llm")
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE_SECONDS) as found:
        yield found
    serve.shutdown()
    ray.shutdown()


def replica_stats() -> list[Any]:
    """Numbers of the replicas, each asked several times, for Ray chooses which one answers."""
    handle = serve.get_deployment_handle("engine", "llm")
    return [handle.stats.remote().result(timeout_s=PATIENCE_SECONDS) for _ in range(12)]


def test_two_replicas_give_what_a_session_generates(
    client: openai.OpenAI, engine_dir: Path
) -> None:
    deployments = serve.status().applications["llm"].deployments
    assert sum(deployments["engine"].replica_states.values()) == 2
    prompts = [f"prompt {index}" for index in range(6)]
    expected = greedy_texts(engine_dir, prompts, 12)
    options: Any = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    for prompt, text in zip(prompts, expected, strict=True):
        whole = client.completions.create(prompt=prompt, **options)
        assert whole.choices[0].text == text
        chunks = client.completions.create(prompt=prompt, stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
    conversation = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello"}], **options
    )
    assert conversation.usage is not None
    assert conversation.usage.completion_tokens == 12


def test_metrics_are_those_of_ray_and_the_app_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="scrape each host's metrics port"):
        client.get("../metrics", cast_to=object)
    client.completions.create(model=MODEL, prompt="a", max_tokens=2)

    def replicas() -> dict[str, float]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics") as answer:
                text = answer.read().decode()
        except OSError:  # Ray has not begun to listen
            return {}
        return {
            sample.labels["replica"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "ray_paged_trt_new_tokens_total"
        }

    wait_until(lambda: len(replicas()) == 2 and max(replicas().values()) >= 2)


def test_errors_keep_their_status_and_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` is not here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_input_len") as caught:
        client.completions.create(model=MODEL, prompt="a" * 500)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="`n`"):
        client.completions.create(model=MODEL, prompt="a", n=2)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_client_that_goes_away_frees_its_pages(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="the long way", max_tokens=480, temperature=0, stream=True
    )
    assert len(list(itertools.islice(stream, 2))) == 2
    stream.close()
    wait_until(lambda: all(stats.sequences == 0 for stats in replica_stats()))
    assert sum(stats.cancelled for stats in replica_stats()) > 0


@pytest.mark.skipif(
    not has_prefix_router(), reason="Ray's prefix-aware router cannot be imported here"
)
def test_a_prompt_goes_where_its_beginning_was(client: openai.OpenAI) -> None:
    """Eight beginnings, each sent three times: routed without them, half of the later ones miss."""
    cached = []
    for turn, index in itertools.product(range(3), range(8)):
        # Two pages of tokens that no other beginning has.
        answer = client.completions.create(
            model=MODEL,
            prompt=f"{index}{chr(65 + index) * 260} turn {turn}",
            max_tokens=2,
            temperature=0,
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        if turn:
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [256] * 16
    assert all(stats.cached_tokens > 0 for stats in replica_stats())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "engine_dir"),
        ({"engine_dir": "a", "replicas": "0"}, "replicas"),
        ({"engine_dir": "a", "workers": "2"}, "workers"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(arguments)


def test_an_application_that_is_taken_down_lets_its_requests_end(
    client: openai.OpenAI, engine_dir: Path
) -> None:
    """The last one of this file, for nothing is served after it."""
    stream = iter(
        client.completions.create(
            model=MODEL, prompt="the long way", max_tokens=400, temperature=0, stream=True
        )
    )
    text = next(stream).choices[0].text
    deleting = threading.Thread(target=serve.delete, args=("llm",))
    deleting.start()
    chunks = list(stream)
    deleting.join(PATIENCE_SECONDS)
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == greedy_texts(engine_dir, ["the long way"], 400)[0]
    assert chunks[-1].choices[0].finish_reason == "length"
