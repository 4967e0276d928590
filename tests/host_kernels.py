"""Kernels compiled by g++ for a CPU; `kernels/host` has what they need of CUDA."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

_HOST: Final = Path(__file__).parent / "kernels" / "host"


def load_on_host(name: str, folder: Path) -> ctypes.CDLL:
    """`kernels/host/NAME.cpp` as a library; without a compiler the test is skipped.

    Args:
        name: of the source, without its ending.
        folder: gets the library.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: it compiles the kernel for a CPU")
    path = folder / f"{name}.so"
    # A product and a sum are two roundings, unless the kernel says otherwise.
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    paths = [f"-I{_HOST}", f"-I{KERNEL_DIRECTORY}", str(_HOST / f"{name}.cpp"), "-o", str(path)]
    subprocess.run([compiler, *options, *paths], check=True)
    return ctypes.CDLL(str(path))
