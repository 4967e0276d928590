"""Comparisons as files: JSON, histograms as PNG, and one HTML page that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import io
import json
from collections.abc import Sequence
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

    layers = [(each.same_model, _label(each)) for each in reports if each.same_model is not None]
    figure = Figure(figsize=(9, 6 if layers else 3.2), dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(2 if layers else 1, 1, squeeze=False)[:, 0]
    _draw_histogram(axes[0], reports)
    if layers:
        _draw_layers(axes[1], *zip(*layers, strict=True))
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

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
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
    for report in reports:
        axes.stairs(report.histogram(), edges, label=_label(report), linewidth=1.5)
    axes.axvline(1, color="tab:red", linestyle="--", linewidth=1, label="tolerance")
    axes.set(
        xscale="log",
        xlabel="|difference of a logit| / tolerance (first bin: smaller or equal, last: larger)",
        ylabel="logits",
        title="Engine against model",
    )
    axes.set_yscale("symlog")
    axes.set_ylim(bottom=0, top=4 * max(max(report.histogram()) for report in reports))
    axes.legend(fontsize="small", loc="upper right")


def _draw_layers(axes: Any, reports: Sequence[SameModelReport], labels: Sequence[str]) -> None:
    for report, label in zip(reports, labels, strict=True):
        names = [each.name for each in report.tensors]
        parts = [min(each.ratio, _LARGEST_RATIO) for each in report.tensors]
        axes.plot(names, parts, marker="o", label=label)
    axes.axhline(1, color="tab:red", linestyle="--", linewidth=1, label="limit")
    axes.set(
        ylabel="error / limit", title="Engine against the same model on the reference executor"
    )
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_ylim(bottom=0, top=2 * _LARGEST_RATIO)
    axes.tick_params(axis="x", labelrotation=90, labelsize="small")
    axes.legend(fontsize="small", loc="upper left")


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
