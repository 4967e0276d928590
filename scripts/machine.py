"""What a results file says about the machine."""

from __future__ import annotations

import platform
import shutil
import subprocess


def gpu_and_driver(device: int = 0) -> tuple[str, str]:
    """Name of a CUDA device and version of its driver; `none` where there is no driver."""
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader", f"--id={device}")
    name, _, driver = output_of("nvidia-smi", *query).partition(", ")
    return (name, driver) if driver else (f"none ({platform.machine()} CPU)", "none")


def output_of(program: str, *words: str) -> str:
    """Standard output of a program; empty where it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return ""
    done = subprocess.run(  # noqa: S603 - our own words
        [path, *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
