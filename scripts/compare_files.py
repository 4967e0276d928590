"""Comparisons as files: JSON, histograms as PNG, and one HTML page that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins.errors import PackageMissingError
from paged_trt.plugins.files import write_bytes, write_text
from paged_trt.plugins.version import version
from paged_trt.runtime.compare import ComparisonReport
from paged_trt.runtime.differences import HISTOGRAM_EDGES
from paged_trt.runtime.same_model_report import SameModelReport
from paged_trt.scripts import compare_table
from paged_trt.scripts.error_output import printable
from paged_trt.scripts.files import require_writable

_TEMPLATE: Final = "compare_report.html"
_DOTS_PER_INCH: Final = 110
_MOST_NAMES: Final = 50
_LEGEND: Final = {"loc": "outside lower center", "ncols": 3, "fontsize": "small", "frameon": False}
_LARGEST_RATIO: Final = 1e3
"""Where the axis of errors ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Where a comparison is written; None where it is not.

    Attributes:
        json: every number.
        html: one page for people.
        png: histograms.
    """

    json: Path | None
    html: Path | None
    png: Path | None

    def require_places(self) -> None:
        """Refuse what could not be written later.

        Raises:
            ConfigError: a folder is missing, or a name is that of a folder; PackageMissingError
                where a package is not installed.
        """
        for field in dataclasses.fields(self):
            require_writable(getattr(self, field.name), option=f"--{field.name}")
        needed = [
            *(["matplotlib.figure"] if self.html or self.png else []),
            *(["jinja2"] if self.html else []),
        ]
        for name in needed:
            _require_package(name)

    def write(self, reports: Sequence[ComparisonReport]) -> None:
        """Write what was asked for.

        Raises:
            OSError: a file cannot be written.
        """
        if self.json is not None:
            write_text(self.json, report_json(reports))
        picture = histogram_png(reports) if self.png or self.html else b""
        if self.png is not None:
            write_bytes(self.png, picture)
        if self.html is not None:
            write_text(self.html, report_html(reports, picture))


def report_json(reports: Sequence[ComparisonReport]) -> str:
    """Every number of every engine."""
    data = {
        "passed": all(report.passed for report in reports),
        "reports": [report.to_json() for report in reports],
    }
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def histogram_png(reports: Sequence[ComparisonReport]) -> bytes:
    """Histogram of all logit differences, and errors by layer where they were compared."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layers = {
        f"C{index}": report.same_model
        for index, report in enumerate(reports)
        if report.same_model is not None
    }
    layout = ConstrainedLayoutEngine(h_pad=0.08, hspace=0.06)
    size = (9, 6.6 if layers else 3.6)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout=layout)
    axes = figure.subplots(2 if layers else 1, 1, squeeze=False)[:, 0]
    _draw_histogram(axes[0], reports)
    if layers:
        _draw_layers(axes[1], layers)
    # Outside: inside, it would hide what is drawn.
    figure.legend(*axes[0].get_legend_handles_labels(), **_LEGEND)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def report_html(reports: Sequence[ComparisonReport], picture: bytes) -> str:
    """One page with everything in it: no script, no link, the picture inside.

    Args:
        reports: one per engine.
        picture: PNG of `histogram_png`.
    """
    import jinja2
    import markupsafe

    def code(text: str) -> str:
        """Text with what stands between backticks as code; everything in it is escaped."""
        parts = [str(markupsafe.escape(part)) for part in text.split("`")]
        # Without its partner a backtick is one.
        if len(parts) % 2 == 0:
            parts[-2:] = ["`".join(parts[-2:])]
        return markupsafe.Markup(  # noqa: S704 - every part is escaped
            "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
        )

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = code
    return environment.get_template(_TEMPLATE).render(
        reports=reports,
        passed=all(report.passed for report in reports),
        picture=base64.b64encode(picture).decode("ascii"),
        text=compare_table,
        version=version(),
    )


def _draw_histogram(axes: Any, reports: Sequence[ComparisonReport]) -> None:
    step = HISTOGRAM_EDGES[1] / HISTOGRAM_EDGES[0]
    edges = [HISTOGRAM_EDGES[0] / step, *HISTOGRAM_EDGES, HISTOGRAM_EDGES[-1] * step]
    for index, report in enumerate(reports):
        style = {"color": f"C{index}", "linewidth": 1.5}
        axes.stairs(report.histogram(), edges, label=_label(report), **style)
    axes.axvline(1, color="tab:red", linestyle="--", linewidth=1, label="tolerance")
    axes.set(
        xscale="log",
        xlabel="|difference of a logit| / tolerance (first bin: smaller or equal, last: larger)",
        ylabel="logits",
        title="Engine against model",
    )
    axes.set_yscale("symlog")
    axes.set_ylim(bottom=0, top=4 * max(max(report.histogram()) for report in reports))


def _draw_layers(axes: Any, reports: Mapping[str, SameModelReport]) -> None:
    """Errors by layer; `reports` by colour, which is that of the same engine's histogram."""
    # The longest first: one without attention outputs has the other names in the same order.
    longest = sorted(reports.values(), key=lambda report: -len(report.tensors))
    names = list(dict.fromkeys(each.name for report in longest for each in report.tensors))
    for index, (colour, report) in enumerate(reports.items()):
        parts = [min(each.ratio, _LARGEST_RATIO) for each in report.tensors]
        places = [names.index(each.name) for each in report.tensors]
        # The later ones are smaller: engines that agree are drawn on top of each other.
        size = max(2, 7 - 2 * index)
        style = {"color": colour, "marker": "o", "markersize": size, "linewidth": 1}
        axes.plot(places, parts, clip_on=False, **style)
    axes.axhline(1, color="tab:red", linestyle="--", linewidth=1)
    # A name for each is readable up to so many; logits are the last.
    every = -(-len(names) // _MOST_NAMES)
    shown = [*range(0, len(names) - every, every), len(names) - 1]
    axes.set_xticks(shown, [names[index] for index in shown])
    axes.set(
        ylabel="error / limit", title="Engine against the same model on the reference executor"
    )
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_ylim(bottom=0, top=2 * _LARGEST_RATIO)
    axes.tick_params(axis="x", labelrotation=90, labelsize="small")


def _label(report: ComparisonReport) -> str:
    # Between two dollars matplotlib reads a formula.
    name = Path(report.engine).name.replace("$", r"\$")
    return printable(f"{name} ({report.executor})")


def _require_package(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise PackageMissingError(
            f'{error.name} is not installed; run `pip install "paged-trt[plots]"`'
        ) from error
