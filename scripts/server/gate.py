"""Which requests reach the app, by their headers alone."""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse
from typing import Final

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_trt.scripts.server.failures import ApiError
from paged_trt.scripts.server.listen import is_loopback

_HEADERS: Final = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


class Gate:
    """Lets requests with the key, and without too long a body, reach the app; `/health` is open.

    It looks at the headers alone. The app itself counts the bytes of a body whose length they
    do not tell.

    Args:
        app: what is guarded.
        key: what clients send as `Authorization: Bearer KEY`; None lets everybody in.
        is_local: take only requests to this machine's own names. A page in a browser here can
            make a name of its own point to this machine, and then read what the server says.
        max_body_bytes: longest request body.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, is_local: bool, max_body_bytes: int
    ) -> None:
        self._app = app
        self._is_local = is_local
        self._digest = None if key is None else _digest(b"Bearer " + key.encode())
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http" and scope["path"] != "/health":
            error = self._error(dict(scope["headers"]))
            if error is not None:
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _error(self, headers: dict[bytes, bytes]) -> ApiError | None:
        found = _digest(headers.get(b"authorization", b""))
        # Digests have one length: the time says nothing of the key's.
        if self._digest is not None and not hmac.compare_digest(found, self._digest):
            return ApiError(
                401,
                "the API key is missing or wrong; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        host = headers.get(b"host", b"").decode("latin-1")
        if self._is_local and not is_loopback(_host_name(host)):
            return ApiError(
                403,
                f"the server has no key and takes only requests to localhost, not to `{host}`; "
                "serve with `--api-key-file`, or with `--allow-anyone`",
                code="host_not_allowed",
            )
        # No more digits than any length needs: Python takes no number of thousands of them.
        length = headers.get(b"content-length", b"0")[:20]
        if length.isdigit() and int(length) > self._max_body_bytes:
            return ApiError(
                413,
                f"the body has {int(length)} bytes and this server takes {self._max_body_bytes}; "
                "shorten it, or serve with a larger `--max-body-bytes`",
            )
        return None


def refusal(error: ApiError) -> Response:
    """The answer that tells an error."""
    return JSONResponse(error.body, error.status, _HEADERS.get(error.status))


def _host_name(host: str) -> str:
    """`::1` of `[::1]:8000`."""
    try:
        return urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
