"""The tutorial's commands run, in its order, and print what it says."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "scripts" / "TUTORIAL.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXITS = re.compile(r"\s*# exits (\d+)$")
NEEDED = ("tensorrt_rtx", "onnxruntime", "matplotlib")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@dataclasses.dataclass(frozen=True)
class Step:
    command: str
    exit_code: int
    expected: tuple[str, ...]


def steps(text: str) -> list[Step]:
    found: list[Step] = []
    for language, body in BLOCK.findall(text):
        if language == "python":
            found.append(Step(f"python -c {shlex.quote(body)}", 0, ()))
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            first, *rest = part.rstrip("\n").split("\n")
            exits = EXITS.search(first)
            code = int(exits[1]) if exits else 0
            found.append(Step(EXITS.sub("", first), code, tuple(filter(None, rest))))
    return found


def flat(text: str) -> str:
    """Text without the frames of tables and the places where lines break."""
    return " ".join(re.sub(r"[│┃┏┓┗┛━─┌┐└┘├┤┡┩╇╈┳┻]", " ", text).split())


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in (("paged-trt", "-m paged_trt.scripts.cli"), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        script.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": "120"}


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_commands_do_what_the_tutorial_says(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    commands = steps(TUTORIAL.read_text(encoding="utf-8"))
    assert len(commands) > 12
    for step in commands:
        done = subprocess.run(  # a step takes seconds; the limit is the tutorial's promise
            ["bash", "-c", step.command],  # noqa: S607
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        output = done.stdout + done.stderr
        assert done.returncode == step.exit_code, f"$ {step.command}\n{output}"
        assert "Traceback" not in output
        for line in step.expected:
            assert flat(line) in flat(output), f"$ {step.command}\n{output}"
    assert (work / "pages.png").is_file()


def test_steps_are_read() -> None:
    text = "```console\n$ a b  # exits 2\nline\n$ c\n```\n```python\nprint(1)\n```\n"
    assert steps(text) == [
        Step("a b", 2, ("line",)),
        Step("c", 0, ()),
        Step("python -c 'print(1)\n'", 0, ()),
    ]


def test_every_command_of_the_tutorial_is_one() -> None:
    from paged_trt.scripts.cli import COMMANDS

    used = re.findall(r"^\$ paged-trt (\w+)", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE)
    # `serve` and `tune` run until they are ended or need a GPU.
    assert set(used) <= set(COMMANDS)
    assert {"explain", "build", "inspect", "run", "compare", "bench", "doctor"} <= set(used)
