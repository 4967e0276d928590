"""Chat templates, rendered in a child process with limits on time, memory and length."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import queue
import subprocess
import sys
import threading
from typing import IO, Any, Final, cast

from paged_trt.plugins.errors import ConfigError, UnsupportedError

TIMEOUT_SECONDS: Final = 10.0
"""Of one rendering; the first one waits for the process as well."""
MAX_PROMPT_CHARACTERS: Final = 1 << 24
_MODULE: Final = "paged_trt.runtime.chat_worker"


def render_template(template: str, **variables: Any) -> str:
    """A chat template with its variables.

    Args:
        template: Jinja source.
        variables: what JSON can hold.

    Raises:
        ConfigError: the template fails, takes too long or needs too much memory.
        UnsupportedError: jinja2 is not installed.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise UnsupportedError(
            'a chat template needs jinja2, which is not installed; `pip install "paged-trt[demo]"`'
        )
    answer = _worker().ask({"template": template, "variables": variables})
    if "error" in answer:
        raise ConfigError(f"the chat template failed ({answer['error']}); pass a plain prompt")
    text: str = answer["text"]
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ConfigError(
            f"the chat template made a prompt of {len(text)} characters, over "
            f"{MAX_PROMPT_CHARACTERS}; pass a plain prompt"
        )
    return text


class _Worker:
    """A child process, started at the first use and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(request)
        with self._lock:
            if self._process is None:
                self._process = self._start()
            answer = self._answer(self._process, line)
            if answer is None:
                self._end()
        if answer is None:
            return {"error": f"no end within {TIMEOUT_SECONDS:.0f} s, or too little memory"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def _answer(self, process: subprocess.Popen[str], line: str) -> str | None:
        """One line for one line; None where none comes in time, or the process ended."""
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        stdin, stdout = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)

        def talk() -> None:
            try:
                stdin.write(line + "\n")
                stdin.flush()
                answers.put(stdout.readline())
            except (OSError, ValueError):
                answers.put("")

        threading.Thread(target=talk, daemon=True).start()
        try:
            return answers.get(timeout=TIMEOUT_SECONDS) or None
        except queue.Empty:
            return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            # What was not sent cannot be flushed.
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


@functools.cache
def _worker() -> _Worker:
    worker = _Worker()
    atexit.register(worker.close)
    return worker
