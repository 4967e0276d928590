"""The README's tables are what the results files say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from paged_trt.plugins.errors import ConfigError
from paged_trt.scripts import readme, results
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


def test_without_a_checkout_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    done = CliRunner().invoke(readme.main)
    assert done.exit_code == 1
    assert "run this in a checkout" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_commit_is_that_of_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # noqa: S607
    inside = tmp_path / "site-packages"
    inside.mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    words = ["git", "-C", str(tmp_path), *who, "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(words, check=True)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert len(results.commit()) == 12
    monkeypatch.setattr(results, "ROOT", inside)
    assert results.commit() == "unknown"
