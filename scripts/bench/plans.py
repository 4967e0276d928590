"""`paged-trt bench plans`: plans, block sizes and kernels on the cells that fall short."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.precompile import start_compiling_builds
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.scripts.error_output import plain
from paged_trt.scripts.kernel_bench.cells import Cell, Family, cells_of
from paged_trt.scripts.kernel_bench.misses import missed_cells
from paged_trt.scripts.kernel_bench.opening import open_sweep
from paged_trt.scripts.kernel_bench.report import results_of, results_path, shape_of
from paged_trt.scripts.kernel_bench.sweep import SWEEP_METHOD
from paged_trt.scripts.kernel_bench.variants import builds_of
from paged_trt.scripts.results import Results

FAMILIES = (Family.DECODE, Family.APPEND)
SHOWN = 3
"""Candidates of a cell in the table, besides the planner's own."""


@click.command(name="plans")
@click.option(
    "--cells",
    "family",
    type=click.Choice([*(family.value for family in FAMILIES), "both"]),
    default="both",
    show_default=True,
    help="Which launches of a step are timed.",
)
@click.option("--every", is_flag=True, help="All cells of the benchmark, not only those that miss.")
@click.option("--match", help="Only cells whose name, as `--list` shows it, has this text in it.")
@click.option(
    "--limit-s", type=float, help="Seconds of each family; what was measured by then is kept."
)
@click.option("--device", type=int, default=0, show_default=True, help="CUDA device.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder for the results files."
)
@click.option("--commit", "tree", help="Commit of the tree, where it is no git checkout.")
@click.option("--list", "only_list", is_flag=True, help="Show the cells; no GPU is needed.")
def command(
    family: str,
    every: bool,
    match: str | None,
    limit_s: float | None,
    device: int,
    output: Path | None,
    tree: str | None,
    only_list: bool,
) -> None:
    """Time what the planner does not weigh: more plans, other block sizes, kernels that differ.

    Each result is compared with float32 or with another candidate's first; replays of all
    candidates of a cell take turns. What wins here is what the planner should learn: no engine
    runs it yet.

    \b
    Example:
      paged-trt bench plans --limit-s 80 -o .
      paged-trt bench plans --cells decode --match "1 x 16384"
    """
    cells = {
        each: _cells(each, every=every, match=match)
        for each in FAMILIES
        if family in ("both", each.value)
    }
    if not any(cells.values()):
        raise ConfigError(f"no cell has `{match}` in its name; `--list` shows them all")
    if only_list:
        for each, found in cells.items():
            for cell in found:
                click.echo(f"{each.value}: {cell}")
        return
    if output is not None and not output.is_dir():
        raise ConfigError(f"{output} is no directory; create it first")
    target = tuning_target(device)
    console = Console()
    everything = [cell for found in cells.values() for cell in found]
    units = target.num_multiprocessors
    compiling = start_compiling_builds(
        builds_of(everything, arch=target.arch, num_multiprocessors=units), target.arch
    )
    with open_sweep(device, target, everything) as sweep:
        sweep.show = lambda line: click.echo(line, err=True)
        compiling.result()
        for each, found in cells.items():
            rows, note = sweep.run(found, limit_s=limit_s)
            results = results_of(
                each, rows, target=target, ceilings=sweep.ceilings, peers={}, note=note, tree=tree,
                method=SWEEP_METHOD,
            )  # fmt: skip
            if output is not None and rows:
                path = results_path(output, results)
                results.write(path)
                click.echo(f"{path}: {len(rows)} rows")
            console.print(sweep_table(results))
            if note:
                console.print(plain(note))
            if sweep.is_interrupted:
                raise KeyboardInterrupt


def _cells(family: Family, *, every: bool, match: str | None) -> list[Cell]:
    found = cells_of(family, quick=False) if every else missed_cells(family)
    return [cell for cell in found if match is None or match in str(cell)]


def sweep_table(results: Results) -> Table:
    """The planner's own and the best of each cell."""
    ceilings = ", ".join(f"{name} {value:g}" for name, value in results.ceilings.items())
    table = Table(
        title=f"{results.kind}, {results.gpu}: median microseconds; {ceilings}",
        title_justify="left",
    )
    for name in ("shape", "in engines", "us", "of ceiling", "best", "us", "gain", "others"):
        is_number = name in ("us", "of ceiling", "gain")
        table.add_column(name, justify="right" if is_number else "left")
    for row in results.rows:
        ours, best = row.get("ours_us"), row.get("best_us")
        others = [name for name in row["all_us"] if name not in (row["plan"], row.get("best"))]
        cells = (
            shape_of(row),
            row["plan"],
            f"{ours:.2f}" if ours else "-",
            f"{row['of_ceiling']:.3f}" if ours else "-",
            row.get("best", "-"),
            f"{best:.2f}" if best else "-",
            f"{1 - best / ours:.1%}" if ours and best else "-",
            "; ".join(f"{name} {row['all_us'][name][0]:.2f}" for name in others[:SHOWN])
            + (f"; {len(row['errors'])} failed" if "errors" in row else ""),
        )
        table.add_row(*map(plain, cells))
    return table
