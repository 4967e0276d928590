"""A picture of a results file of `bench serve`, drawn wherever matplotlib is."""

from __future__ import annotations

from pathlib import Path

import click

from paged_trt.plugins.errors import ConfigError, PackageMissingError
from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.results import Results, read_results


def plot_loads(results: Results, path: Path) -> None:
    """Distributions of both latencies, and pages in use over time: a line for each rate.

    Args:
        results: of `bench serve`.
        path: where the PNG goes.

    Raises:
        ConfigError: the results are of another kind.
        PackageMissingError: matplotlib is not installed.
    """
    if results.kind != "serve":
        raise ConfigError(f"the results are of kind `{results.kind}`; pass those of `bench serve`")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissingError(
            'a picture needs matplotlib, which is not installed; `pip install "paged-trt[plots]"`, '
            "or draw it elsewhere: `python -m paged_trt.scripts.load_plot RESULTS PNG`"
        ) from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, following, pages = figure.subplots(1, 3)
    shares = range(101)
    for row in results.rows:
        label = f"{row['rate']:g} requests/s"
        first.plot(row["first_token_ms_percentiles"], shares, label=label)
        following.plot(row["inter_token_ms_percentiles"], shares, label=label)
        pages.step(*zip(*row["pages_in_use"], strict=True), where="post", label=label)
    for axes, text in ((first, "time to first token, ms"), (following, "inter-token latency, ms")):
        axes.set(xlabel=text, ylabel="percent of all", xscale="log")
    pages.set(xlabel="s", ylabel=f"pages in use, of {results.rows[0]['num_pages']}")
    first.legend()
    row = results.rows[0]
    figure.suptitle(
        f"{row['model']}, {row['executor']} executor, GPU {results.gpu}, {row['trace']} "
        f"x {row['length_scale']:g}"
    )
    figure.savefig(path, format="png", dpi=150)


@click.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.argument("png", type=click.Path(path_type=Path))
def main(results: Path, png: Path) -> None:
    """Draw RESULTS, which `paged-trt bench serve` wrote, into the file PNG.

    \b
    Example:
      python -m paged_trt.scripts.load_plot results.json load.png
    """
    plot_loads(read_results(results), png)


if __name__ == "__main__":
    end(run_command(main))
