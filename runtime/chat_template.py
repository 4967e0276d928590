"""Renders chat templates, which are untrusted, in jinja2's sandbox.

`python -m paged_trt.runtime.chat_template` is the process in which a server renders them: the
sandbox keeps a template from running code, and only a process can be kept from running for ever
or from taking all memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from paged_trt.plugins.errors import ConfigError, PackageMissingError

MAX_MEMORY_BYTES: Final = 2**30
"""Address space of the process."""
MAX_RENDERED_BYTES: Final = 2**25
"""Longest prompt, as JSON, that the process answers."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Text of a template.

    Raises:
        ConfigError: the template fails, or refuses the variables.
        PackageMissingError: jinja2 is not installed.
    """
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError as error:
        raise PackageMissingError(
            'a chat template needs jinja2, which is not installed; `pip install "paged-trt[demo]"`'
        ) from error

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        # As transformers renders them.
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template).render(**variables)
    except Exception as error:  # a template may fail in any way
        raise ConfigError(
            f"the chat template failed ({type(error).__name__}: {error}); pass a plain prompt"
        ) from error


def _answer(line: str) -> str:
    order = json.loads(line)
    # The default action ends the process, whatever it is doing.
    signal.setitimer(signal.ITIMER_REAL, order["seconds"])
    try:
        answer = json.dumps({"text": render(order["template"], order["variables"])})
        if len(answer) > MAX_RENDERED_BYTES:
            answer = json.dumps(
                {
                    "error": f"the chat template made a prompt of {len(answer)} bytes, over "
                    f"{MAX_RENDERED_BYTES}; send shorter messages"
                }
            )
    except (ConfigError, MemoryError) as error:
        answer = json.dumps({"error": str(error) or "the chat template took too much memory"})
    signal.setitimer(signal.ITIMER_REAL, 0)
    return answer


def main() -> None:
    """Answer one line of JSON with one line of JSON, until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The time of the import is not that of the first template.
    with contextlib.suppress(ImportError):
        importlib.import_module("jinja2.sandbox")
    for line in sys.stdin:
        sys.stdout.write(_answer(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
