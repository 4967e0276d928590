"""`paged-trt inspect` on a device: plans of the device, and what TensorRT says of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paged_trt.plugins import cuda
from paged_trt.plugins.manifest import network_name, read_manifest
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

LIMITS = ("--max-batch-size=2", "--max-input-len=100", "--max-kv-cache-capacity=200")
pytestmark = pytest.mark.gpu


def test_what_tensorrt_says_of_the_engine(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", Dialect.ATTENTION23_PAST)
    model, engine = tmp_path / "toy" / "model.onnx", tmp_path / "engine"
    for words in (
        ["build", str(model), "-o", str(engine), *LIMITS],
        ["inspect", str(engine), "--json"],
    ):
        command = [sys.executable, "-m", "paged_trt.scripts.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["device"] == {
        "arch": cuda.device_arch(),
        "multiprocessors": cuda.multiprocessors(),
    }
    found = data["tensorrt_engine"]
    assert found["num_profiles"] == 2
    spec = read_manifest(engine).spec
    assert spec.pool.num_pages == 4
    assert found["name"] == network_name(spec)
    assert found["num_layers"] > 0
    assert found["device_memory_bytes"] > 0
