"""The README's tables and pictures of kernel benchmarks."""

from __future__ import annotations

import datetime
import re
import statistics
from pathlib import Path
from typing import Any, Final

from paged_trt.scripts.kernel_bench.report import best_peer, shape_of
from paged_trt.scripts.results import Results

FOLDER: Final = "tests/bench/results"
_HEAD: Final = (
    "| heads and lengths | MB | ours, us | of ceiling | best other | us | ours / other | plan |",
    "|---|---|---|---|---|---|---|---|",
)
_SHOWN: Final = 9
"""Rows that are seen without a click: those of the tables in the project's targets come first."""
Row = dict[str, Any]


def kernel_table(files: list[tuple[str, Results]], *, pictures: Path) -> str:
    """The newest file of a kind: what it says in a sentence, its first cells, a picture, all cells.

    Args:
        files: names and contents; the day counts, then the number of the run in the name.
        pictures: folder that may hold a picture beside each file.
    """
    name, results = max(files, key=_when)
    rows = [_line(row) for row in results.rows]
    lines = [_summary(name, results), "", *_HEAD, *rows[:_SHOWN], ""]
    lost = [row for row in results.rows if row.get("ratio_to_best_peer", 0.0) > 1.0]
    if lost:
        words = "; ".join(
            f"{shape_of(row)} ({row['ratio_to_best_peer']:.3f}, {_best(row)[0]})" for row in lost
        )
        lines += [f"Another library is faster in {len(lost)} (ours / other): {words}.", ""]
    picture = Path(name).with_suffix(".png").name
    if (pictures / picture).is_file():
        lines += [
            f"![{results.kind} kernels and the limits of the machine]({FOLDER}/{picture})",
            "",
        ]
    lines += [f"<details><summary>All {len(results.rows)} cells</summary>", "", *_HEAD]
    lines += [*rows, "", f"Method: {results.method}.", *_notes(results), "", "</details>"]
    return "\n".join(lines) + "\n"


def _when(file: tuple[str, Results]) -> tuple[datetime.date, int]:
    """Day of a run, and which of that day's runs it was."""
    number = re.search(r"-\d{8}-(\d+)\.json$", file[0])
    return file[1].date, int(number[1]) if number else 1


def _summary(name: str, results: Results) -> str:
    ratios = [row["ratio_to_best_peer"] for row in results.rows if "ratio_to_best_peer" in row]
    ceilings = ", ".join(
        f"{value:,.0f} {key.split('_')[1].replace('GBs', 'GB/s').replace('TFLOPs', 'TFLOP/s')} "
        f"({key.split('_')[0]})"
        for key, value in results.ceilings.items()
    )
    said = f"{len(results.rows)} cells, no other library in the run"
    if ratios:
        faster = sum(ratio <= 1.0 for ratio in ratios)
        said = (
            f"faster than every other library of the run, or as fast, in {faster} of "
            f"{len(ratios)} cells; median time {statistics.median(ratios):.2f} of the best other"
        )
    peers = "; ".join(f"{peer} {version}" for peer, version in results.peers.items())
    return (
        f"{results.kind.capitalize()} on one {results.gpu}: {said}. Limits measured in the run: "
        f"{ceilings}. {f'Others: {peers}. ' if peers else ''}"
        f"[`{name}`]({FOLDER}/{name}), commit {results.commit[:12]}, {results.date}."
    )


def _line(row: Row) -> str:
    best = _best(row)
    ours = f"{row['ours_us']:.2f}" if "ours_us" in row else "-"
    ratio = row.get("ratio_to_best_peer")
    shown = "-" if ratio is None else (f"**{ratio:.2f}**" if ratio > 1.0 else f"{ratio:.2f}")
    ceiling = f"{row['of_ceiling']:.2f}" if "of_ceiling" in row else "-"
    plan = row.get("plan", "-").removesuffix(" (heuristic)")
    return (
        f"| {shape_of(row)} | {row['bytes'] / 1e6:,.1f} | {ours} | {ceiling} | {best[0]} "
        f"| {best[1]} | {shown} | {plan} |"
    )


def _best(row: Row) -> tuple[str, str]:
    best = best_peer(row)
    return ("-", "-") if best is None else (best[0], f"{best[1]:.2f}")


def _notes(results: Results) -> list[str]:
    """What did not run, each reason once."""
    found: dict[str, list[str]] = {}
    for row in results.rows:
        for who, reason in row.get("errors", {}).items():
            found.setdefault(f"{who}: {reason}", []).append(shape_of(row))
        for note in row.get("notes", ()):
            found.setdefault(note, []).append(shape_of(row))
    return [
        "", *(f"- {reason} ({', '.join(shapes[:3])}{', ...' if len(shapes) > 3 else ''})"
              for reason, shapes in found.items())
    ] if found else []  # fmt: skip
