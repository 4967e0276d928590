"""Figures say what the code does."""

from __future__ import annotations

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins.hops import check_hops
from paged_trt.plugins.manifest import read_manifest
from paged_trt.scripts import figure_page_count, terminal_recording
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

FIGURES = sorted(figure_page_count.FIGURE.parent.glob("*.svg"))


@pytest.fixture(scope="module")
def hop_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("figures")
    write_toy(folder / "toy", Dialect.GQA)
    engine = write_engine_dir(folder / "toy" / "model.onnx", folder / "engine")
    return {hop.name for hop in check_hops(engine, read_manifest(engine))}


def words_of(path: Path) -> str:
    """Text of an SVG as one line."""
    texts = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314 - ours
    joined = " ".join("".join(each.itertext()) for each in texts)
    return " ".join(html.unescape(joined).replace("\xa0", " ").split())


def test_the_page_count_figure_has_every_hop(hop_names: set[str]) -> None:
    assert hop_names <= {box.name for box in figure_page_count.BOXES}
    text = words_of(figure_page_count.FIGURE)
    for box in figure_page_count.BOXES:
        for part in (box.name, box.carrier, box.check):
            assert part in text, "run `python -m paged_trt.scripts.figure_page_count`"
    names = {name for arrow in figure_page_count.ARROWS for name in arrow}
    assert names == {box.name for box in figure_page_count.BOXES}


def test_the_recording_shows_its_commands_and_every_hop(hop_names: set[str]) -> None:
    text = words_of(terminal_recording.RECORDING)
    for part in (*terminal_recording.COMMANDS, *hop_names, "agrees: ", "PTRT-C002"):
        assert " ".join(part.split()) in text, (
            "run `python -m paged_trt.scripts.terminal_recording`"
        )


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_a_figure_loads_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(href|src)=\"http|@import|url\(\"?http|<script", text)


def test_links_of_the_documents_lead_somewhere() -> None:
    root = figure_page_count.ROOT
    documents = [*root.glob("*.md"), *root.glob("*/*.md")]
    assert len(documents) > 8
    for document in documents:
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document}: {target}"
