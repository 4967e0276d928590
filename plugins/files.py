"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

PUBLIC_MODE: Final = 0o644
PRIVATE_MODE: Final = 0o600


def write_bytes(path: Path, data: bytes, *, mode: int = PUBLIC_MODE) -> None:
    """Write beside the place, then rename: a reader never sees half of it.

    Args:
        path: the file; one that is there is replaced.
        data: all of it.
        mode: permissions of the file.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        # mkstemp lets nobody else read it.
        Path(staged).chmod(mode)
        Path(staged).replace(path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, mode: int = PUBLIC_MODE) -> None:
    """As `write_bytes`, in UTF-8.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    write_bytes(path, text.encode(), mode=mode)
