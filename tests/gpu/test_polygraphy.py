"""`polygraphy run --paged-trt` against golden files that the reference executor made on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.engines import ToyEngine
from polygraphy_cli import polygraphy, printed_commands, register

from paged_trt.plugins.dtypes import DType
from paged_trt.scripts.cli import main

pytestmark = pytest.mark.gpu

TOYS = [
    ToyEngine(),
    ToyEngine(activation=DType.BFLOAT16),
    ToyEngine(kv=DType.FLOAT8),
    ToyEngine(kv=DType.INT8),
    ToyEngine(logits="all"),
]


def make_golden(toy: ToyEngine, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Write golden files; words of the command that checks the plan against them."""
    register(folder / "installed")
    words = ("polygraphy", str(toy.folder), "-o", str(folder / "check"))
    assert main([*words, "--prompt-lens", "1,127,129,300", "--new-tokens", "4"]) == 0
    _, save_golden, check_plan = printed_commands(capsys.readouterr().out)
    done = polygraphy(folder / "installed", save_golden)
    assert done.returncode == 0, done.stdout
    return check_plan


@pytest.mark.parametrize("toy", TOYS, ids=str)
def test_plan_meets_golden_files(
    toy: ToyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_plan = make_golden(toy, tmp_path, capsys)
    done = polygraphy(tmp_path / "installed", check_plan)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "Pass Rate: 100.00%" in done.stdout


def test_swapped_page_of_the_plan_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from polygraphy.json import load_json, save_json

    check_plan = make_golden(ToyEngine(), tmp_path, capsys)
    path = max((tmp_path / "check" / "inputs").iterdir())
    feeds = load_json(str(path))
    row = int(np.flatnonzero((feeds["page_table"] >= 0).sum(axis=1) > 1)[0])
    feeds["page_table"][row, :2] = feeds["page_table"][row, 1::-1]
    save_json(feeds, str(path))
    done = polygraphy(tmp_path / "installed", check_plan)
    assert done.returncode == 1
    assert "FAILED | Output: 'key.0'" in done.stdout
