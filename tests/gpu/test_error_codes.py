"""Error codes that only a GPU can raise; those of the others are in tests/cli."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paged_trt.plugins import cuda, trt
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

LIMITS = ("--max-batch-size=2", "--max-input-len=100", "--max-kv-cache-capacity=200")
NO_KERNELS = """
import sys
from unittest import mock
from paged_trt.runtime import tensorrt_loader
from paged_trt.scripts.cli import end, main
with mock.patch.object(tensorrt_loader, "warm_kernels"), mock.patch(
    "paged_trt.plugins.launch.loaded.DeviceKernels.warm"
):
    code = main(sys.argv[1:])
end(code)
"""
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    write_toy(folder / "toy", Dialect.ATTENTION23_PAST)
    words = ["build", str(folder / "toy" / "model.onnx"), "-o", str(folder / "engine"), *LIMITS]
    done = run("-m", "paged_trt.scripts.cli", *words)
    assert done.returncode == 0, done.stderr
    return folder / "engine"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=300
    )


def code_of(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    (code,) = re.findall(r"^paged-trt: error\[(.*?)\]: ", done.stderr, re.MULTILINE)
    return str(code)


def refuses_hopper() -> bool:
    is_rtx = trt.flavor() == "tensorrt_rtx"
    return is_rtx and tuple(map(int, trt.version().split(".")[:2])) >= (1, 7)


def test_a_kernel_that_is_not_loaded(engine: Path) -> None:
    if refuses_hopper() and cuda.device_arch() == "sm_90":
        pytest.skip("this TensorRT opens no plan on this device: PTRT-T005 is what it raises")
    words = ("run", str(engine), "--input-ids", "1,2", "--executor", "tensorrt")
    done = run("-c", NO_KERNELS, *words)
    assert (code_of(done), done.returncode) == ("PTRT-K003", 3)


def test_a_device_that_tensorrt_refuses(engine: Path) -> None:
    """TensorRT-RTX 1.7 refuses a plan on a Hopper GPU in words of its own."""
    if not (refuses_hopper() and cuda.device_arch() == "sm_90"):
        pytest.skip("needs a Hopper GPU and TensorRT-RTX 1.7 or newer, which refuses it")
    words = ("run", str(engine), "--input-ids", "1,2", "--executor", "tensorrt")
    done = run("-m", "paged_trt.scripts.cli", *words)
    assert (code_of(done), done.returncode) == ("PTRT-T005", 2)


def test_doctor_finds_the_device(engine: Path) -> None:
    done = run("-m", "paged_trt.scripts.cli", "doctor", str(engine))
    assert done.returncode == 0, done.stderr
    arch = cuda.device_arch().removeprefix("sm_")
    assert f"compute capability {arch[:-1]}.{arch[-1]}" in " ".join(done.stdout.split())
