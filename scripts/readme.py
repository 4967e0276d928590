"""Fills the README's tables from the results files: one function per kind of result.

A table stands between `<!-- results: KIND -->` and `<!-- end -->`; a test holds that the
README is what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.results import ROOT, Results, read_results

RESULTS = ROOT / "tests" / "bench" / "results"
README = ROOT / "README.md"
MARKER = re.compile(r"(<!-- results: (?P<kind>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def e2e_table(files: list[tuple[str, Results]]) -> str:
    """Whole models through pages against the same models without."""
    lines = [
        "| model | layers | TensorRT | ran on | prompts x tokens | tokens equal "
        "| largest logit difference (allowed) | decode step, median (min to max) | file |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in files:
        for row in results.rows:
            step = "{:.1f} ms ({:.1f} to {:.1f})".format(
                *(row[key] / 1e3 for key in
                  ("step_us_eager", "step_us_eager_min", "step_us_eager_max"))
            )  # fmt: skip
            lines.append(
                f"| {row['model']} | {row['layers']} | {results.tensorrt}, route {row['route']} "
                f"| {row['executor']}, GPU {results.gpu} "
                f"| {len(row['prompts'])} x {row['new_tokens']} "
                f"| {'yes' if row['tokens_equal'] else 'no'} ({row['tokens_compared']} compared) "
                f"| {row['max_logit_difference']:.3f} ({row['logit_tolerance']:.3f}) "
                f"| {step} | [`{name}`](tests/bench/results/{name}) |"
            )
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[list[tuple[str, Results]]], str]] = {"e2e": e2e_table}
"""Table of each kind."""


def render(text: str, directory: Path = RESULTS) -> str:
    """`text` with every table made anew.

    Raises:
        ConfigError: a marker names no kind, or a results file is not valid.
    """
    found = [(path.name, read_results(path)) for path in sorted(directory.glob("*.json"))]

    def table(match: re.Match[str]) -> str:
        kind = match["kind"]
        if kind not in TABLES:
            raise ConfigError(f"the README asks for results `{kind}`; known are {sorted(TABLES)}")
        files = [(name, results) for name, results in found if results.kind == kind]
        # A table without rows says nothing.
        return match[1] + (TABLES[kind](files) if files else "") + match[3]

    return MARKER.sub(table, text)


@click.command()
def main() -> None:
    """Write the README's tables."""
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
