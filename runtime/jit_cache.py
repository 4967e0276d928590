"""Keeps what TensorRT-RTX compiled for an engine on this device, for the next start.

RTX compiles the kernels of an engine on the device that runs it, for each batch size that it
meets. Without a cache a model of 30 layers waits many seconds at its first steps, at every start
and again in every execution context. One cache serves all contexts of an executor, and its file
serves the next process. It lies in the directory of the kernel cache and is trusted as that is:
it is machine code, so it is not read where another user may write.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins.launch.compiler import (
    CACHE_VARIABLE,
    cache_directory,
    read_checked,
    require_private,
    write_checked,
)

_FORMAT: Final = "paged-trt rtx kernels 1"
_LOG: Final = logging.getLogger("paged_trt")


class JitCache:
    """A runtime cache of TensorRT-RTX and its file.

    Full TensorRT compiles when it builds and has no such cache: then this one does nothing.

    Args:
        engine: TensorRT engine.
        key: what the compiled kernels belong to: the plan's SHA-256, the version of TensorRT and
            the architecture. RTX itself refuses a file of another device, driver or version.
        directory: of the file; None takes the directory of the kernel cache.

    Attributes:
        was_found: the file was there and RTX took it.
    """

    def __init__(self, engine: Any, key: tuple[str, ...], *, directory: Path | None = None) -> None:
        self._directory = directory
        self._name = hashlib.sha256("\0".join((_FORMAT, *key)).encode()).hexdigest() + ".rtx"
        settings = engine.create_runtime_config()
        create = getattr(settings, "create_runtime_cache", None)
        self._cache: Any = create() if create is not None else None
        self._is_kept = True
        self._saved: str | None = None
        self.was_found = self._load()

    def attach(self, settings: Any) -> None:
        """Have the contexts that are made with `settings`, an IRuntimeConfig, use the cache."""
        if self._cache is not None:
            settings.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the file where the cache has grown; one that cannot be written is logged once."""
        if self._cache is None or not self._is_kept:
            return
        try:
            held = self._cache.serialize()
            # None where RTX has logged why.
            if held is not None:
                self._write(bytes(memoryview(held)))
        except Exception as error:  # whatever it is, the step that just ran is worth more
            self._give_up(error)

    def _write(self, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        if digest != self._saved:
            write_checked(self._path(), data)
            self._saved = digest

    def _load(self) -> bool:
        if self._cache is None:
            return False
        try:
            data = read_checked(self._path())
        except OSError as error:
            self._give_up(error)
            return False
        if data is None:
            return False
        try:
            is_taken = self._cache.deserialize(data)
        except Exception as error:  # the engine runs without them
            _LOG.warning("TensorRT-RTX does not read the kernels that it kept: %s", error)
            return False
        if not is_taken:
            _LOG.info("the kernels that TensorRT-RTX kept are of another device or driver")
            return False
        self._saved = hashlib.sha256(data).hexdigest()
        return True

    def _path(self) -> Path:
        directory = self._directory or cache_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(directory)
        return directory / self._name

    def _give_up(self, error: Exception) -> None:
        """Without a file the cache still serves the contexts of this process."""
        self._is_kept = False
        _LOG.warning(
            "kernels that TensorRT-RTX compiles are not kept for the next start, %s; set %s to a "
            "directory that can be written",
            error,
            CACHE_VARIABLE,
        )
