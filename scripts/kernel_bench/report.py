"""Rows of a benchmark as results files and tables."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.scripts.error_output import plain
from paged_trt.scripts.kernel_bench.cells import Family
from paged_trt.scripts.results import Results, commit

METHOD: Final = (
    "CUDA-graph replay of as many launches as last about 2 ms, median, minimum and maximum of 5 "
    "replays after one; launches take turns on different pages of one pool, at least 190 MB of "
    "keys and values where the pool allows; pages in random order; other libraries in the same "
    "process on the same bytes, sizes and page order, each result checked against float32 once "
    "per kind of cell; bytes are keys and values (decode), what is read and written (append), "
    "all tensors (prefill); of_ceiling is against the read bandwidth (decode), the copy bandwidth "
    "(append) and torch's bfloat16 product of 8192^3 (prefill; a yardstick, which a kernel may "
    "pass), all measured in the run; the append and rope of a step are no part of decode and "
    "prefill, nor are FlashInfer's plans and FlashAttention-3's scheduler metadata; a kernel "
    "starts while the one ahead ends where it does so in an engine, other libraries as they "
    "choose by default"
)
ROWS_SHOWN: Final = ("shape", "ours us", "plan", "of ceiling", "best peer", "us", "ratio")


def results_of(
    family: Family,
    rows: Sequence[dict[str, Any]],
    *,
    target: TuningTarget,
    ceilings: Mapping[str, float],
    peers: Mapping[str, str],
    note: str = "",
    tree: str | None = None,
    method: str = METHOD,
) -> Results:
    """A results file of one family.

    Args:
        family: of the rows.
        rows: as `Bench.run` gives them.
        target: the device.
        ceilings: measured in the run.
        peers: version of each other library.
        note: why cells are missing.
        tree: commit of the tree, where it is no checkout.
        method: how numbers were taken.
    """
    return Results(
        kind=family.value,
        commit=tree or commit(),
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        gpu=target.gpu,
        driver=target.driver,
        cuda=target.compiler,
        tensorrt="none: kernels alone",
        method=method + (f"; {note}" if note else ""),
        ceilings=dict(ceilings),
        peers=dict(peers),
        rows=list(rows),
    )


def results_path(folder: Path, results: Results) -> Path:
    """File of a run; a second run of a day gets a number."""
    gpu = re.sub(r"[^a-z0-9]+", "-", results.gpu.lower()).strip("-")
    stem = f"{results.kind}-{gpu}-{results.date:%Y%m%d}"
    path, number = folder / f"{stem}.json", 2
    while path.exists():
        path, number = folder / f"{stem}-{number}.json", number + 1
    return path


def shape_of(row: Mapping[str, Any]) -> str:
    """Heads, types and lengths of a row, for people."""
    parts = [f"{row['num_q_heads']}/{row['num_kv_heads']}"]
    if row["head_dim"] != 128:
        parts.append(f"head_dim {row['head_dim']}")
    if row["kv_dtype"] != row["q_dtype"]:
        parts.append(row["kv_dtype"])
    parts.append(lengths_of(row))
    if "window" in row:
        parts.append(f"window {row['window']}")
    if row.get("rope"):
        parts.append("with rope")
    return ", ".join(parts)


def lengths_of(row: Mapping[str, Any]) -> str:
    """Sequences and tokens of a row, for people."""
    if "kv_lens" in row:
        total = sum(row["kv_lens"])
        return f"{row['batch']} x {min(row['kv_lens'])} to {max(row['kv_lens'])}, sum {total}"
    new, keys = row["query_len"], row["kv_len"]
    if row.get("plan") == "append":
        return f"{row['batch']} x {new} new"
    if new == 1:
        return f"{row['batch']} x {keys}"
    return f"{row['batch']} x {new}" + ("" if new == keys else f" on {keys}")


def best_peer(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """Name and microseconds of the fastest other library; None without one."""
    peers: dict[str, float] = row["peers_us"]
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def rows_table(results: Results) -> Table:
    """Every row, for the terminal."""
    ceilings = ", ".join(f"{name} {value:g}" for name, value in results.ceilings.items())
    table = Table(title=f"{results.kind}, {results.gpu}: {ceilings}", title_justify="left")
    for name in ROWS_SHOWN:
        table.add_column(
            name, justify="left" if name in ("shape", "plan", "best peer") else "right"
        )
    for row in results.rows:
        best = best_peer(row)
        cells = (
            shape_of(row),
            f"{row['ours_us']:.2f}" if "ours_us" in row else "-",
            row.get("plan", row.get("errors", {}).get("ours", "-")),
            f"{row['of_ceiling']:.2f}" if "of_ceiling" in row else "-",
            best[0] if best else "-",
            f"{best[1]:.2f}" if best else "-",
            f"{row['ratio_to_best_peer']:.2f}" if "ratio_to_best_peer" in row else "-",
        )
        table.add_row(*map(plain, cells))
    return table
