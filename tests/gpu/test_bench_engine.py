"""`paged-trt bench engine` on a device: every column is there and adds up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.results import read_results

LIMITS = ("--max-batch-size=4", "--max-input-len=300", "--max-kv-cache-capacity=400")
pytestmark = pytest.mark.gpu


def test_the_parts_of_a_step(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", Dialect.ATTENTION23_PAST)
    engine, output = tmp_path / "engine", tmp_path / "engine.json"
    model = tmp_path / "toy" / "model.onnx"
    for words in (
        ["build", str(model), "-o", str(engine), *LIMITS],
        ["bench", "engine", str(engine), "--executor=tensorrt", "--cell=4x280", "-o", str(output)],
    ):
        command = [sys.executable, "-m", "paged_trt.scripts.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    (row,) = read_results(output).rows
    assert row["replay_us"] > 0
    assert row["ours_alone_us"] > 0
    assert row["ours_share"] == pytest.approx(
        (row["replay_us"] - row["replay_without_ours_us"]) / row["replay_us"], abs=1e-3
    )
    assert row["peers_us"]["onnxruntime_paged"]["decode_us"] > 0
    assert row["plan"]
