"""What the probes of `paged-trt doctor` mean: findings with remedies, and who can serve a model."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins import trt
from paged_trt.plugins.error_catalog import pages
from paged_trt.plugins.errors import (
    ComputeCapabilityError,
    DeviceMissingError,
    TensorRtMissingError,
)
from paged_trt.plugins.launch.compiler import CACHE_VARIABLE, cache_directory, require_private

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"
FIRST_ARCH: Final = 80
"""Kernels are written for compute capability 8.0 and newer."""
HOPPER: Final = "sm_90"
_PACKAGES: Final = (
    "paged-trt",
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "polygraphy",
    "tensorrt",
    "tensorrt-rtx",
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "matplotlib",
)
Probe = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: what was looked at.
        status: OK, NOTE or PROBLEM.
        found: what it is.
        remedy: what to do about it; empty where nothing is to be done.
        code: stable code of the error that it leads to; None where it leads to none.
    """

    topic: str
    status: str
    found: str
    remedy: str = ""
    code: str | None = None


def system_findings() -> list[Finding]:
    """Python, packages and environment variables."""
    versions = {name: _version(name) for name in _PACKAGES}
    here = [f"{name} {version}" for name, version in versions.items() if version]
    variables = (trt.FLAVOR_VARIABLE, CACHE_VARIABLE)
    chosen = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
    return [
        Finding(
            topic="system",
            status=OK,
            found=f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        ),
        Finding(topic="packages", status=OK, found=", ".join(here)),
        *([Finding(topic="environment", status=OK, found=", ".join(chosen))] if chosen else []),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_finding(probe: Probe, device: int) -> Finding:
    """Driver and GPU."""
    if "error" in probe:
        return _failed("GPU and driver", probe, status=NOTE)
    devices = probe["devices"]
    if not 0 <= device < len(devices):
        code = DeviceMissingError.code
        found = f"there is no CUDA device {device}, this machine has {len(devices)}"
        return Finding(
            topic="GPU and driver", status=NOTE, found=found, remedy=pages()[code].remedy, code=code
        )
    gpu = devices[device]
    found = (
        f"device {device} of {len(devices)}: {gpu['name']}, compute capability "
        f"{capability(gpu['arch'])}, {gpu['memory_bytes']:,} bytes, driver for CUDA {probe['cuda']}"
    )
    if int(gpu["arch"].removeprefix("sm_")) < FIRST_ARCH:
        return Finding(
            topic="GPU and driver",
            status=PROBLEM,
            found=found,
            remedy="kernels need compute capability 8.0 or newer; pass `--executor reference`",
            code=ComputeCapabilityError.code,
        )
    return Finding(topic="GPU and driver", status=OK, found=found)


def capability(arch: str) -> str:
    """`9.0` of `sm_90`."""
    digits = arch.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}"


def flavor_findings(flavor: str, probe: Probe, arch: str | None) -> list[Finding]:
    """What one installed flavour of TensorRT can do here.

    Args:
        flavor: its name.
        probe: what `trt_probe.probe_flavor` reported.
        arch: architecture of the device; None where there is none.
    """
    if "error" in probe:
        return [_failed(flavor, probe)]
    version, problem = probe["version"], probe["problem"]
    found = f"{version}, {_ROUTES.get(probe['route'], 'no way to the plugin')}"
    findings = []
    if probe["library_fix"] is not None:
        findings.append(_library_finding(flavor, applied=probe["library_fix"]))
    if problem is not None:
        code, message = problem
        if arch == HOPPER and flavor == "tensorrt_rtx" and probe["runs"] is False:
            # Whatever its words are: TensorRT-RTX from 1.7 on refuses Hopper.
            code = ComputeCapabilityError.code
        remedy = pages()[code].remedy if code in pages() else ""
        text = f"{found}: {message.splitlines()[0]}"
        status = NOTE if arch is None else PROBLEM
        return [
            Finding(topic=flavor, status=status, found=text, remedy=remedy, code=code),
            *findings,
        ]
    state = "builds plans and opens them here" if probe["runs"] else "builds plans; none opened"
    remedy = _HOPPER_NOTE if arch == HOPPER and flavor == "tensorrt_rtx" else ""
    return [Finding(topic=flavor, status=OK, found=f"{found}, {state}", remedy=remedy), *findings]


_ROUTES: Final = {
    "plugin": "plugin by ONNX node",
    "gqa": "plugin by the GroupQueryAttention route",
}
_HOPPER_NOTE: Final = (
    "NVIDIA lists no Hopper GPU for TensorRT-RTX: times of whole engines say little about others"
)


def _library_finding(flavor: str, *, applied: bool) -> Finding:
    if applied:
        found = "the parser finds libtensorrt_rtx.so (the fix of the wheel's missing name is in)"
        return Finding(topic=f"{flavor} library", status=OK, found=found)
    return Finding(
        topic=f"{flavor} library",
        status=PROBLEM,
        found="libtensorrt_rtx.so is not found: the ONNX parser would end the process",
        remedy="link libtensorrt_rtx.so to libtensorrt_rtx.so.1 in the wheel's library folder",
        code=TensorRtMissingError.code,
    )


def kernels_finding(probe: Probe) -> Finding:
    """NVRTC and our kernels."""
    if "error" in probe:
        return _failed("NVRTC and kernels", probe)
    found = f"NVRTC {probe['nvrtc']} compiles all {probe['kernels']} kernels for {probe['arch']}"
    return Finding(topic="NVRTC and kernels", status=OK, found=found)


def onnxruntime_finding(probe: Probe) -> Finding:
    """The reference executor's runtime."""
    if "error" in probe:
        return _failed("onnxruntime", probe)
    found = f"{probe['version']} runs models on the CPU"
    return Finding(topic="onnxruntime", status=OK, found=found)


def cache_finding() -> Finding:
    """The kernel cache: where, how large, and whether it is trusted."""
    topic = "kernel cache"
    try:
        directory = cache_directory()
    except OSError as error:
        remedy = f"set {CACHE_VARIABLE} to a directory of yours"
        return Finding(topic=topic, status=NOTE, found=str(error), remedy=remedy)
    if not directory.is_dir():
        return _absent_cache(topic, directory)
    entries = list(directory.glob("*.cubin"))
    size = sum(_size(each) for each in entries)
    found = f"{directory}, {len(entries)} kernels, {size:,} bytes"
    try:
        require_private(directory)
    except OSError as error:
        return Finding(
            topic=topic,
            status=NOTE,
            found=f"{found}, not trusted: {error}; kernels are compiled anew in every process",
            remedy=f"`chmod go-w {directory}`, or set {CACHE_VARIABLE} to a directory of yours",
        )
    return Finding(topic=topic, status=OK, found=f"{found}, trusted; may be deleted at any time")


def _absent_cache(topic: str, directory: Path) -> Finding:
    """A cache that is not there yet: whether it can be made."""
    above = (directory.absolute(), *directory.absolute().parents)
    there = next(each for each in above if os.access(each, os.F_OK))
    if there.is_dir() and os.access(there, os.W_OK):
        return Finding(topic=topic, status=OK, found=f"{directory}, made at the first compile")
    why = "may not be written" if there.is_dir() else "is no directory"
    return Finding(
        topic=topic,
        status=NOTE,
        found=f"{directory} cannot be made, for {there} {why}; kernels are compiled anew in every "
        "process",
        remedy=f"set {CACHE_VARIABLE} to a directory of yours",
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _failed(topic: str, probe: Probe, *, status: str = PROBLEM) -> Finding:
    code, message = probe["error"]["code"], probe["error"]["message"]
    page = pages().get(code)
    remedy = page.remedy if page else ""
    first, *_ = message.splitlines() or ["no message"]
    return Finding(topic=topic, status=status, found=first, remedy=remedy, code=code)
