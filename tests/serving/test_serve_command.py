"""`paged-trt serve` as a process: what it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2", "openai"):
    pytest.importorskip(name, reason=f"{name} of the extra `serve` or the group `test` is missing")

import httpx2
import openai
from polling import PATIENCE_SECONDS, wait_until
from serving.toy_server import MODEL, client_of, greedy_texts, write_toy_engine

from paged_trt.scripts.cli import main
from paged_trt.scripts.server.listen import check_reach, read_key

GATED = str(Path(__file__).with_name("gated_child.py"))
ASK: Any = {"model": MODEL, "prompt": "The capital", "temperature": 0}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_engine(tmp_path_factory.mktemp("engine"))


@contextlib.contextmanager
def serving(
    engine_dir: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    program: Sequence[str] = ("-m", "paged_trt.scripts.cli"),
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, *program, "serve", str(engine_dir)]
    words = ["--executor=reference", "--port=0", *options]
    with subprocess.Popen(
        [*command, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                found = re.search(r"is served at (\S+)", line)
                if found is not None:
                    break
            else:
                pytest.fail(f"the server did not start: {said}")
            yield process, found[1]
        finally:
            process.kill()


def is_reached(url: str) -> bool:
    """Whether the server still takes connections: it does not once it has taken a signal."""
    address = urllib.parse.urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), PATIENCE_SECONDS).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("drain", "number"),
    [(PATIENCE_SECONDS, signal.SIGTERM), (PATIENCE_SECONDS, signal.SIGINT), (0, signal.SIGTERM)],
)
def test_a_signal_lets_open_requests_end(
    engine_dir: Path, drain: float, number: signal.Signals
) -> None:
    when = "drains" if drain else "ends"
    with (
        serving(engine_dir, f"--drain-seconds={drain}", program=(GATED, when)) as (process, url),
        client_of(url) as client,
    ):
        ask = {**ASK, "max_tokens": 80}
        stream = client.completions.create(**ask, stream=True)
        text = next(iter(stream)).choices[0].text
        process.send_signal(number)
        if drain:
            chunks = list(stream)
            text += "".join(chunk.choices[0].text for chunk in chunks)
            assert text == greedy_texts(engine_dir, [ask["prompt"]], 80)[0]
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_second_interrupt_does_not_wait(engine_dir: Path) -> None:
    with (
        serving(engine_dir, f"--drain-seconds={PATIENCE_SECONDS}", program=(GATED, "ends")) as (
            process,
            url,
        ),
        client_of(url) as client,
    ):
        stream = iter(client.completions.create(**ASK, max_tokens=80, stream=True))
        next(stream)
        process.send_signal(signal.SIGINT)
        # Two signals that are sent at once may arrive as one.
        wait_until(lambda: not is_reached(url))
        process.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIError, httpx2.HTTPError)):
            list(stream)
        assert process.wait(PATIENCE_SECONDS) == 0


def test_the_key_comes_from_a_variable_that_the_user_names(engine_dir: Path) -> None:
    options = ("--api-key-env=SOME_KEY", "--model-name=other/name")
    with serving(engine_dir, *options, environment={"SOME_KEY": "s3cret"}) as (_, url):
        with client_of(url, "s3cret") as client:
            assert [each.id for each in client.models.list()] == ["other/name"]
            assert client.models.retrieve("other/name").id == "other/name"
            assert client.completions.create(**{**ASK, "model": "other/name"}).choices
        with client_of(url, "guess") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host=0.0.0.0"], "--allow-anyone"),
        (["--host=::"], "--allow-anyone"),
        (["--host=192.0.2.1", "--allow-anyone"], "cannot listen on 192.0.2.1"),
        (["--port=70000"], "port"),
        (["--api-key-env=NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE holds no API key"),
        (["--api-key-file=/nonexistent"], "/nonexistent"),
        (["--api-key-file=/nonexistent"], "openssl rand"),
        (["--api-key-file=/nonexistent", "--api-key-env=A"], "exclude each other"),
        (["--drain-seconds=-1"], "drain-seconds"),
        (["--max-waiting=0"], "max-waiting"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_engine_is_loaded(
    engine_dir: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", str(engine_dir), "--executor=reference", *options]) == 2
    text = capsys.readouterr().err
    assert message in " ".join(text.split())
    assert "executor:" not in text


def test_a_taken_port_is_named(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(engine_dir), f"--port={port}", "--executor=reference"]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    assert main(["serve", str(engine_dir), "--executor=reference"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "serving needs uvicorn, which this environment lacks" in text
    assert "paged-trt[serve]" in text


def test_an_engine_without_a_tokenizer_is_refused(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_dirs import write_engine_dir

    bare = write_engine_dir(engine_dir.parent / "source" / "model.onnx", tmp_path / "bare")
    assert main(["serve", str(bare), "--executor=reference"]) == 2
    assert "--tokenizer PATH" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    check_reach(host, key=None, allows_anyone=False)


@pytest.mark.parametrize("text", ["", " \n", "two words", "ümlaut", "bell\x07"])
def test_a_file_without_a_key_is_refused(text: str, tmp_path: Path) -> None:
    from paged_trt.plugins.errors import ConfigError

    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="one word of printable ASCII"):
        read_key(file=path, variable=None)
    path.write_text("  k-1 \n")
    assert read_key(file=path, variable=None) == "k-1"
