"""`paged-trt build --check`: agrees on a sound build, exits 1 on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.runtime.compare import compare_engine
from paged_trt.scripts import build, build_check
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.toy import write_toy

LIMITS = ("--max-batch-size=2", "--max-input-len=100", "--max-kv-cache-capacity=200")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy, with engine directories that need no TensorRT."""
    write_toy(tmp_path / "toy", "gqa")

    class Built:
        class spec:  # noqa: N801 - as the manifest spells it
            layers = (0, 0)

            class pool:  # noqa: N801
                num_pages = 4

    def write(request: Any, *, on_plan: object) -> type[Built]:
        write_engine_dir(request.model, request.target)
        return Built

    monkeypatch.setattr(build, "build_engine_directory", write)
    return tmp_path / "toy" / "model.onnx"


def test_a_sound_build_agrees(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(model), "-o", str(tmp_path / "e"), *LIMITS, "--check"]) == 0
    assert "agrees: " in capsys.readouterr().err


def test_another_model_differs(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_toy(tmp_path / "other", "gqa", seed=1)
    other = tmp_path / "other" / "model.onnx"
    monkeypatch.setattr(
        build_check, "compare_engine", lambda _, *rest: compare_engine(other, *rest)
    )
    assert main(["build", str(model), "-o", str(tmp_path / "e"), *LIMITS, "--check"]) == 1
    assert "differs: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--dry-run", "--no-reference"])
def test_without_a_rewritten_model(
    model: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", str(model), "-o", str(tmp_path / "e"), *LIMITS, "--check", option]
    assert main(arguments) == ConfigError.exit_code
    assert f"`{option}` leaves none" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_a_model_that_onnxruntime_cannot_run(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path) -> None:
        raise UnsupportedError(f"onnxruntime cannot run {path} on a CPU")

    monkeypatch.setattr(build_check, "open_decoder", refuse)
    arguments = ["build", str(model), "-o", str(tmp_path / "e"), *LIMITS, "--check"]
    assert main(arguments) == UnsupportedError.exit_code
    assert "cannot run" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
