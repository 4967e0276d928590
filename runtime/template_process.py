"""Renders a chat template in a process of its own, with limits of time and memory."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final

from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.chat_template import MAX_RENDERED_BYTES

DEFAULT_SECONDS: Final = 5.0
"""Time that rendering one conversation may take."""
_MARGIN_SECONDS: Final = 5.0
"""Time that starting the process may take besides."""


class TemplateProcess:
    """Renders one template for many conversations, one at a time, in an event loop.

    The process is started when it is first needed and again after a conversation that the
    template did not render in time. It ends with this one, whatever ends this one.

    Args:
        template: jinja2 source, untrusted.
        seconds: time that rendering one conversation may take.
    """

    def __init__(self, template: str, *, seconds: float = DEFAULT_SECONDS) -> None:
        self._template = template
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()

    async def render(self, variables: Mapping[str, Any]) -> str:
        """Text of the template.

        Raises:
            ConfigError: the template fails, refuses the variables, or takes too long or too
                much memory.
        """
        order = {"template": self._template, "variables": variables, "seconds": self._seconds}
        try:
            async with asyncio.timeout(self._seconds + _MARGIN_SECONDS), self._free:
                answer = await self._ask(json.dumps(order).encode())
        except TimeoutError:
            raise self._too_slow() from None
        if "error" in answer:
            raise ConfigError(answer["error"])
        text: str = answer["text"]
        return text

    async def aclose(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, order: bytes) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            process.stdin.write(order + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except BaseException as error:
            # Its answer, which nobody reads, would be taken for that of the next conversation.
            await self.aclose()
            if isinstance(error, (OSError, ValueError)):
                raise ConfigError(f"the chat template's process failed: {error}") from error
            raise
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = await process.wait()
        self._process = None
        if code == -signal.SIGALRM:
            raise self._too_slow()
        raise ConfigError(
            f"the chat template's process ended with code {code}; pass a plain prompt"
        )

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Not from the working directory, which may be a model's, and so untrusted.
                "-P",
                "-m",
                "paged_trt.runtime.chat_template",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=2 * MAX_RENDERED_BYTES,
                # Ctrl-C in a terminal is for the server, which drains.
                start_new_session=True,
            )
        return self._process

    def _too_slow(self) -> ConfigError:
        return ConfigError(
            f"the chat template took over {self._seconds:g} s; send shorter messages, or a plain "
            "prompt"
        )
