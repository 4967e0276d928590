"""Fills the README's tables from the results files: one function per kind of result.

A table stands between `<!-- results: KIND -->` and `<!-- end -->`; a test holds that the
README is what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.readme_kernels import kernel_table
from paged_trt.scripts.results import ROOT, Results, read_results

RESULTS = ROOT / "tests" / "bench" / "results"
README = ROOT / "README.md"
MARKER = re.compile(r"(<!-- results: (?P<kind>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def e2e_table(files: list[tuple[str, Results]]) -> str:
    """Whole models through pages, against the same models without or on another executor."""
    lines = [
        "| model | ran on | TensorRT | against | prompts x tokens | tokens equal "
        "| decode step, median (min to max) | file |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, results in files:
        for row in results.rows:
            steps = [
                f"{row[key] / 1e3:.2f} ms ({row[key + '_min'] / 1e3:.2f} to "
                f"{row[key + '_max'] / 1e3:.2f}){label}"
                for key, label in (("step_us_graph", " replayed"), ("step_us_eager", " eager"))
                if key in row
            ]
            ties = row["first_difference"]
            equal = (
                "yes"
                if row["tokens_equal"]
                else (
                    f"up to a tie at step {ties['step']}: gap {ties['gap']:.3f}, "
                    f"bound {ties['bound']:.3f}"
                )
            )
            lines.append(
                f"| {row['model']}, {row['layers']} layers | {row['executor']} executor, "
                f"GPU {results.gpu} | {results.tensorrt}, route {row['route']} "
                f"| {row['against']} | {len(row['prompts'])} x {row['new_tokens']} | {equal} "
                f"| {', '.join(steps)} | [`{name}`](tests/bench/results/{name}) |"
            )
    notes = [
        f"- {name}: {note}"
        for name, results in files
        for row in results.rows
        for note in row.get("notes", ())
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def gpu_matrix_table(files: list[tuple[str, Results]]) -> str:
    """Kernels against float64: one line per kernel and pool type."""
    lines = [
        "| kernel | activations | pool | head dims | groups | features | combinations | cases "
        "| worst error / allowed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for _, results in files[-1:]:
        groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in results.rows:
            key = (row["kernel"], row["q_dtype"], row["kv_dtype"])
            groups.setdefault(key, []).append(row)
        for (kernel, query, pool), rows in groups.items():
            dims = sorted({(row["head_dim"], row["value_head_dim"]) for row in rows})
            features = {row["features"] for row in rows} - {"none"}
            shares = [
                row["worst_error"] / row["allowed_error"] for row in rows if row["allowed_error"]
            ]
            lines.append(
                f"| {kernel} | {query} | {pool} "
                f"| {', '.join(str(d) if d == v else f'{d}/{v}' for d, v in dims)} "
                f"| {', '.join(map(str, sorted({row['group'] for row in rows})))} "
                f"| {len(features)} | {len(rows)} | {sum(row['cases'] for row in rows)} "
                f"| {f'{max(shares):.2f}' if shares else 'equal bytes'} |"
            )
    return "\n".join(lines) + "\n"


def rewrite_table(files: list[tuple[str, Results]]) -> str:
    """Memory and time of rewriting a large model."""
    lines = [
        "| model, external data | rewritten as | largest resident set "
        "| seconds, median (min to max) of runs | file |",
        "|---|---|---|---|---|",
    ]
    for name, results in files[-1:]:
        lines += [
            f"| {row['model_bytes'] / 1e9:.1f} GB of float16 | {row['dtype']} "
            f"| {row['peak_bytes'] / 1e9:.2f} GB "
            f"| {row['seconds']:.1f} ({row['seconds_min']:.1f} to {row['seconds_max']:.1f}) "
            f"of {row['runs']} | [`{name}`](tests/bench/results/{name}) |"
            for row in results.rows
        ]
    return "\n".join(lines) + "\n"


def serve_table(files: list[tuple[str, Results]]) -> str:
    """Latencies and throughput under load: one line per request rate."""
    lines = [
        "| model | ran on | trace x length scale | requests/s: asked, done "
        "| first token, ms: median, p90, p99 | next token, ms: median, p90, p99 | tokens/s "
        "| pages in use, of | prefix hits | failed | file |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in files:
        for row in results.rows:
            first, following = (
                ", ".join(f"{row[key + suffix]:.1f}" for suffix in ("", "_p90", "_p99"))
                for key in ("first_token_ms", "inter_token_ms")
            )
            lines.append(
                f"| {row['model']}, {row['layers']} layers | {row['executor']} executor, "
                f"GPU {results.gpu} | {row['trace']} x {row['length_scale']:g} "
                f"| {row['rate']:g}, {row['requests_per_s']:.2f} | {first} | {following} "
                f"| {row['tokens_per_s']:.1f} | {row['pages_in_use_max']}, {row['num_pages']} "
                f"| {row['prefix_hit_rate']:.0%} | {row['failed']} of {row['requests']} "
                f"| [`{name}`](tests/bench/results/{name}) |"
            )
    return "\n".join(lines) + "\n"


def engine_table(files: list[tuple[str, Results]]) -> str:
    """Step times of whole engines, and what our kernels take of a replayed step."""
    # Single products that TensorRT computed have this kind too; the text names their file.
    files = [(name, each) for name, each in files if all("decode_us" in row for row in each.rows)]
    if not files:
        return ""
    lines = [
        "| model | ran on | TensorRT | batch x keys | prefill, ms | decode step, ms: median "
        "(min to max) | replayed, ms | ours, of a replayed step | ours in the step / alone "
        "| onnxruntime on its CPU, decode step, ms | file |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in files:
        for row in results.rows:
            decode = [f"{row['decode_us' + suffix] / 1e3:.2f}" for suffix in ("", "_min", "_max")]
            on_gpu = row["ours_share"] is not None
            ours = (
                f"{row['replay_us'] / 1e3:.2f} | {row['ours_share']:.0%} "
                f"| {row['ours_in_step_to_alone']:.2f}"
                if on_gpu
                else "- | none of our kernels ran | -"
            )
            peer = row.get("peers_us", {}).get("onnxruntime_paged")
            lines.append(
                f"| {row['model']}, {row['layers']} layers | {row['executor']} executor, "
                f"GPU {results.gpu} | {results.tensorrt}, route {row['route']} "
                f"| {row['batch']} x {row['kv_len']} | {row['prefill_us'] / 1e3:.2f} "
                f"| {decode[0]} ({decode[1]} to {decode[2]}) | {ours} "
                f"| {'-' if peer is None else format(peer['decode_us'] / 1e3, '.2f')} "
                f"| [`{name}`](tests/bench/results/{name}) |"
            )
    # Cells share their notes.
    rows = [(name, row) for name, results in files for row in results.rows]
    notes = dict.fromkeys(f"- {name}: {note}" for name, row in rows for note in row["notes"])
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


KERNEL_KINDS = ("decode", "prefill", "append")
TABLES: dict[str, Callable[[list[tuple[str, Results]]], str]] = {
    "e2e": e2e_table,
    "engine": engine_table,
    "gpu-matrix": gpu_matrix_table,
    "rewrite": rewrite_table,
    "serve": serve_table,
}
"""Table of each kind."""


def render(text: str, directory: Path = RESULTS) -> str:
    """`text` with every table made anew.

    Raises:
        ConfigError: a marker names no kind, or a results file is not valid.
    """
    found = [(path.name, read_results(path)) for path in sorted(directory.glob("*.json"))]

    def table(match: re.Match[str]) -> str:
        kind = match["kind"]
        known = sorted((*TABLES, *KERNEL_KINDS))
        if kind not in known:
            raise ConfigError(f"the README asks for results `{kind}`; known are {known}")
        files = [(name, results) for name, results in found if results.kind == kind]
        if not files:
            # A table without rows says nothing.
            return match[1] + match[3]
        if kind in KERNEL_KINDS:
            return match[1] + kernel_table(files, pictures=directory) + match[3]
        return match[1] + TABLES[kind](files) + match[3]

    return MARKER.sub(table, text)


@click.command()
def main() -> None:
    """Write the README's tables; needs a checkout (`pip install -e .`).

    \b
    Example:
      python -m paged_trt.scripts.readme
    """
    if not README.is_file():
        raise click.ClickException(f"there is no {README}; run this in a checkout's environment")
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    end(run_command(main))
