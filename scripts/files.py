"""Files of the command line."""

from __future__ import annotations

import os
from pathlib import Path

from paged_trt.plugins.errors import ConfigError


def require_writable(path: Path | None, *, option: str) -> None:
    """Refuse a file that cannot be written before the work is done, not after.

    Args:
        path: file to be written; None is nothing to check.
        option: what named it.

    Raises:
        ConfigError: its folder is missing or may not be written, or it is a folder itself.
    """
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent} is no directory; create it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path.parent} may not be written; pass another place to `{option}`")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; pass the name of a file to `{option}`")


def require_new_folder(path: Path) -> None:
    """Refuse to write a folder of files over somebody's own.

    Args:
        path: folder to be made; an empty one may be there.

    Raises:
        ConfigError: a file, or a folder with files, is there.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"`{path}` is there already; delete it or pass another folder")
