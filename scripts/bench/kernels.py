"""`paged-trt bench kernels`: decode, prefill and append, alone and beside other libraries."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from rich.console import Console

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.plans import AUTO, parse_attention_plan
from paged_trt.plugins.launch.precompile import start_compiling
from paged_trt.plugins.launch.tuning_target import tuning_target
from paged_trt.scripts.error_output import plain
from paged_trt.scripts.kernel_bench.cells import Family, cells_of
from paged_trt.scripts.kernel_bench.libraries import find_peers, require_torch, versions_of
from paged_trt.scripts.kernel_bench.opening import open_bench
from paged_trt.scripts.kernel_bench.ours import kernels_of
from paged_trt.scripts.kernel_bench.plots import draw, require_plots
from paged_trt.scripts.kernel_bench.report import results_of, results_path, rows_table
from paged_trt.scripts.results import Results

ALL = "all"


@click.command(name="kernels")
@click.option(
    "--cells",
    "family",
    type=click.Choice([*(family.value for family in Family), ALL]),
    default=ALL,
    show_default=True,
    help="Which launches of a step are timed.",
)
@click.option("--quick", is_flag=True, help="A few cells of each family.")
@click.option(
    "--peers",
    is_flag=True,
    help="Also FlashInfer, XQA, FlashAttention-3 and cuDNN, those that can be imported.",
)
@click.option("--all-plans", is_flag=True, help="Also time every plan that the planner weighs.")
@click.option(
    "--attention-plan",
    default=AUTO,
    show_default=True,
    help="Time the kernels of engines that were built with this plan.",
)
@click.option(
    "--limit-s", type=float, help="Seconds of each family; what was measured by then is kept."
)
@click.option("--device", type=int, default=0, show_default=True, help="CUDA device.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for results files and pictures.",
)
@click.option("--plot", is_flag=True, help="Draw a picture of each family; needs matplotlib.")
@click.option("--commit", "tree", help="Commit of the tree, where it is no git checkout.")
@click.option("--list", "only_list", is_flag=True, help="Show the cells; no GPU is needed.")
def command(
    family: str,
    quick: bool,
    peers: bool,
    all_plans: bool,
    attention_plan: str,
    limit_s: float | None,
    device: int,
    output: Path | None,
    plot: bool,
    tree: str | None,
    only_list: bool,
) -> None:
    """Time our kernels on an NVIDIA GPU, against what the machine can do and what others reach.

    Keys and values lie in 128-token pages of random order and take turns, so that no cache
    holds them. Bandwidth and product of the machine are measured in the same run.

    \b
    Example:
      paged-trt bench kernels --cells decode --quick
      paged-trt bench kernels --peers --limit-s 90 -o . --plot
      paged-trt bench kernels --cells prefill --attention-plan gather
    """
    explicit = parse_attention_plan(attention_plan)
    cells = {each: cells_of(each, quick=quick) for each in Family if family in (ALL, each.value)}
    if only_list:
        for each, found in cells.items():
            for cell in found:
                click.echo(f"{each.value}: {cell}")
        return
    _check_output(output, plot=plot)
    target = tuning_target(device)
    if peers:
        require_torch()
    console = Console()
    everything = [cell for found in cells.values() for cell in found]
    # Meanwhile libraries are imported and the machine's limits are measured.
    compiling = start_compiling(
        kernels_of(everything, target, all_plans=all_plans, explicit=explicit)
    )
    # FlashInfer wants a folder of its own, also where it builds nothing.
    with (
        tempfile.TemporaryDirectory(prefix="paged-trt-") as folder,
        open_bench(device, target, everything, with_torch=peers, explicit=explicit) as bench,
    ):
        bench.all_plans = all_plans
        bench.show = lambda line: click.echo(line, err=True)
        if peers:
            bench.peers = find_peers(bench.ours.stream, Path(folder))
        compiling.result()
        for each, found in cells.items():
            rows, note = bench.run(found, limit_s=limit_s)
            results = results_of(
                each, rows, target=target, ceilings=bench.ceilings,
                peers=versions_of(bench.peers, each),
                note=note, tree=tree,
            )  # fmt: skip
            if output is not None and rows:
                _write(results, output, plot=plot)
            console.print(rows_table(results))
            if note:
                console.print(plain(note))
            if bench.is_interrupted:
                raise KeyboardInterrupt


def _write(results: Results, folder: Path, *, plot: bool) -> None:
    path = results_path(folder, results)
    results.write(path)
    click.echo(f"{path}: {len(results.rows)} rows")
    if plot:
        draw(results, path.with_suffix(".png"))


def _check_output(output: Path | None, *, plot: bool) -> None:
    if output is not None and not output.is_dir():
        raise ConfigError(f"{output} is no directory; create it first")
    if plot:
        if output is None:
            raise ConfigError("`--plot` writes beside the results; pass `-o FOLDER` as well")
        require_plots()
