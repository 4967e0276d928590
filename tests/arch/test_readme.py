"""The README's tables are what the results files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts.readme import README, render


def test_tables_are_made_from_the_results_files() -> None:
    text = README.read_text(encoding="utf-8")
    assert "<!-- results: e2e -->" in text
    assert render(text) == text


def test_a_table_without_results_is_empty(tmp_path: Path) -> None:
    text = "<!-- results: e2e -->\nold\n<!-- end -->"
    assert render(text, tmp_path) == "<!-- results: e2e -->\n<!-- end -->"


def test_an_unknown_table_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`speed`; known are"):
        render("<!-- results: speed -->\n<!-- end -->", tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"broken\.json is no results file"):
        render("", tmp_path)
