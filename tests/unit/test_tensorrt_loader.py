"""What the loader refuses before it reads a plan, with both sides in the message."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paged_trt.plugins import cuda, trt
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.fields import ABI_VERSION
from paged_trt.plugins.manifest import BuildRecord
from paged_trt.runtime.tensorrt_loader import check_runnable


def record(**changes: Any) -> BuildRecord:
    values: dict[str, Any] = {
        "flavor": "tensorrt_rtx",
        "tensorrt_version": "1.6.1.120",
        "route": "gqa",
        "abi_version": ABI_VERSION,
        "kernel_source_sha256": "0" * 64,
        "compute_capabilities": ("8.0+",),
        "attention_plan": None,
    }
    return BuildRecord(**{**values, **changes})


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_arch", lambda ordinal: "sm_90")
    monkeypatch.setattr(trt, "flavor", lambda: "tensorrt_rtx")
    monkeypatch.setattr(trt, "version", lambda: "1.6.1.120")


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("capabilities", [("8.0+",), ("9.0",), ("8.9", "9.0"), ("9.0+",)])
def test_a_plan_for_this_device_runs(capabilities: tuple[str, ...]) -> None:
    assert check_runnable(record(compute_capabilities=capabilities), 0) == "sm_90"


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensorrt_version": "1.7.1.116"},
            "built by tensorrt_rtx 1.7.1.116 and tensorrt_rtx 1.6.1.120 is installed",
        ),
        (
            {"flavor": "tensorrt", "tensorrt_version": "10.13.3"},
            "built by tensorrt 10.13.3 and tensorrt_rtx 1.6.1.120 is installed",
        ),
        ({"compute_capabilities": ("8.9",)}, "capability 8.9 and device 3 has 9.0"),
        ({"compute_capabilities": ("10.0+",)}, "capability 10.0+ and device 3 has 9.0"),
        ({"compute_capabilities": ("8.0", "12.0")}, "capability 8.0, 12.0 and device 3"),
    ],
)
def test_another_plan_is_refused_with_both_sides(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        check_runnable(record(**changes), 3)


def test_without_a_device_the_reason_is_the_device() -> None:
    if cuda.driver_available():
        pytest.skip("there is a device")
    with pytest.raises(UnsupportedError, match="no CUDA device can be used"):
        check_runnable(record(), 0)
