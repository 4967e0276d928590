"""Where the server listens, who may reach it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.server.service import Service

_SEND_SECONDS: Final = 10
"""Time that the last bytes have to reach their clients, after every request has ended."""


def read_key(*, file: Path | None, variable: str | None) -> str | None:
    """The API key; None where neither place is given.

    Args:
        file: a file that holds nothing else.
        variable: name of an environment variable.

    Raises:
        ConfigError: both are given, the place holds no key, or it cannot be read.
    """
    if file is not None and variable is not None:
        raise ConfigError("`--api-key-file` and `--api-key-env` exclude each other; pass one")
    if file is not None:
        try:
            text, place = file.read_text(encoding="utf-8"), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the API key in {file}: {error}; write one there, such as the output "
                "of `openssl rand -hex 32`"
            ) from error
    elif variable is not None:
        text, place = os.environ.get(variable, ""), f"the environment variable {variable}"
    else:
        return None
    key = text.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{place} holds no API key: one word of printable ASCII characters; write one, such "
            "as the output of `openssl rand -hex 32`"
        )
    return key


def check_reach(host: str, *, key: str | None, allows_anyone: bool) -> None:
    """Refuse to listen for other machines without a key.

    Raises:
        ConfigError: `host` is no loopback address, and there is no key.
    """
    if key is None and not allows_anyone and not is_loopback(host):
        raise ConfigError(
            f"`--host {host}` lets other machines in and there is no API key; pass "
            "`--api-key-file` or `--api-key-env`, or `--allow-anyone` if something else keeps "
            "them out"
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port and does not listen yet.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; pass another `--host` or `--port`"
        ) from error
    return bound


def run_server(
    app: ASGIApp,
    service: Service,
    bound: socket.socket,
    *,
    drain_seconds: float,
    on_start: Callable[[], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let open requests end; a second Ctrl-C does not wait.

    Args:
        app: what is served.
        service: what the app asks for answers.
        bound: from `bind`.
        drain_seconds: time that open requests have to end; then each ends with an error.
        on_start: called when clients are let in.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(drain_seconds) + _SEND_SECONDS,
    )
    server = _DrainingServer(config, service, drain_seconds=drain_seconds, on_start=on_start)
    # uvicorn raises the signal that ended it again, once everything is closed.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


class _DrainingServer(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        *,
        drain_seconds: float,
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn waits for the answers; this sees to it that they end.
        closing = asyncio.create_task(self._service.aclose(seconds=self._drain_seconds))
        await super().shutdown(sockets)
        if self.force_exit:
            await self._service.aclose(seconds=0)
        await closing


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own to itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
