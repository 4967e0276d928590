"""Compiles kernels, once per machine: a cache on disk that is safe to share and to delete.

An entry is named by a hash of everything that its machine code depends on: the source with all
that it includes, the kernel's instance, the architecture, the options and the version of the
compiler. Its own hash is in it, so a damaged entry is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from pathlib import Path
from typing import Final

import filelock

from paged_trt.plugins import cuda
from paged_trt.plugins.cuda import Cubin
from paged_trt.plugins.files import PRIVATE_MODE, write_bytes
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY, closure_sha256

CACHE_VARIABLE: Final = "PAGED_TRT_CACHE_DIR"
LOCK_SECONDS: Final = 600
"""How long to wait for another process that compiles the same kernel."""
_FORMAT: Final = "paged-trt kernel 1"
_LOG: Final = logging.getLogger("paged_trt")
_SPECIFIC: Final = {
    "sm_90": "sm_90a",
    "sm_100": "sm_100a",
    "sm_103": "sm_103a",
    "sm_120": "sm_120a",
}
"""A device runs the code of its own architecture with all its instructions."""


def compile_arch(arch: str) -> str:
    """Architecture to compile for, such as `sm_90a` for the device architecture `sm_90`."""
    return _SPECIFIC.get(arch, arch)


def cache_directory() -> Path:
    """PAGED_TRT_CACHE_DIR, else `paged-trt/kernels` in the user's cache directory.

    Raises:
        OSError: the user has no home directory.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    user = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification ignores a relative path.
    base = Path(user) if user and Path(user).is_absolute() else _home() / ".cache"
    return base / "paged-trt" / "kernels"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise OSError(str(error)) from error


class KernelCompiler:
    """NVRTC behind a cache.

    Args:
        directory: of the cache; None takes `cache_directory()` at the first compile.
        kernels: directory of the sources.

    Attributes:
        num_compiled: kernels that NVRTC compiled for this object.
        num_cached: kernels that came from the cache.
    """

    def __init__(self, directory: Path | None = None, *, kernels: Path = KERNEL_DIRECTORY) -> None:
        self._directory = directory
        self._kernels = kernels
        self._is_cached = True
        self.num_compiled = 0
        self.num_cached = 0

    def compile(self, source: str, name_expression: str, *, arch: str) -> Cubin:
        """Machine code of one kernel.

        Args:
            source: file in the kernel directory.
            name_expression: the instance, such as `append<__half, 64>`.
            arch: as `compile_arch` gives it.

        Raises:
            KernelCompileError: NVRTC refused the source.
            UnsupportedError: NVRTC or CUDA's headers are not installed.
        """
        if not self._is_cached:
            return self._compile(source, name_expression, arch)
        key = self._key(source, name_expression, arch)
        try:
            path = self._prepare() / f"{key}.cubin"
            if (found := _read_entry(path, arch)) is not None:
                self.num_cached += 1
                return found
            with filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS):
                return self._compile_into(path, source, name_expression, arch)
        except (OSError, filelock.Timeout) as error:
            self._is_cached = False
            _LOG.warning(
                "kernels are compiled without a cache, %s; set %s to a directory that can be "
                "written", error, CACHE_VARIABLE
            )  # fmt: skip
        return self._compile(source, name_expression, arch)

    def _prepare(self) -> Path:
        directory = self._directory or cache_directory()
        self._directory = directory
        # Machine code that is going to run: nobody else may write it.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(directory)
        return directory

    def _key(self, source: str, name_expression: str, arch: str) -> str:
        closure = closure_sha256(source, (self._kernels, *cuda.cuda_headers()))
        parts = (
            _FORMAT,
            closure,
            source,
            name_expression,
            arch,
            cuda.COMPILE_STANDARD,
            cuda.nvrtc_version(),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _compile_into(self, path: Path, source: str, name: str, arch: str) -> Cubin:
        # Another process may have written it while this one waited for the lock.
        if (found := _read_entry(path, arch)) is not None:
            self.num_cached += 1
            return found
        cubin = self._compile(source, name, arch)
        _write_entry(path, cubin)
        return cubin

    def _compile(self, source: str, name_expression: str, arch: str) -> Cubin:
        self.num_compiled += 1
        return cuda.compile_cubin(
            f'#include "{source}"\n',
            arch=arch,
            name_expressions=[name_expression],
            include_directories=[self._kernels],
        )


def require_private(directory: Path) -> None:
    """Refuse a directory in which any other user could leave what this process runs.

    Its group is trusted: on many systems every user has a group of their own.

    Raises:
        OSError: others may write it, or it belongs to neither this user nor root.
    """
    if os.name != "posix":
        return
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise OSError(f"other users may write {directory}")


def _write_entry(path: Path, cubin: Cubin) -> None:
    head = {"format": _FORMAT, "arch": cubin.arch, "names": dict(cubin.names), "log": cubin.log}
    write_checked(path, json.dumps(head).encode() + b"\n" + cubin.code)


def write_checked(path: Path, body: bytes) -> None:
    """Write a cache entry with its own hash, beside its place, then rename.

    A reader sees all of an entry or nothing of it.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    data = hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    write_bytes(path, data, mode=PRIVATE_MODE)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` wrote, or None where it is missing or damaged.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        _LOG.info("%s is damaged and is made again", path)
        return None
    return body


def _read_entry(path: Path, arch: str) -> Cubin | None:
    """The entry, or None where it is missing or not what was written."""
    if (body := read_checked(path)) is None:
        return None
    line, _, code = body.partition(b"\n")
    head = json.loads(line)
    if head["format"] != _FORMAT or head["arch"] != arch:
        return None
    return Cubin(code=code, arch=arch, names=head["names"], log=head["log"])
