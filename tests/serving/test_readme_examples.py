"""The examples of the README run as they stand, but for the port."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for name in ("fastapi", "uvicorn", "prometheus_client", "jinja2", "openai"):
    pytest.importorskip(name, reason=f"{name} of the extra `serve` or the group `test` is missing")

from polling import PATIENCE_SECONDS
from serving.toy_server import TEMPLATE, ToyServer, reciting

from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

README = Path(__file__).parents[2] / "scripts" / "README.md"
ANSWER = "The capital is Paris."


def example(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert isinstance(found, str)
    assert "http://127.0.0.1:8000" in found
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_toy(folder, Dialect("attention23-past"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with ToyServer(reciting(ANSWER, folder, model_name="engine")) as running:
        yield running


def run(command: list[str], text: str, server: ToyServer) -> str:
    done = subprocess.run(
        command,
        input=text.replace("http://127.0.0.1:8000", server.url),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: ToyServer) -> None:
    answer = json.loads(run(["bash", "-e"], example("bash"), server))
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 8


def test_python(server: ToyServer) -> None:
    said = run([sys.executable, "-"], example("python"), server)
    assert said.startswith(f"{ANSWER}\n")
    assert "completion_tokens=22" in said
