"""Commands of the form `python -m MODULE`: an example in each help, errors in one line."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_trt.scripts import error_pages
from paged_trt.scripts.cli import run_command
from paged_trt.scripts.example_models import toy

MODULES = (
    "error_pages",
    "example_models.smollm2",
    "example_models.toy",
    "figure_page_count",
    "load_plot",
    "readme",
    "terminal_recording",
)
GPU_HOST = (
    ("gpu_host",),
    ("gpu_host", "pack"),
    ("gpu_host", "unpack"),
    ("gpu_host", "run"),
    ("gpu_host.golden",),
    ("gpu_host.golden", "make"),
    ("gpu_host.golden", "check"),
    ("gpu_host.sanitizer",),
)


@pytest.mark.parametrize("module", MODULES)
def test_help_has_an_example(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"paged_trt.scripts.{module}"
    assert run_command(importlib.import_module(name).main, ["--help"]) == 0
    assert f"python -m {name}" in capsys.readouterr().out.split("Example:")[1]


@pytest.mark.parametrize("words", GPU_HOST, ids=" ".join)
def test_help_of_the_gpu_host_has_an_example(words: tuple[str, ...]) -> None:
    module, *rest = words
    name = f"paged_trt.scripts.{module}"
    done = subprocess.run(
        [sys.executable, "-m", name, *rest, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(("python -m", name, *rest)) in done.stdout


def test_a_module_ends_in_one_line_and_the_exit_code_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.example_models.toy", "file"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 2
    assert done.stderr == (
        "paged-trt: error[PTRT-C001]: `file` is there already; delete it or pass another folder\n"
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("module", ["example_models.toy", "example_models.smollm2"])
def test_an_example_model_goes_into_a_folder_of_its_own(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    command = importlib.import_module(f"paged_trt.scripts.{module}").main
    assert run_command(command, [str(tmp_path)]) == 2
    assert "delete it or pass another folder" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "mine"


def test_a_wrong_option_shows_the_usage_of_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(toy.main, ["--dialect", "gqb", "toy"], name="python -m toy") == 2
    text = capsys.readouterr().err
    assert "Usage: python -m toy [OPTIONS] OUT_DIR" in text
    assert "gqa-split" in text


def test_a_picture_of_no_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("paged_trt.scripts.load_plot").main
    words = [str(tmp_path / "none.json"), str(tmp_path / "load.png")]
    assert run_command(command, words) == 2
    assert "none.json is no results file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_error_pages_are_written_in_a_checkout_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An installation has the folder of the catalogue, and no catalogue."""
    monkeypatch.setattr(error_pages, "CATALOGUE", tmp_path / "errors.md")
    assert run_command(error_pages.main, []) == 2
    assert "run this in a checkout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
