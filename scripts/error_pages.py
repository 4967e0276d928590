"""Writes `plugins/errors.md`, the error catalogue, from the pages of the package.

A test holds that the file is what this writes.
"""

from __future__ import annotations

from typing import Final

import click

from paged_trt.plugins.error_catalog import ErrorPage, pages
from paged_trt.plugins.files import write_text
from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.results import ROOT

CATALOGUE: Final = ROOT / "plugins" / "errors.md"
_HEAD: Final = """# Error codes

<!-- Written by `python -m paged_trt.scripts.error_pages`; a test holds that it is current. -->

The command line writes the code of an error behind `error`, and with `--json` as `error.code`;
in Python it is the attribute `code` of the exception. `paged-trt doctor --error CODE` shows a
page where this file is not at hand. A code is never given to another kind of error.
"""


def render() -> str:
    """The whole file."""
    found = pages().values()
    rows = [
        f"| [`{page.code}`](#{page.code.lower()}) | {page.name} | {_exit(page)} |" for page in found
    ]
    table = "\n".join(["| code | kind | exit code |", "|---|---|---|", *rows])
    return "\n".join([_HEAD, table, "", *map(_section, found)])


def _section(page: ErrorPage) -> str:
    doctor = " `paged-trt doctor` shows what this machine has." if page.asks_doctor else ""
    return (
        f"## {page.code}\n\n{page.name}, exit code {_exit(page)}. {page.meaning}\n\n"
        f"    {page.example}\n\n{page.remedy}{doctor}\n"
    )


def _exit(page: ErrorPage) -> str:
    return "of the failing step" if page.exit_code is None else str(page.exit_code)


@click.command()
def main() -> None:
    """Write the error catalogue; needs a checkout (`pip install -e .`).

    \b
    Example:
      python -m paged_trt.scripts.error_pages
    """
    if not CATALOGUE.is_file():
        raise click.ClickException(f"there is no {CATALOGUE}; run this in a checkout")
    write_text(CATALOGUE, render())


if __name__ == "__main__":
    end(run_command(main))
