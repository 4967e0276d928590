"""A picture of a session's pages: the pool by owner, the rows of the page table, occupancy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import numpy as np

from paged_trt.plugins.errors import PackageMissingError
from paged_trt.plugins.files import write_bytes
from paged_trt.runtime.snapshot import PoolSnapshot, SessionRecord

MAX_COLUMNS: Final = 64
MAX_LABELS: Final = 256
_FREE, _HELD = "#e5e5e5", "#555555"
_COLORS: Final = "tab20"
_NUM_COLORS: Final = 20


def write_picture(record: SessionRecord, path: Path) -> None:
    """Draw the fullest step and the occupancy over all steps, as PNG.

    Raises:
        PackageMissingError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissingError(
            'a picture needs matplotlib, which is not installed; `pip install "paged-trt[plots]"`'
        ) from error
    snapshot = record.fullest
    figure = Figure(figsize=(10, 8), layout="constrained")
    pool, rows, time = figure.subplots(3, 1, height_ratios=[3, 2, 1.5])
    owners = _owners(snapshot)
    _draw_pool(pool, snapshot, owners)
    _draw_rows(rows, snapshot, owners)
    _draw_time(time, record)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())


def _owners(snapshot: PoolSnapshot) -> dict[int, list[int]]:
    """Page -> slots that hold it."""
    owners: dict[int, list[int]] = {}
    for slot in snapshot.slots:
        for page in slot.pages:
            owners.setdefault(page, []).append(slot.slot)
    return owners


def _rgba(slots: list[int], *, is_held: bool) -> tuple[float, ...]:
    from matplotlib import colormaps, colors

    if slots:
        return tuple(colormaps[_COLORS](slots[0] % _NUM_COLORS))
    return tuple(colors.to_rgba(_HELD if is_held else _FREE))


def _draw_pool(axes: Any, snapshot: PoolSnapshot, owners: dict[int, list[int]]) -> None:
    count = len(snapshot.references)
    columns = min(MAX_COLUMNS, max(count, 1))
    image = np.ones((-(-count // columns), columns, 4))
    for page, references in enumerate(snapshot.references):
        slots = owners.get(page, [])
        image[divmod(page, columns)] = _rgba(slots, is_held=references > 0)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    shared = [divmod(page, columns) for page, slots in owners.items() if len(slots) > 1]
    if shared:
        axes.scatter([x for _, x in shared], [y for y, _ in shared], c="black", s=12)
    axes.set_title(
        f"Pool at its fullest: {snapshot.pages_in_use} of {count} pages in use (a colour per "
        "sequence, light grey free, dot shared, dark grey held by no live sequence)",
        fontsize=9,
        loc="left",
    )
    axes.set_xlabel(f"page id modulo {columns}", fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_yticks([])


def _draw_rows(axes: Any, snapshot: PoolSnapshot, owners: dict[int, list[int]]) -> None:
    size = snapshot.tokens_per_page
    is_labelled = sum(len(slot.pages) for slot in snapshot.slots) <= MAX_LABELS
    for slot in snapshot.slots:
        edges = [(place, 1) for place in range(len(slot.pages))]
        where = (slot.slot - 0.4, 0.8)
        axes.broken_barh(edges, where, facecolors=_FREE, edgecolors="white")
        color = _rgba([slot.slot], is_held=True)
        axes.broken_barh([(0, slot.tokens / max(size, 1))], where, facecolors=color)
        for place, page in enumerate(slot.pages if is_labelled else ()):
            mark = "*" if len(owners[page]) > 1 else ""
            axes.text(place + 0.5, slot.slot, f"{page}{mark}", ha="center", va="center", size=7)
    axes.set_title(
        f"Page table: a row per slot with its page ids, and how far pages of {size} tokens are "
        "filled",
        fontsize=9,
        loc="left",
    )
    axes.set_ylabel("slot", fontsize=8)
    axes.set_xlabel("place in the row", fontsize=8)
    axes.set_xlim(0, max(snapshot.max_pages_per_seq, 1))
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.invert_yaxis()


def _draw_time(axes: Any, record: SessionRecord) -> None:
    steps = [each.step for each in record.timeline]
    axes.step(steps, [each.pages_in_use for each in record.timeline], where="post", label="pages")
    axes.step(steps, [each.sequences for each in record.timeline], where="post", label="sequences")
    axes.set_ylim(bottom=0, top=len(record.latest.references) or 1)
    state = "was still running" if record.is_running else "had ended"
    axes.set_title(f"Occupancy by step; the session {state}", fontsize=9, loc="left")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step", fontsize=8)
    axes.legend(fontsize=8)
