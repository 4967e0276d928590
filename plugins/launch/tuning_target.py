"""The device, driver, kernels and compiler of this process, for plans that were measured."""

from __future__ import annotations

import functools

from paged_trt.plugins import cuda
from paged_trt.plugins.launch.sources import kernel_source_sha256
from paged_trt.plugins.launch.tuned import TunedPlans, TuningTarget
from paged_trt.plugins.launch.tuned_file import read_tuned


def tuning_target(ordinal: int | None = None) -> TuningTarget:
    """What a measurement of now holds for.

    Args:
        ordinal: number of the device; None is the current one.

    Raises:
        UnsupportedError: there is no device, or no compiler.
    """
    return TuningTarget(
        gpu=cuda.device_name(ordinal),
        arch=cuda.device_arch(ordinal),
        num_multiprocessors=cuda.multiprocessors(ordinal),
        driver=cuda.driver_version(),
        kernels=_kernels(),
        compiler=cuda.nvrtc_version(),
    )


def tuned_plans() -> TunedPlans:
    """Plans that were measured on the current device; read once per process and device."""
    return _read_once(tuning_target())


@functools.cache
def _kernels() -> str:
    return kernel_source_sha256()


@functools.cache
def _read_once(target: TuningTarget) -> TunedPlans:
    return read_tuned(target)
