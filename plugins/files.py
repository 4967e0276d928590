"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import os
import uuid
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
    # Named before it is made: an interrupt cannot come between the making and this block.
    staged = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}")
    try:
        # Until it is whole, nobody else may read it.
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        staged.chmod(mode)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, mode: int = PUBLIC_MODE) -> None:
    """As `write_bytes`, in UTF-8.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    write_bytes(path, text.encode(), mode=mode)
