"""Import seam of CUDA's Python packages: the only module that names `cuda.*`.

Importing this module loads nothing. Compiling needs no device and no driver.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_trt.plugins.errors import ConfigError, KernelCompileError, UnsupportedError

_INSTALL = 'install it with `pip install "paged-trt[cuda]"`'


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
    include_path = [*map(str, include_directories), *map(str, _cuda_headers())]
    options = core.ProgramOptions(arch=arch, std="c++17", include_path=include_path)
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", options)
        binary = program.compile("cubin", name_expressions=tuple(name_expressions), logs=log)
    except Exception as error:  # cuda.core has no public base class for NVRTC's errors
        raise KernelCompileError(f"NVRTC refused a kernel for {arch}: {error}") from error
    names = {
        str(expression): mangled.decode() if isinstance(mangled, bytes) else str(mangled)
        for expression, mangled in binary.symbol_mapping.items()
    }
    return Cubin(code=bytes(binary.code), arch=arch, names=names, log=log.getvalue())


@functools.cache
def device_arch() -> str:
    """Architecture of the current device, such as `sm_90`.

    Raises:
        UnsupportedError: there is no driver, no device, or `cuda-core` is not installed.
    """
    core = _core()
    try:
        major, minor = core.Device().compute_capability
    except Exception as error:  # a missing driver and a missing device raise unrelated types
        raise UnsupportedError(
            f"no CUDA device can be used ({error}); run this on a machine with an NVIDIA driver"
        ) from error
    return f"sm_{major}{minor}"


def driver_available() -> bool:
    """Whether a CUDA device can be used."""
    try:
        device_arch()
    except UnsupportedError:
        return False
    return True


def _core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise UnsupportedError(f"`cuda-core` is not installed; {_INSTALL}") from error
    return cuda.core


@functools.cache
def _cuda_headers() -> tuple[Path, ...]:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise UnsupportedError(f"`cuda-pathfinder` is not installed; {_INSTALL}") from error
    found = find_nvidia_header_directory("cudart")
    if found is None:
        raise UnsupportedError(f"the headers of CUDA are not installed; {_INSTALL}")
    return (Path(found),)
