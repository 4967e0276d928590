"""What the TensorRT that is installed can do on this machine, found out by doing it.

Meant for a process of its own: a fault inside TensorRT may end it.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Final

from paged_trt.plugins import trt
from paged_trt.plugins.errors import PagedTrtError, UnsupportedError
from paged_trt.plugins.tensorrt_messages import tensorrt_error

_SHAPE: Final = (1, 4)
_RTX_NAME: Final = "libtensorrt_rtx.so"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlavorReport:
    """One flavour of TensorRT on this machine.

    Attributes:
        version: as the module says.
        library_fix: whether the ONNX parser finds the library by the name that it opens; None
            where the flavour does not need that.
        route: how its parser reaches the plugin; None where it does not.
        builds: whether a tiny network becomes a plan.
        runs: whether that plan opens here; None where it was not tried.
        problem: the first thing that failed, with its code.
    """

    version: str
    library_fix: bool | None
    route: str | None = None
    builds: bool = False
    runs: bool | None = None
    problem: tuple[str, str] | None = None


def probe_flavor(*, has_device: bool) -> FlavorReport:
    """Try the flavour that `trt.flavor()` picks.

    Args:
        has_device: whether a CUDA device can be used: opening a plan needs one.

    Raises:
        TensorRtMissingError: it is not installed or does not load.
    """
    trt.load()
    report = FlavorReport(version=trt.version(), library_fix=_library_fix())
    try:
        report = dataclasses.replace(report, route=trt.route().value)
        plan = _tiny_plan()
        report = dataclasses.replace(report, builds=True)
        if has_device:
            _open(plan)
            report = dataclasses.replace(report, runs=True)
    except PagedTrtError as error:
        runs = False if report.builds else None
        return dataclasses.replace(report, runs=runs, problem=(error.code, str(error)))
    return report


def _library_fix() -> bool | None:
    if trt.flavor() != "tensorrt_rtx":
        return None
    try:
        ctypes.CDLL(_RTX_NAME)
    except OSError:
        return False
    return True


def _tiny_plan() -> bytes:
    api, lines = trt.load(), trt.LogLines()
    builder = api.Builder(logger := trt.logger(lines))
    network = trt.create_network(builder)
    layer = network.add_identity(network.add_input("x", api.float32, _SHAPE))
    network.mark_output(layer.get_output(0))
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    if plan is None:
        problem = f"{trt.flavor()} {trt.version()} builds no engine here"
        raise tensorrt_error(UnsupportedError, problem, log=lines.tail())
    del logger
    return bytes(plan)


def _open(plan: bytes) -> None:
    lines = trt.LogLines()
    runtime: Any = trt.load().Runtime(trt.logger(lines))
    if runtime.deserialize_cuda_engine(plan) is None:
        problem = f"{trt.flavor()} {trt.version()} opens no plan on this device"
        raise tensorrt_error(UnsupportedError, problem, log=lines.tail())
