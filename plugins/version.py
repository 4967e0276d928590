"""Version of this distribution, also where it runs from a checkout that is not installed."""

from __future__ import annotations

import importlib.metadata

DISTRIBUTION = "paged-trt"


def version() -> str:
    """Installed version; `0+checkout` where only a checkout is on the path."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"
