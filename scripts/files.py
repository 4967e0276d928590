"""Files of the command line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paged_trt.plugins.errors import ConfigError


def require_writable(path: Path | None, *, option: str) -> None:
    """Refuse a file that cannot be written before the work is done, not after.

    Args:
        path: file to be written; None is nothing to check.
        option: what named it.

    Raises:
        ConfigError: its folder is missing, or it is a folder itself.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent} is no directory; create it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; pass the name of a file to `{option}`")


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8.

    Raises:
        OSError: the file cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside the place, then rename: a reader never sees half of it.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        # mkstemp lets nobody else read it; a report is no secret.
        Path(staged).chmod(0o644)
        Path(staged).replace(path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
