"""Files of the command line."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paged_trt.plugins.errors import ConfigError


def require_writable(path: Path) -> None:
    """Refuse a place for a report before the work, not after minutes of it.

    Raises:
        ConfigError: there is no such directory, or the file is one.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent} is no directory; create it first")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; pass the name of a file")


def write_text(path: Path, text: str) -> None:
    """Write beside the place, then rename: a reader never sees half of it.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent, text=True)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        # mkstemp lets nobody else read it; a report is no secret.
        Path(staged).chmod(0o644)
        Path(staged).replace(path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
