"""Golden files of the kit for a GPU host: made here, checked with the real `polygraphy run`."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from polygraphy_cli import register

from paged_trt.plugins import cuda
from paged_trt.scripts.gpu_host import golden, host_results
from paged_trt.scripts.gpu_host.kit import ROOT
from paged_trt.scripts.results import read_results


def test_golden_files_are_made_and_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reference executor in the place of the plan; not where a step is another one."""
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("polygraphy")
    register(tmp_path / "installed")
    paths = [str(tmp_path / "installed"), str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setattr(golden, "PROMPT_LENS", (1, 129))
    monkeypatch.setattr(golden, "POOLS", {"int8": golden.POOLS["int8"]})
    monkeypatch.setattr(host_results, "gpu_and_driver", lambda device: ("NVIDIA Test 1", "1.2"))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "13.0")
    archive = tmp_path / "golden.tar.xz"
    made = CliRunner().invoke(golden.main, ["make", str(archive)])
    assert made.exit_code == 0, (made.output, made.exception)
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"int8/engine/model.plan", "int8/inputs", "int8/outputs", "int8/polygraphy.json"} < names
    words = ["check", str(archive), "-o", str(tmp_path / "out"), "--on-cpu", "--commit", "abc"]
    done = CliRunner().invoke(golden.main, words)
    (path,) = (tmp_path / "out").glob("polygraphy-nvidia-test-1-*.json")
    (row,) = read_results(path).rows
    assert (done.exit_code, row["passed"], row["pass_rate"]) == (0, True, 100.0), row["output"]
    assert row["steps"] > 5
    folder = golden._unpacked(archive, tmp_path / "unpacked")[0]
    first, second, *_ = sorted((folder / "inputs").iterdir())
    shutil.copy(second, first)
    assert not golden.checked(folder, on_cpu=True)["passed"]
