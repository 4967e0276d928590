"""Profiles cells of the kernel benchmark with Nsight Compute: where the time of a kernel goes.

Two processes: this one compiles the kernels, calls `ncu` and reads its table; the other one,
`profile_launches`, launches them. Kernels are replayed by Nsight Compute, which puts back the
memory that they change: the counters of a schedule or a merge are as they were in every pass.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
import pydantic
from rich.console import Console

from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.launch.precompile import start_compiling
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.scripts.error_output import plain
from paged_trt.scripts.gpu_host import ncu
from paged_trt.scripts.gpu_host.ending import end
from paged_trt.scripts.gpu_host.host_results import results_path, write_results
from paged_trt.scripts.gpu_host.ncu_metrics import METRICS, metrics_of
from paged_trt.scripts.gpu_host.profile_launches import Launches, chosen_cells
from paged_trt.scripts.gpu_host.profile_rows import rows_of, rows_table
from paged_trt.scripts.kernel_bench.cells import Cell, Family
from paged_trt.scripts.kernel_bench.ours import kernels_of

FAMILIES: Final = tuple(family.value for family in Family)
RAW_FILE: Final = "ncu.csv"
LAUNCHES_FILE: Final = "launches.json"
END_SECONDS: Final = 45.0
"""Nsight Compute and the libraries start and end; a cell that was begun is finished."""
TABLE_WIDTH: Final = 230


def _families(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    """`decode,append` as families."""
    found = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in found if name not in FAMILIES]:
        raise click.BadParameter(f"there is no `{unknown[0]}`; choose from {', '.join(FAMILIES)}")
    return found


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path))
@click.option(
    "--cells",
    "families",
    callback=_families,
    default=",".join(FAMILIES),
    show_default=True,
    help="Families, with commas between them.",
)
@click.option(
    "--cell",
    "names",
    multiple=True,
    help="Instead of the built-in cells of one family, as `bench kernels --list` prints it.",
)
@click.option("--peers", is_flag=True, help="Also FlashAttention-3 and FlashInfer's append.")
@click.option(
    "--limit-s",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds after which no further cell is begun; what was profiled by then is kept.",
)
@click.option("--device", type=int, default=0, show_default=True)
@click.option("--commit", "tree", help="Commit of the tree, where it is no git checkout.")
@click.option("--list", "only_list", is_flag=True, help="Show the cells; no GPU is needed.")
def main(
    *,
    output: Path | None,
    families: tuple[str, ...],
    names: tuple[str, ...],
    peers: bool,
    limit_s: float,
    device: int,
    tree: str | None,
    only_list: bool,
) -> None:
    """Profile cells with Nsight Compute: `profile-*.json`, a table, and `ncu.csv` as it came."""
    cells = chosen_cells(families, names)
    if only_list:
        for cell in cells:
            click.echo(f"{cell.family.value}: {cell}")
        return
    if output is None:
        raise click.UsageError("pass `-o FOLDER`, for the results")
    program = ncu.find_ncu()
    output.mkdir(parents=True, exist_ok=True)
    # Here, and not under Nsight Compute, which would watch every compiler process.
    start_compiling(kernels_of(cells, tuning_target(device), all_plans=False)).result()
    launches_file = output / LAUNCHES_FILE
    launches_file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "paged_trt.scripts.gpu_host.profile_launches", str(launches_file)),
        *(word for family in families for word in ("--family", family)),
        *(word for name in names for word in ("--cell", name)),
        *(("--peers",) if peers else ()),
        *("--limit-s", str(limit_s), "--device", str(device)),
    ]
    text = ncu.profile(
        program, command, metrics=_metrics(program), log=output / RAW_FILE,
        limit_s=limit_s + END_SECONDS,
    )  # fmt: skip
    _write(output, text, _read(launches_file), cells=cells, device=device, tree=tree)


def _metrics(program: str) -> list[str]:
    """What this Nsight Compute can collect; what it cannot is said."""
    wanted = metrics_of(ncu.known_metrics(program))
    left_out = [name for name in METRICS if name not in wanted]
    if left_out:
        click.echo(f"not known to this Nsight Compute: {', '.join(left_out)}")
    return wanted


def _read(path: Path) -> Launches:
    try:
        return Launches.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, pydantic.ValidationError) as error:
        raise ExecutionError(f"{path} does not say what was launched: {error}") from error


def _write(
    output: Path,
    text: str,
    launches: Launches,
    *,
    cells: list[Cell],
    device: int,
    tree: str | None,
) -> None:
    """The results file, and everything for the log."""
    rows = rows_of(launches, ncu.kernels_of(text))
    path = write_results(
        results_path(output, "profile", device=device), "profile", rows,
        device=device, tree=tree, peers=launches.peers, note=launches.note,
    )  # fmt: skip
    console = Console(width=TABLE_WIDTH)
    console.print(rows_table(rows))
    for line in (*ncu.problems_of(text), launches.note):
        if line:
            console.print(plain(line))
    good = sum("error" not in row for row in rows)
    click.echo(
        f"{path}: {good} of {len(rows)} calls of {len(cells)} cells, "
        f"at most {ncu.passes_of(text)} passes"
    )
    if good < len(rows):
        sys.exit(1)


if __name__ == "__main__":
    end(main)
