"""The real `polygraphy run`, with the extension as installing this checkout registers it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUP = "polygraphy.run.plugins"
_MAIN = "import sys; from polygraphy.tools import main; sys.exit(main())"


def register(folder: Path) -> None:
    """Write what pip would write of the entry points: the one installed may be an older one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = folder / "paged_trt-0.dist-info"
    target.mkdir(parents=True)
    (target / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    )
    lines = [f"{name} = {value}" for name, value in project["entry-points"][GROUP].items()]
    (target / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


def polygraphy(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `polygraphy WORDS` where `register` has written; its output is one text."""
    paths = [str(folder), str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", _MAIN, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def printed_commands(output: str) -> list[list[str]]:
    """Words after `polygraphy` of each command that `paged-trt polygraphy` printed."""
    lines = [line for line in output.splitlines() if line.startswith("polygraphy ")]
    return [shlex.split(line)[1:] for line in lines]
