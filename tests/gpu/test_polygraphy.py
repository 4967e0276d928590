"""`polygraphy run --paged-trt` against golden files that the reference executor made on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gpu.engines import ToyEngine
from polygraphy_cli import polygraphy, printed_commands, register

from paged_trt.plugins.dtypes import DType
from paged_trt.scripts.cli import main

pytestmark = pytest.mark.gpu

STEPS = ("--prompt-lens", "1,129,300", "--new-tokens", "3")
TOYS = [
    ToyEngine(),
    ToyEngine(activation=DType.BFLOAT16),
    ToyEngine(kv=DType.FLOAT8),
    ToyEngine(kv=DType.INT8),
]

Golden = Callable[[ToyEngine, pytest.CaptureFixture[str]], list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("polygraphy")
    register(folder / "installed")
    return folder


@pytest.fixture(scope="module")
def golden(folder: Path) -> Golden:
    """Writes golden files; words of the command that checks the plan against them."""
    made: dict[ToyEngine, list[str]] = {}

    def make(toy: ToyEngine, capsys: pytest.CaptureFixture[str]) -> list[str]:
        if toy not in made:
            target = folder / f"check-{toy}"
            assert main(["polygraphy", str(toy.folder), "-o", str(target), *STEPS]) == 0
            _, save_golden, made[toy] = printed_commands(capsys.readouterr().out)
            done = polygraphy(folder / "installed", save_golden)
            assert done.returncode == 0, done.stdout
        return made[toy]

    return make


@pytest.mark.parametrize("toy", TOYS, ids=str)
def test_plan_meets_golden_files(
    toy: ToyEngine, golden: Golden, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = polygraphy(folder / "installed", golden(toy, capsys))
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Pass Rate: 100.00%" in done.stdout


def test_swapped_page_of_the_plan_fails(
    golden: Golden, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from polygraphy.json import load_json, save_json

    words = golden(ToyEngine(), capsys)
    source = words[words.index("--load-inputs") + 1]
    inputs = Path(shutil.copytree(source, tmp_path / "inputs"))
    path = max(inputs.iterdir())
    feeds = load_json(str(path))
    row = int(np.flatnonzero((feeds["page_table"] >= 0).sum(axis=1) > 1)[0])
    feeds["page_table"][row, :2] = feeds["page_table"][row, 1::-1]
    save_json(feeds, str(path))
    swapped = [str(inputs) if word == source else word for word in words]
    done = polygraphy(folder / "installed", swapped)
    assert done.returncode == 1
    assert "FAILED | Output: 'key.0'" in done.stdout
