"""The kit for a GPU host without a network: pieces, hashes, an install, results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins.manifest import read_manifest
from paged_trt.runtime.comparison import Tolerance
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.results import Generation
from paged_trt.runtime.sequences import FinishReason
from paged_trt.scripts import gpu_host
from paged_trt.scripts.example_models.toy import write_toy

BATCH = 1500


def write_wheel(folder: Path, name: str, padding: int) -> None:
    """A real wheel of one module."""
    record = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"NAME = {name!r}\n#" + "x" * padding)
        wheel.writestr(f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{record}/RECORD", "")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "small_one", 10)
    write_wheel(wheels, "large_one", 5000)
    gpu_host.pack(wheels, tmp_path / "kit", batch_bytes=BATCH)
    return tmp_path / "kit"


def test_no_folder_is_larger_than_asked(kit: Path) -> None:
    folders = [path for path in kit.iterdir() if path.is_dir()]
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert len(folders) > 3
    assert max(sizes) <= BATCH


def test_a_roundtrip_installs_what_was_packed(kit: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert gpu_host.install(kit, target, root=None)
    code = "import large_one, small_one; print(large_one.NAME, small_one.NAME)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "large_one small_one\n"
    assert not gpu_host.install(kit, target, root=None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "is missing; copy every folder"),
        ("changed", "is not what the list says; copy it again"),
        ("list", "cannot be read"),
        ("entry", "cannot be read"),
        ("piece", "cannot be read"),
        ("name", "is no plain file name"),
        ("escape", "is no plain file name"),
    ],
)
def test_a_damaged_copy_is_named_and_nothing_is_installed(
    damage: str, message: str, kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    piece = sorted(kit.glob("2/*"))[0]
    listed = kit / "wheels.json"
    data = json.loads(listed.read_text())
    if damage == "missing":
        piece.unlink()
    elif damage == "changed":
        piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    elif damage == "list":
        listed.write_text("{")
    elif damage == "entry":
        listed.write_text('{"wheels": [3]}')
    elif damage == "piece":
        data["wheels"][0]["pieces"][0]["more"] = 1
        listed.write_text(json.dumps(data))
    elif damage == "name":
        data["wheels"][0]["name"] = "../evil.whl"
        listed.write_text(json.dumps(data))
    else:
        data["wheels"][0]["pieces"][0]["path"] = "../../etc/passwd"
        listed.write_text(json.dumps(data))
    target = tmp_path / "target"
    assert gpu_host.main(["unpack", str(kit), str(target)]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_a_folder_of_something_else_is_left_alone(kit: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "file").write_text("precious")
    with pytest.raises(gpu_host.KitError, match="was not made by `unpack`"):
        gpu_host.install(kit, target, root=None)
    assert (target / "file").read_text() == "precious"
    with pytest.raises(gpu_host.KitError, match="is not empty"):
        gpu_host.pack(kit.parent / "wheels", target, batch_bytes=BATCH)


def test_pack_and_unpack_need_only_the_standard_library() -> None:
    code = (
        "import sys; from paged_trt.scripts import gpu_host\n"
        "print(sorted(sys.modules.keys() & {'click', 'numpy', 'pydantic', 'onnx', 'filelock'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


Options = Callable[..., argparse.Namespace]


@pytest.fixture
def host_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpu_host_run` with the reference executor in the place of a GPU."""
    pytest.importorskip("tensorrt_rtx")
    from paged_trt.scripts import gpu_host_run

    monkeypatch.setattr(
        gpu_host_run, "open_plan", lambda folder, **_: load_engine(folder, "reference")
    )
    monkeypatch.setattr(gpu_host_run, "free_bytes", lambda ordinal: 0)
    monkeypatch.setattr(gpu_host_run, "gpu_and_driver", lambda device: ("NVIDIA Test 1", "1.2"))
    return gpu_host_run


def test_results_follow_the_schema(host_run: Any, tmp_path: Path) -> None:
    write_toy(tmp_path / "toy", "gqa")
    engine = write_engine_dir(tmp_path / "toy" / "model.onnx", tmp_path / "engine")
    words = ["run", str(tmp_path / "out"), "--engine", str(engine), "--skip-tests"]
    for _ in range(2):
        assert gpu_host.main([*words, "--new-tokens", "3", "--commit", "abc"]) == 0
    first, second = sorted((tmp_path / "out").iterdir(), key=lambda path: len(path.name))
    assert first.name.startswith("e2e-nvidia-test-1-")
    assert second.name == first.name.replace(".json", "-2.json")
    data = json.loads(first.read_text())
    expected = {"schema", "kind", "commit", "date", "gpu", "driver", "cuda", "tensorrt", "method"}
    assert data.keys() == expected | {"ceilings", "peers", "rows"}
    assert (data["schema"], data["kind"], data["commit"]) == (1, "e2e", "abc")
    (row,) = data["rows"]
    assert row["tokens_equal"] is True
    assert row["first_difference"] is None
    assert row["replay_equals_eager"] is True
    assert row["prompts"] == [127, 129, 255, 300]
    assert row["step_us_eager"] > 0
    assert read_manifest(engine).source.name == row["model"]


def generation(tokens: list[int], logits: list[list[float]]) -> Generation:
    return Generation(
        tokens=tuple(tokens),
        finish_reason=FinishReason.LENGTH,
        logits=np.asarray(logits, np.float32),
    )


@pytest.mark.parametrize(("gap", "excused"), [(0.01, True), (0.5, False)])
def test_the_first_difference_has_its_gap_and_bound(
    host_run: Any, gap: float, excused: bool
) -> None:
    tolerance = Tolerance(atol=0, rtol=0, tie_rtol=0.02, reason="test")
    same = generation([1, 0], [[0, 1], [2, 0]])
    want = generation([1, 0], [[0, 1], [2, 2 - gap]])
    have = generation([1, 1], [[0, 1], [2 - gap, 2]])
    found = host_run.first_difference([same, want], [same, have], tolerance)
    assert (found[0]["sequence"], found[0]["step"]) == (1, 1)
    assert found[0]["gap"] == pytest.approx(gap, abs=1e-6)
    assert found[0]["bound"] == pytest.approx(0.04)
    assert found[1] is excused
    assert host_run.first_difference([same], [same], tolerance) == (None, True)


SANITIZER = """#!/bin/sh
while [ "$1" != "-m" ]; do
  if [ "$1" = "--tool" ]; then tool=$2; fi
  if [ "$1" = "--log-file" ]; then log=$2; fi
  shift
done
echo "3 passed"
echo "$FAKE_REPORT" > "$(dirname "$log")/1-$tool.log"
echo "========= ERROR SUMMARY: 0 errors" > "$(dirname "$log")/2-$tool.log"
"""


@pytest.mark.parametrize(
    ("report", "errors", "processes"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 2),
        ("========= ERROR SUMMARY: 1 error", 1, 2),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 3, 2),
        ("the process died before its summary", 0, 1),
    ],
)
def test_what_a_sanitizer_saw_is_summed_over_processes(
    report: str,
    errors: int,
    processes: int,
    tmp_path: Path,
    host_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_REPORT", report)
    monkeypatch.setattr(host_run, "gpu_and_driver", lambda device: ("Some GPU", "1.0"))
    options = argparse.Namespace(
        output=tmp_path / "out", tools=["memcheck"], tests=["tests/gpu"], device=0, commit="abc"
    )
    code = host_run.sanitize(options)
    (path,) = (tmp_path / "out").glob("sanitizer-*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["errors"], row["processes"], row["tests"]) == (errors, processes, "3 passed")
    assert (code == 0) is (errors == 0 and processes == 2)
    assert (report in row["first_report"]) is (errors > 0)
