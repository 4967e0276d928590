"""The kernel sources that travel with the package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

KERNEL_DIRECTORY: Final = Path(__file__).parent.parent / "kernels"
"""Include directory of every kernel."""


def kernel_source_sha256(directory: Path = KERNEL_DIRECTORY) -> str:
    """SHA-256 over names and contents of the kernel sources, for the manifest."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.cu"), *directory.glob("*.cuh")]):
        data = path.read_bytes()
        digest.update(f"{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
