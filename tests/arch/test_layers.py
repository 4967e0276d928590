"""Who may name what: TensorRT, CUDA and the layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("plugins", "builder", "runtime", "scripts")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
SEAMS = {
    "tensorrt": "plugins/trt.py",
    "tensorrt_rtx": "plugins/trt.py",
    "cuda": "plugins/cuda.py",
}
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch"}
ENVIRONMENT = {"PAGED_TRT_FLAVOR", "PAGED_TRT_CACHE_DIR", "PAGED_TRT_LOG"}


def _imports(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_seams_import_tensorrt_and_cuda(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    imports = _imports(path)
    assert not {root for root in imports & SEAMS.keys() if SEAMS[root] != name}
    assert not imports & FORBIDDEN


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_environment_names_are_three(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"PAGED_TRT_[A-Z_]+", node.value)
        ):
            assert node.value in ENVIRONMENT


def test_layers_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; "
         "raise SystemExit(lint_imports())"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_of_the_packages_loads_no_heavy_library() -> None:
    code = (
        "import sys, paged_trt.plugins, paged_trt.builder, paged_trt.runtime;"
        "import paged_trt.scripts.cli;"
        "print([name for name in ('tensorrt', 'tensorrt_rtx', 'cuda', 'onnxruntime', 'polygraphy',"
        " 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
