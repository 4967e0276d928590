"""The kit for a GPU host without a network: pieces, hashes, an install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from paged_trt.scripts.example_models.smollm2 import REQUIREMENT
from paged_trt.scripts.gpu_host.command import main
from paged_trt.scripts.gpu_host.ending import kill_group
from paged_trt.scripts.gpu_host.kit import (
    BINARY,
    EXAMPLE_MODEL,
    HOST_PACKAGES,
    ROOT,
    KitError,
    install,
    pack,
)

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
    pack(wheels, tmp_path / "kit", batch_bytes=BATCH)
    return tmp_path / "kit"


def test_no_folder_is_larger_than_asked(kit: Path) -> None:
    folders = [path for path in kit.iterdir() if path.is_dir()]
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert len(folders) > 3
    assert max(sizes) <= BATCH


def test_a_roundtrip_installs_what_was_packed(kit: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert install(kit, target, root=None)
    code = "import large_one, small_one; print(large_one.NAME, small_one.NAME)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "large_one small_one\n"
    assert not install(kit, target, root=None)


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
    assert main(["unpack", str(kit), str(target)]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_a_folder_of_something_else_is_left_alone(kit: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "file").write_text("precious")
    with pytest.raises(KitError, match="was not made by `unpack`"):
        install(kit, target, root=None)
    assert (target / "file").read_text() == "precious"
    with pytest.raises(KitError, match="is not empty"):
        pack(kit.parent / "wheels", target, batch_bytes=BATCH)


def test_pack_and_unpack_need_only_the_standard_library() -> None:
    code = (
        "import sys; from paged_trt.scripts.gpu_host import command\n"
        "print(sorted(sys.modules.keys() & {'click', 'numpy', 'pydantic', 'onnx', 'filelock'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_kit_and_the_host_have_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["cuda"], *extras["compare"], *extras["plots"]]
    packages = {re.split(r"[<>=]", text)[0] for text in (*needed, *BINARY, "pytest", "hypothesis")}
    assert packages <= {re.split(r"=", text)[0] for text in (*BINARY, *HOST_PACKAGES)}


def test_the_example_model_is_the_one_that_is_pinned() -> None:
    assert REQUIREMENT in EXAMPLE_MODEL


def test_what_an_ended_process_left_behind_is_ended_too() -> None:
    """A crashed profiler leaves the process that it profiled, which holds the GPU."""
    words = ["sh", "-c", "sleep 300 > /dev/null 2>&1 & echo $!"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    left = int(process.communicate()[0])
    assert process.returncode == 0
    assert Path(f"/proc/{left}").exists()
    kill_group(process)
    state = ""
    for _ in range(100):
        try:
            state = (
                Path(f"/proc/{left}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
            )
        except FileNotFoundError:
            state = "gone"
        if state in ("gone", "Z"):  # a zombie where nobody collects orphans
            break
        time.sleep(0.05)
    assert state in ("gone", "Z")
    kill_group(process)  # nothing is left: nothing happens
