"""Errors as the OpenAI API tells them: HTTP status, and a JSON object `error`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from paged_trt.plugins.errors import ConfigError, PagedTrtError, QueueFullError, SequenceError

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
SHUTTING_DOWN: Final = "the server is shutting down; send the request to another one, or later"


class ApiError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        message: what is wrong and what to do.
        kind: `type` of the error object.
        param: the parameter that is wrong.
        code: machine-readable name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON answer."""
        error = {
            "message": _sendable(str(self)),
            "type": self.kind,
            "param": None if self.param is None else _sendable(self.param),
            "code": self.code,
        }
        return {"error": error}


def _sendable(text: str) -> str:
    """Text whose half characters, which a client may have sent, are spelt out."""
    return text.encode(errors="backslashreplace").decode()


def api_error(error: PagedTrtError) -> ApiError:
    """An error of the engine as one of the API.

    A `QueueFullError` is 429, other errors of the request are 400, those of the engine 500. The
    code is the project's own, such as `PTRT-S001`, where OpenAI has none.
    """
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind="rate_limit_error", code=error.code)
    if isinstance(error, (ConfigError, SequenceError)):
        return ApiError(400, str(error), code=error.code)
    return ApiError(500, str(error), kind=SERVER_ERROR, code=error.code)


def shutting_down() -> ApiError:
    """What a request gets that the server does not run, or not to its end, since it stops."""
    return ApiError(503, SHUTTING_DOWN, kind=SERVER_ERROR, code="shutting_down")


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Turn errors of the engine into those of the API."""
    try:
        yield
    except PagedTrtError as error:
        raise api_error(error) from error
