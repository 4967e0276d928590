"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PUBLIC_MODE: Final = 0o644
PRIVATE_MODE: Final = 0o600


@contextlib.contextmanager
def naming(path: Path, *, staged: Path) -> Iterator[None]:
    """Let an error of the system name `path` where it names `staged`, or no file, as a full disk.

    Args:
        path: what the user asked for.
        staged: file or folder that is going to take its place.

    Raises:
        OSError: as the block, with the name of a file.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        is_ours = isinstance(name, str | bytes) and Path(os.fsdecode(name)).is_relative_to(staged)
        if error.errno is None or not (name is None or is_ours):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


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
        with naming(path, staged=staged):
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
