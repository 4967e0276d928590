"""Child process that renders chat templates: one JSON object a line, in and out.

A template comes with an engine directory, which nobody vouches for. Jinja's sandbox keeps it from
Python's objects, and this process keeps it from the memory and the time of its parent.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final, NoReturn

import jinja2
import jinja2.sandbox

MEMORY_BYTES: Final = 2 << 30


def render(template: str, variables: dict[str, Any]) -> str:
    """A template with its variables.

    Raises:
        Exception: a template may fail in any way.
    """

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(**variables)


def main() -> None:
    """Answer each line of standard input with one of standard output."""
    _limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"text": render(request["template"], request["variables"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
