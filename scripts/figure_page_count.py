"""Draws `scripts/figures/page_count.svg`: where the page count goes, and what checks it there.

Needs the extra `plots`. A test holds that the figure names every hop that is checked.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import click

from paged_trt.scripts.cli import end, run_command
from paged_trt.scripts.results import ROOT

FIGURE: Final = ROOT / "scripts" / "figures" / "page_count.svg"
_EDGE, _FILL, _SPEC, _ARROW = "#c5cbd5", "#f8fafc", "#dbeafe", "#6b7280"
_WIDTH, _HEIGHT, _GAP = 2.9, 1.02, 0.28


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HopBox:
    """A place that carries the count.

    Attributes:
        name: the hop; of `plugins.hops` where that module checks it.
        carrier: what carries the count.
        check: what compares it.
        column: 0 build, 1 engine directory, 2 load and run.
        row: from the top.
    """

    name: str
    carrier: str
    check: str
    column: int
    row: int


COLUMNS: Final = ("build", "engine directory", "load and run")
BOXES: Final = (
    HopBox(
        name="user",
        carrier="--retained-pages, --kv-pool-pages",
        check="KvPoolSpec: minimum to int32 limit",
        column=0,
        row=0,
    ),
    HopBox(
        name="spec",
        carrier="KvPoolSpec, one object",
        check="valid by construction",
        column=0,
        row=1,
    ),
    HopBox(
        name="ONNX model",
        carrier="pool dims and node attributes",
        check="rewrite, lowering, inspect, load",
        column=0,
        row=2,
    ),
    HopBox(
        name="profiles",
        carrier="min = opt = max of every pool",
        check="plugin and network table",
        column=0,
        row=3,
    ),
    HopBox(
        name="plugin",
        carrier="fields in, fields out",
        check="exact names, actual dims",
        column=0,
        row=4,
    ),
    HopBox(
        name="plan",
        carrier="network name, plugin fields",
        check="name read in the file's bytes",
        column=1,
        row=2,
    ),
    HopBox(
        name="manifest",
        carrier="pool.num_pages, geometry hash",
        check="schema, hash of every file",
        column=1,
        row=0,
    ),
    HopBox(
        name="tensor table",
        carrier="dim 0 of every pool tensor",
        check="rebuilt from the spec, compared",
        column=1,
        row=1,
    ),
    HopBox(
        name="engine",
        carrier="profiles, types, aliases",
        check="check_engine_table after opening",
        column=2,
        row=0,
    ),
    HopBox(
        name="registry and page table",
        carrier="the same KvPoolSpec object",
        check="every id before the upload",
        column=2,
        row=1,
    ),
    HopBox(
        name="pools",
        carrier="one allocation per layer",
        check="bound at one address in and out",
        column=2,
        row=2,
    ),
    HopBox(
        name="kernel arguments",
        carrier="num_pages of each launch",
        check="ids outside the pool are masked",
        column=2,
        row=3,
    ),
)
ARROWS: Final = (
    ("user", "spec"),
    ("spec", "ONNX model"),
    ("ONNX model", "profiles"),
    ("profiles", "plugin"),
    ("plugin", "plan"),
    ("spec", "manifest"),
    ("manifest", "tensor table"),
    ("manifest", "engine"),
    ("plan", "engine"),
    ("engine", "registry and page table"),
    ("registry and page table", "pools"),
    ("pools", "kernel arguments"),
)


def write_figure(path: Path) -> None:
    """Draw the boxes and arrows as SVG whose text stays text."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "paged-trt", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(10, 6))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(-0.2, 3 * (_WIDTH + 0.7) - 0.4)
        axes.set_ylim(5 * (_HEIGHT + _GAP) + 0.35, -0.6)
        axes.axis("off")
        for index, title in enumerate(COLUMNS):
            axes.text(_left(index), -0.25, title, size=12, weight="bold", color="#1f2937")
        places = {box.name: box for box in BOXES}
        for start, end in ARROWS:
            _arrow(axes, places[start], places[end])
        for box in BOXES:
            _box(axes, box)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _left(column: int) -> float:
    return column * (_WIDTH + 0.7)


def _top(row: int) -> float:
    return row * (_HEIGHT + _GAP)


def _box(axes: Any, box: HopBox) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = _left(box.column), _top(box.row)
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            _WIDTH,
            _HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=_SPEC if box.name == "spec" else _FILL,
            edgecolor=_EDGE,
            zorder=2,
        )
    )
    axes.text(x + 0.12, y + 0.27, box.name, weight="bold", color="#1f2937", zorder=3)
    axes.text(x + 0.12, y + 0.57, box.carrier, size=8.5, color="#374151", zorder=3)
    axes.text(x + 0.12, y + 0.85, f"✓ {box.check}", size=8.5, color="#15803d", zorder=3)


def _arrow(axes: Any, start: HopBox, end: HopBox) -> None:
    if start.column == end.column:
        x = _left(start.column) + _WIDTH / 2
        tail, head = (x, _top(start.row) + _HEIGHT), (x, _top(end.row))
    else:
        tail = (_left(start.column) + _WIDTH, _top(start.row) + _HEIGHT / 2)
        head = (_left(end.column), _top(end.row) + _HEIGHT / 2)
    style = {"arrowstyle": "-|>", "color": _ARROW, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=head, xytext=tail, arrowprops=style, zorder=1)


@click.command()
def main() -> None:
    """Draw the figure; needs a checkout (`pip install -e .`) and the extra `plots`.

    \b
    Example:
      python -m paged_trt.scripts.figure_page_count
    """
    if not FIGURE.parent.is_dir():
        raise click.ClickException(f"there is no {FIGURE.parent}; run this in a checkout")
    write_figure(FIGURE)


if __name__ == "__main__":
    end(run_command(main))
