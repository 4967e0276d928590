"""Import seam of CUDA's Python packages: the only module that names `cuda.*`.

Importing this module loads nothing. Compiling needs no device and no driver. `driver()` is the
module of driver calls; objects made of them (memory, streams, graphs) are in `device`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins.errors import (
    ConfigError,
    DeviceMissingError,
    ExecutionError,
    KernelCompileError,
    PackageMissingError,
    UnsupportedError,
)

COMPILE_STANDARD: Final = "c++17"
"""The only compiler option besides the architecture and the include path."""
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_INSTALL: Final = 'install it with `pip install "paged-trt[cuda]"`'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """Machine code of one architecture.

    Attributes:
        code: the cubin.
        arch: such as `sm_90a`.
        names: mangled name of each name expression.
        log: what the compiler said, warnings included.
    """

    code: bytes
    arch: str
    names: Mapping[str, str]
    log: str


def compile_cubin(
    source: str,
    *,
    arch: str,
    name_expressions: Sequence[str] = (),
    include_directories: Sequence[Path] = (),
) -> Cubin:
    """Compile CUDA C++ with NVRTC.

    Args:
        source: CUDA C++17.
        arch: `sm_80`, `sm_90a` and so on.
        name_expressions: kernels to instantiate, such as `append<__half, 64>`.
        include_directories: searched before CUDA's own headers.

    Raises:
        ConfigError: `arch` is no architecture.
        KernelCompileError: NVRTC refused the source; the message ends with its log.
        UnsupportedError: NVRTC or CUDA's headers are not installed.
    """
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise ConfigError(f"`{arch}` is no architecture; write it as `sm_90`")
    core = _core()
    include_path = [*map(str, include_directories), *map(str, cuda_headers())]
    options = core.ProgramOptions(arch=arch, std=COMPILE_STANDARD, include_path=include_path)
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", options)
        try:
            binary = program.compile("cubin", name_expressions=tuple(name_expressions), logs=log)
        finally:
            program.close()
            # The frames of an error would keep it: one that the garbage collector takes apart
            # prints a traceback of its own (cuda-core 1.2).
            del program
    except Exception as error:  # cuda.core has no public base class for NVRTC's errors
        raise KernelCompileError(f"NVRTC refused a kernel for {arch}: {error}") from error
    names = {
        str(expression): mangled.decode() if isinstance(mangled, bytes) else str(mangled)
        for expression, mangled in binary.symbol_mapping.items()
    }
    return Cubin(code=bytes(binary.code), arch=arch, names=names, log=log.getvalue())


def nvrtc_version() -> str:
    """Version of the compiler, such as `13.0`.

    Raises:
        UnsupportedError: NVRTC is not installed.
    """
    try:
        from cuda.bindings import nvrtc

        major, minor = check(nvrtc.nvrtcVersion(), "nvrtcVersion")
    except (ImportError, RuntimeError) as error:
        raise PackageMissingError(f"NVRTC is not installed ({error}); {_INSTALL}") from error
    return f"{major}.{minor}"


@functools.cache
def cuda_headers() -> tuple[Path, ...]:
    """Include directories of CUDA itself.

    Raises:
        UnsupportedError: they are not installed.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise PackageMissingError(f"`cuda-pathfinder` is not installed; {_INSTALL}") from error
    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise PackageMissingError(f"the headers of CUDA are not installed; {_INSTALL}")
    return (Path(found),)


@functools.cache
def driver() -> Any:
    """The module of driver calls, initialized. Each call gives (error, *values).

    Raises:
        UnsupportedError: there is no driver, or `cuda-bindings` is not installed.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise PackageMissingError(f"`cuda-bindings` is not installed; {_INSTALL}") from error
    try:
        check(module.cuInit(0), "cuInit")
    except RuntimeError as error:  # also what the bindings raise where libcuda is missing
        raise _no_device(error) from error
    return module


def check(result: tuple[Any, ...], what: str) -> Any:
    """Value of a call of the driver or of NVRTC: None, one value or a tuple.

    Args:
        result: what the call gave.
        what: the call, for the message.

    Raises:
        ExecutionError: the call failed.
    """
    error, *values = result
    if int(error):
        raise ExecutionError(f"{what} failed: {getattr(error, 'name', error)}")
    return tuple(values) if len(values) > 1 else next(iter(values), None)


def device_arch(ordinal: int | None = None) -> str:
    """Architecture of a device, such as `sm_90`.

    Args:
        ordinal: number of the device; None is the current one, 0 where none is.

    Raises:
        UnsupportedError: there is no driver or no such device.
    """
    return _device(ordinal)[0]


def multiprocessors(ordinal: int | None = None) -> int:
    """Multiprocessors of a device.

    Args:
        ordinal: as in `device_arch`.

    Raises:
        UnsupportedError: there is no driver or no such device.
    """
    return _device(ordinal)[1]


def device_name(ordinal: int | None = None) -> str:
    """Name of a device, such as `NVIDIA H200`.

    Args:
        ordinal: as in `device_arch`.

    Raises:
        UnsupportedError: there is no driver or no such device.
    """
    module = driver()
    ordinal = _current(module) if ordinal is None else ordinal
    _attributes(ordinal)
    device = check(module.cuDeviceGet(ordinal), "cuDeviceGet")
    name = check(module.cuDeviceGetName(256, device), "cuDeviceGetName")
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return text.partition("\0")[0]


def driver_version() -> str:
    """Version of CUDA that the driver serves, and its own where the system tells.

    Raises:
        UnsupportedError: there is no driver.
    """
    number = int(check(driver().cuDriverGetVersion(), "cuDriverGetVersion"))
    served = f"CUDA {number // 1000}.{number % 1000 // 10}"
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return served
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return f"{found[0]}, {served}" if found else served


def driver_available() -> bool:
    """Whether a CUDA device can be used."""
    try:
        device_arch()
    except UnsupportedError:
        return False
    return True


def _device(ordinal: int | None) -> tuple[str, int]:
    module = driver()
    return _attributes(_current(module) if ordinal is None else ordinal)


def _current(module: Any) -> int:
    error, current = module.cuCtxGetDevice()
    # No current context: CUDA's runtime would take the first device.
    return 0 if int(error) else int(current)


@functools.cache
def _attributes(ordinal: int) -> tuple[str, int]:
    """Architecture and multiprocessors."""
    module = driver()
    try:
        count = check(module.cuDeviceGetCount(), "cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise DeviceMissingError(
                f"there is no CUDA device {ordinal}, this machine has {count}; pass `--device` "
                "with a smaller number"
            )
        device = check(module.cuDeviceGet(ordinal), "cuDeviceGet")
        names = module.CUdevice_attribute
        major, minor, units = (
            check(module.cuDeviceGetAttribute(name, device), "cuDeviceGetAttribute")
            for name in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
    except ExecutionError as error:
        raise _no_device(error) from error
    return f"sm_{major}{minor}", units


def _no_device(error: Exception) -> DeviceMissingError:
    # The bindings' own message is about their search for libraries.
    is_missing = type(error).__name__ == "DynamicLibNotFoundError"
    reason = "there is no NVIDIA driver: libcuda is not found" if is_missing else str(error)
    return DeviceMissingError(
        f"no CUDA device can be used ({reason}); run this on a machine with an NVIDIA driver"
    )


def _core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise PackageMissingError(f"`cuda-core` is not installed; {_INSTALL}") from error
    return cuda.core
