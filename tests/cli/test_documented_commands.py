"""Every command that a help text or a page shows is one that the command line understands.

They are parsed, not run: the tutorial's are run by `test_tutorial.py`.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from paged_trt.scripts.cli import cli
from paged_trt.scripts.results import ROOT

PAGES = ("README.md", "*/README.md", "scripts/*.md", "CONTRIBUTING.md", "plugins/errors.md")
MODULE = ("python", "-m")


def every_command(
    group: click.Group, *path: str
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The words and the object of every command, groups too."""
    context = click.Context(group)
    yield path, group
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from every_command(command, *path, name)
        else:
            yield (*path, name), command


def commands_of(lines: list[str]) -> list[list[str]]:
    """Words of the commands among lines of code, without prompts, pipes and comments."""
    text = "\n".join(line.strip().removeprefix("$ ") for line in lines).replace("\\\n", " ")
    wanted = [line for line in text.splitlines() if line.startswith(("paged-trt ", "python -m "))]
    return [shlex.split(line.split(" | ")[0], comments=True) for line in wanted]


def code_of(page: Path) -> list[str]:
    """Lines of the code blocks of a page: fenced, or indented by four."""
    lines, is_fenced = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            lines.append(line)
    return lines


def require_understood(words: list[str]) -> None:
    """Parse a command as the command line does, and stop before it runs.

    Raises:
        click.UsageError: the command line would refuse it.
    """
    command: click.Command | None = cli
    rest = words[1:]
    if tuple(words[:2]) == MODULE:
        command, rest = getattr(importlib.import_module(words[2]), "main", None), words[3:]
        if not isinstance(command, click.Command):
            return
    while isinstance(command, click.Group):
        context = click.Context(command)
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, (name, words)
        command = found
    assert command is not None
    command.make_context(command.name, rest)


HELP = [
    pytest.param(words, id=" ".join((*path, str(index))))
    for path, command in every_command(cli)
    for index, words in enumerate(
        commands_of(command.get_help(click.Context(command)).split("Options:")[0].splitlines())
    )
]
WRITTEN = [
    pytest.param(words, id=f"{page.relative_to(ROOT)} {index}")
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    for index, words in enumerate(commands_of(code_of(page)))
]


@pytest.mark.parametrize("words", HELP)
def test_an_example_of_a_help_text_is_understood(words: list[str]) -> None:
    require_understood(words)


@pytest.mark.parametrize("words", WRITTEN)
def test_a_command_of_a_page_is_understood(words: list[str]) -> None:
    require_understood(words)


def test_the_commands_are_found() -> None:
    assert len(HELP) >= len(list(every_command(cli)))
    assert len(WRITTEN) >= 20


@pytest.mark.parametrize(
    "line", ["paged-trt buidl model.onnx", "paged-trt run engine --promt x", "paged-trt bench x"]
)
def test_a_command_that_is_none_would_be_seen(line: str) -> None:
    (words,) = commands_of([f"    $ {line} | head  # a comment"])
    with pytest.raises(click.UsageError):
        require_understood(words)
