"""A picture of what was measured under load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from paged_trt.plugins.errors import PackageMissingError
from paged_trt.scripts.load import Load


def plot_loads(loads: Mapping[float, Load], path: Path, *, title: str) -> None:
    """Distributions of both latencies, and pages in use over time: a line for each rate.

    Args:
        loads: by their request rates.
        path: where the PNG goes.
        title: what was measured.

    Raises:
        PackageMissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissingError(
            '`--plot` needs matplotlib, which is not installed; `pip install "paged-trt[plots]"`'
        ) from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, between, pages = figure.subplots(1, 3)
    for rate, load in loads.items():
        done = [request for request in load.requests if request.tokens]
        label = f"{rate:g} requests/s"
        first.ecdf([1e3 * request.first_token for request in done], label=label)
        gaps = [1e3 * gap for request in done for gap in request.between_tokens]
        if gaps:
            between.ecdf(gaps, label=label)
        pages.plot(*np.transpose(load.pages), label=label)
    for axes, text in ((first, "time to first token, ms"), (between, "inter-token latency, ms")):
        axes.set(xlabel=text, ylabel="share of all", xscale="log")
    pages.set(xlabel="s", ylabel="pages in use")
    first.legend()
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=150)
