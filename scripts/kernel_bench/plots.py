"""Pictures of results files: how near to the machine's limits, ours and the best peer."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.files import write_bytes
from paged_trt.scripts.kernel_bench.report import best_peer
from paged_trt.scripts.results import Results

OURS, PEER, LIMIT = "#0b6e4f", "#d1495b", "#30343f"
DOTS_PER_INCH: Final = 150


def require_plots() -> None:
    """Refuse a picture before the work, not after minutes of it.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise UnsupportedError(
            'pictures need matplotlib; `pip install "paged-trt[plots]"`, or leave out `--plot`'
        ) from error


def draw(results: Results, path: Path) -> None:
    """Write the roofline picture of a results file as PNG.

    Decode and append are drawn over the bytes that move, against the bandwidth; prefill over
    operations per byte, against bandwidth and product.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_plots()
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if results.kind == "prefill":
        _roofline(axes, results)
    else:
        _bandwidth(axes, results)
    _points(axes, results)
    axes.set_title(f"{results.kind} attention kernels, {results.gpu}, {results.date}")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(loc="lower right")
    buffer = io.BytesIO()
    # No date and no version: the same results give the same bytes.
    figure.savefig(buffer, dpi=DOTS_PER_INCH, format="png", metadata={"Software": None})
    write_bytes(path, buffer.getvalue())


def _bandwidth(axes: Any, results: Results) -> None:
    name = "copy_GBs" if results.kind == "append" else "read_GBs"
    limit = results.ceilings[name]
    label = f"measured {name.removesuffix('_GBs')} limit, {limit:,.0f} GB/s"
    axes.axhline(limit, color=LIMIT, linewidth=1.2, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("megabytes that move")
    axes.set_ylabel("GB/s")
    axes.set_ylim(0, limit * 1.15)


def _roofline(axes: Any, results: Results) -> None:
    read, product = results.ceilings["read_GBs"], results.ceilings.get("matmul_TFLOPs")
    intensities = [row["flops"] / row["bytes"] for row in results.rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    if product is not None:
        ridge = product / read * 1e3
        axes.plot(
            [min(low, ridge / 4), ridge, max(high, ridge)],
            [min(low, ridge / 4) * read / 1e3, product, product],
            color=LIMIT,
            linewidth=1.2,
            label=f"measured limits, {read:,.0f} GB/s and {product:,.0f} TFLOP/s",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")


def _points(axes: Any, results: Results) -> None:
    ours = [_point(results.kind, row, row["ours_us"]) for row in results.rows if "ours_us" in row]
    peers = [
        _point(results.kind, row, best[1])
        for row in results.rows
        if (best := best_peer(row)) is not None
    ]
    for points, color, marker, label in (
        (peers, PEER, "x", "best of the other libraries"),
        (ours, OURS, "o", "paged-trt"),
    ):
        if points:
            _scatter(axes, points, color=color, marker=marker, label=label)


def _scatter(
    axes: Any, points: Sequence[tuple[float, float]], *, color: str, marker: str, label: str
) -> None:
    across, up = zip(*points, strict=True)
    axes.scatter(across, up, s=26, color=color, marker=marker, label=label, zorder=3)


def _point(kind: str, row: dict[str, Any], microseconds: float) -> tuple[float, float]:
    if kind == "prefill":
        return row["flops"] / row["bytes"], row["flops"] / microseconds / 1e6
    return row["bytes"] / 1e6, row["bytes"] / microseconds / 1e3
