"""The wheel holds what the tree holds: a subpackage that is not listed would leave silently."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("plugins", "builder", "runtime", "scripts")
SUFFIXES = {".py", ".typed", ".cu", ".cuh", ".html", ".json"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # A copy, because setuptools leaves build folders in the tree that it builds.
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, ".typing"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_content_is_the_tree(wheel: zipfile.ZipFile) -> None:
    in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    in_tree = {
        f"paged_trt/{path.relative_to(ROOT)}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in SUFFIXES
    }
    assert in_wheel == in_tree


def test_wheel_carries_licence_and_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"paged-trt = paged_trt.scripts.cli:main" in wheel.read(entry_points)
    assert b"paged_trt.runtime.polygraphy_extension:argument_groups" in wheel.read(entry_points)


@pytest.mark.parametrize("name", PACKAGES)
def test_typing_links_point_into_the_tree(name: str) -> None:
    link = ROOT / ".typing" / "paged_trt" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


def test_every_folder_has_a_readme() -> None:
    assert [
        name for name in (*PACKAGES, "tests") if not (ROOT / name / "README.md").is_file()
    ] == []
