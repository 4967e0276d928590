"""How pytest is started on a host whose environment is somebody else's."""

from __future__ import annotations

import os
import sys
from typing import Final

COMMAND: Final = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist.plugin")


def environment() -> dict[str, str]:
    """Variables of a pytest that loads the plugins that it is told to load, and no others.

    Every installed plugin loads itself otherwise. One that warns ends the run, for our tests take a
    warning as an error: pytest-benchmark does so beside pytest-xdist.
    """
    return {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
