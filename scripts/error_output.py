"""How the command line shows errors, and text that came from a model or a file."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.text import Text

from paged_trt.plugins.error_catalog import pages
from paged_trt.plugins.errors import PagedTrtError

_JSON_PARAMETER: Final = "as_json"
_FULL: Final = "free space, or pass another place; nothing is left half-written"
_DENIED: Final = "change the permissions there, or pass another place"
_REMEDIES: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`); nothing is left half-written",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: _DENIED,
}


@dataclasses.dataclass(slots=True)
class Output:
    """How one call of the command line reports an error.

    Attributes:
        as_json: as JSON on standard output too, for the command writes JSON there.
    """

    as_json: bool = False


def _choose_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    output = ctx.find_object(Output)
    if output is not None:
        output.as_json = value
    return value


json_option: Final = click.option(
    "--json",
    _JSON_PARAMETER,
    is_flag=True,
    # Before the other options, so that what is wrong with them is JSON too.
    is_eager=True,
    callback=_choose_json,
    help="Write JSON to standard output, errors too.",
)


def show_usage(error: click.ClickException, words: Sequence[str], output: Output) -> None:
    """Print how the command is used.

    Args:
        error: what click found.
        words: the command line.
        output: told whether JSON was asked for: an unknown option ends the parse before click
            looks at the known ones.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return
    click.echo(context.get_usage(), err=True)
    click.echo(f"Try '{context.command_path} --help'; it has an example.", err=True)
    can_json = any(each.name == _JSON_PARAMETER for each in context.command.params)
    output.as_json |= can_json and "--json" in words


def fail(
    message: str,
    exit_code: int,
    code: str,
    output: Output,
    *,
    cause: BaseException | None = None,
    names_doctor: bool = True,
) -> int:
    """Print an error.

    Args:
        message: what is wrong and what to do.
        exit_code: of the process.
        code: stable code of the error.
        output: whether standard output is JSON.
        cause: an error of ours behind it is shown too.
        names_doctor: point to `paged-trt doctor` where that helps.

    Returns:
        `exit_code`.
    """
    _say(f"paged-trt: error[{code}]: {printable(message)}", err=True)
    if isinstance(cause, PagedTrtError) and str(cause) not in message:
        _say(f"  because: {printable(str(cause))}", err=True)
    page = pages().get(code)
    if names_doctor and page is not None and page.asks_doctor:
        _say("  `paged-trt doctor` shows what this machine can run", err=True)
    if output.as_json:
        _say(json.dumps({"error": error_record(message, code, exit_code)}, indent=2), err=False)
    return exit_code


def system_error_text(error: OSError) -> str:
    """What the system refused, of which file, and what to do."""
    what = error.strerror or str(error)
    where = f"`{error.filename}`: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{where}{what}" + (f"; {remedy}" if remedy else "")


def _say(text: str, *, err: bool) -> None:
    """Print where that is possible: an exit code must not depend on a full disk behind it."""
    try:
        click.echo(text, err=err)
    except OSError:
        # What is left in its buffer would end the process with a code of Python's own.
        stream = sys.stderr if err else sys.stdout
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def error_record(message: str, code: str, exit_code: int) -> dict[str, Any]:
    """An error as JSON."""
    page = pages().get(code)
    return {
        "code": code,
        "exit_code": exit_code,
        "message": message,
        "remedy": None if page is None else page.remedy,
    }


def plain(text: object) -> Text:
    """A cell of a table that shows `text` as it is: no markup, no control characters."""
    return Text(printable(str(text)))


def printable(text: str) -> str:
    """Text whose control characters do nothing: names in a model may hold any."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else ascii(character)[1:-1]
        for character in text
    )
