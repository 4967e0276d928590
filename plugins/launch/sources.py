"""The kernel sources that travel with the package."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

KERNEL_DIRECTORY: Final = Path(__file__).parent.parent / "kernels"
"""Include directory of every kernel."""
_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


def kernel_source_sha256(directory: Path = KERNEL_DIRECTORY) -> str:
    """SHA-256 over names and contents of the kernel sources, for the manifest."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.cu"), *directory.glob("*.cuh")]):
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def closure_sha256(source: str, directories: Sequence[Path]) -> str:
    """SHA-256 over a source file and everything that it includes, directly or not.

    Every `#include` counts, also one that a condition leaves out. A name that is in none of the
    directories is the compiler's own and is named by the compiler's version.

    Args:
        source: file in the first directory.
        directories: include path.

    Raises:
        OSError: `source` cannot be read.
    """
    pending, seen = [directories[0] / source], set[Path]()
    digest = hashlib.sha256()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        data, names = _read(path)
        digest.update(f"{path.name}\0{len(data)}\0".encode())
        digest.update(data)
        for name in names:
            places = (place / name for place in (path.parent, *directories))
            found = next((place for place in places if place.is_file()), None)
            if found is not None:
                pending.append(found)
    return digest.hexdigest()


def _read(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Contents and included names; files that do not change are read once."""
    status = path.stat()
    return _read_version(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=512)
def _read_version(path: Path, modified: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    del modified, size  # they are part of the cache's key
    data = path.read_bytes()
    return data, tuple(_INCLUDE.findall(data.decode("utf-8", errors="replace")))
