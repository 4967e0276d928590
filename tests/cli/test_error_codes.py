"""Every error code comes out of the command line with its exit code and without a traceback.

A device that is missing here stands in where it fails; `tests/gpu/test_error_codes.py` has K003 and
T005 on a real one, too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rewrite_variants as variants
from engine_dirs import change_initializer, tamper, write_engine_dir

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.save import save_model
from paged_trt.plugins.error_catalog import pages
from paged_trt.plugins.manifest import file_record
from paged_trt.plugins.tensorrt_messages import TRANSLATIONS
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

CHILD = Path(__file__).parent / "error_child.py"
LIMITS = ("--max-batch-size=2", "--max-input-len=100", "--max-kv-cache-capacity=200")
IDS = ("--input-ids", "1,2")
PLAN_VERSION_BYTE = 88
"""Of a plan of TensorRT-RTX 1.6 and 1.7: found by changing one byte after the other."""
ON_A_GPU_TOO = {"PTRT-K003", "PTRT-T005"}
SERVED_ONLY = {"PTRT-S002"}
SINCE_RTX_17 = {
    b"Plugin not found, are the plugin name, version, and namespace correct?",
    b"The engine cannot run on this GPU, which has compute capability ",
}
NO_RTX = importlib.util.find_spec("tensorrt_rtx") is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder, Dialect.ATTENTION23_PAST)
    return folder / "model.onnx"


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Path:
    """An engine directory without a plan that TensorRT could open."""
    return write_engine_dir(model, tmp_path / "engine", max_batch_size=2)


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, by the TensorRT that is installed."""
    target = tmp_path_factory.mktemp("built") / "engine"
    words = ["build", str(model), "-o", str(target), *LIMITS]
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", *words], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def expect(
    code: str,
    exit_code: int,
    *words: object,
    case: str = "",
    environment: dict[str, str] | None = None,
) -> str:
    """Run the command line and give its error text, once code and exit code are the right ones."""
    start = [str(CHILD), case] if case else ["-m", "paged_trt.scripts.cli"]
    done = subprocess.run(
        [sys.executable, *start, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == exit_code, done.stderr
    assert re.findall(r"^paged-trt: error\[(.*?)\]: ", done.stderr, re.MULTILINE) == [code]
    assert "Traceback" not in done.stderr
    page = pages()[code]
    assert page.exit_code in (exit_code, None)
    assert ("`paged-trt doctor`" in done.stderr) == page.asks_doctor
    return done.stderr


def test_usage() -> None:
    assert "did you mean `build`?" in expect("PTRT-X001", 2, "biuld")
    assert "MODEL" in expect("PTRT-X001", 2, "build", *LIMITS)
    assert "build --help" in expect("PTRT-X001", 2, "build", "m", *LIMITS, "--max-batch-size", "x")


def test_configuration(model: Path) -> None:
    expect("PTRT-C001", 2, "build", model, *LIMITS)
    expect("PTRT-C002", 2, "build", model, *LIMITS, "--dry-run", "--kv-pool-pages=3")


def test_a_model_that_cannot_be_rewritten(tmp_path: Path) -> None:
    write_toy(tmp_path / "gqa", Dialect.GQA)
    changed = load_model(tmp_path / "gqa" / "model.onnx")
    variants.attention_nodes(changed)[1].attributes.add(variants.ir.AttrInt64("smooth_softmax", 1))
    (tmp_path / "changed").mkdir()
    refused = save_model(changed, tmp_path / "changed")
    text = expect("PTRT-R001", 2, "build", refused, *LIMITS, "--dry-run")
    assert "smooth_softmax" in text


def test_what_is_missing_here(model: Path, engine: Path, tmp_path: Path) -> None:
    other = {"PAGED_TRT_FLAVOR": "tensorrt"}
    if importlib.util.find_spec("tensorrt") is None:
        words = ["build", model, "-o", tmp_path / "e", *LIMITS]
        expect("PTRT-U003", 2, *words, environment=other)
    expect("PTRT-U004", 2, "run", engine, *IDS, case="no_onnxruntime")
    data = json.loads((engine / "manifest.json").read_text())
    for name in ("model.onnx", "model.onnx.data"):
        del data["files"][name]
        (engine / name).unlink()
    (engine / "manifest.json").write_text(json.dumps(data))
    expect("PTRT-U001", 2, "run", engine, *IDS, "--executor", "reference")


def test_no_device(engine: Path) -> None:
    words = ["run", engine, *IDS, "--executor", "tensorrt"]
    # Hides every device where there is one.
    text = expect("PTRT-U002", 2, *words, environment={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "--executor reference" in text


def test_a_plan_of_another_version(engine: Path) -> None:
    expect("PTRT-T002", 2, "run", engine, *IDS, "--executor", "tensorrt", case="a_device")


def test_an_old_device(engine: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    data = json.loads((engine / "manifest.json").read_text())
    data["build"] |= {"tensorrt_version": trt.__version__, "compute_capabilities": ["8.0+"]}
    (engine / "manifest.json").write_text(json.dumps(data))
    words = ["run", engine, *IDS, "--executor", "tensorrt"]
    text = expect("PTRT-T005", 2, *words, case="an_old_device")
    assert "8.0+" in text
    assert "7.5" in text


def test_a_kernel_that_does_not_launch(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC's package is not installed")
    words = ["tune", "--heads=8/2", "--head-dim=64", "--batch=2", "--tokens=1024"]
    cache = {"PAGED_TRT_CACHE_DIR": str(tmp_path / "cache")}
    expect("PTRT-K003", 3, *words, case="no_launch", environment=cache)


def test_a_sequence_that_does_not_fit(engine: Path) -> None:
    expect("PTRT-S001", 2, "run", engine, "--input-ids", "99999999")


def test_a_damaged_directory(engine: Path) -> None:
    data = json.loads((engine / "manifest.json").read_text())
    data["pool"]["num_pages"] += 1
    (engine / "manifest.json").write_text(json.dumps(data))
    expect("PTRT-M002", 4, "inspect", engine)
    (engine / "manifest.json").unlink()
    expect("PTRT-M001", 4, "inspect", engine)


def test_logits_that_are_no_numbers(engine: Path) -> None:
    def poison(model: variants.ir.Model) -> None:
        name = next(each.name for each in model.graph.initializer if "norm" in each.name)
        change_initializer(model, name, lambda array: array.fill(np.nan))

    tamper(engine, poison)
    expect("PTRT-E001", 3, "run", engine, *IDS, "--executor", "reference")


def test_pages_run_out(engine: Path) -> None:
    words = ["run", engine, *IDS, "--executor", "reference"]
    expect("PTRT-P001", 3, *words, case="pages_are_held")


def test_the_system_fails(engine: Path) -> None:
    assert "free space" in expect("PTRT-X002", 3, "run", engine, *IDS, case="no_space")
    expect("PTRT-X003", 3, "run", engine, *IDS, case="no_memory")
    expect("PTRT-X004", 130, "run", engine, *IDS, case="interrupted")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_file_that_may_not_be_read(engine: Path) -> None:
    (engine / "model.plan").chmod(0)
    assert "Permission denied" in expect("PTRT-M001", 4, "inspect", engine)


def test_a_file_that_does_not_fit(model: Path, tmp_path: Path) -> None:
    """As on a full disk: the error names the file, and nothing is left of it."""
    target = tmp_path / "engine"
    words = ["build", model, "-o", target, *LIMITS]
    text = expect("PTRT-X002", 3, *words, case="small_files")
    assert f"`{target}" in text or f"`{tmp_path}/.engine" in text
    assert "ulimit -f" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("words", [("inspect",), ("inspect", "--json")])
def test_a_full_disk_behind_the_output_keeps_the_exit_code(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """Exit code 1 would say that a comparison failed."""
    command = [sys.executable, "-m", "paged_trt.scripts.cli", *words, str(tmp_path / "none")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, check=False, timeout=120)
    assert done.returncode == 4


@pytest.mark.parametrize(
    ("case", "code"), [("no_kernel_loads", "PTRT-K001"), ("no_kernel_compiles", "PTRT-K002")]
)
def test_kernels_fail(case: str, code: str, engine: Path, tmp_path: Path) -> None:
    data = json.loads((engine / "manifest.json").read_text())
    pytest.importorskip("cuda.core", reason="NVRTC's package is not installed")
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    data["build"] |= {"tensorrt_version": trt.__version__, "compute_capabilities": ["8.0+"]}
    (engine / "manifest.json").write_text(json.dumps(data))
    words = ["run", engine, *IDS, "--executor", "tensorrt"]
    expect(code, 3, *words, case=case, environment={"PAGED_TRT_CACHE_DIR": str(tmp_path / "c")})


@pytest.mark.skipif(NO_RTX, reason="TensorRT-RTX, whose messages these are, is not installed")
@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("no_creator", "PTRT-T001"),
        ("profiles_upside_down", "PTRT-T003"),
        ("no_formats", "PTRT-T004"),
    ],
)
def test_tensorrt_refuses_a_build(case: str, code: str, model: Path, tmp_path: Path) -> None:
    text = expect(code, 3, "build", model, "-o", tmp_path / "e", *LIMITS, case=case)
    assert "last lines of its log:" in text
    assert not (tmp_path / "e").exists()


def cut_the_version(plan: bytearray) -> None:
    plan[PLAN_VERSION_BYTE] ^= 5


def cut_the_magic(plan: bytearray) -> None:
    plan[0] ^= 5


@pytest.mark.skipif(NO_RTX, reason="TensorRT-RTX, whose messages these are, is not installed")
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (cut_the_version, "PTRT-T002", "old deserialization call"),
        (cut_the_magic, "PTRT-T007", "magicTag"),
        (lambda _: None, "PTRT-T006", "driver version is insufficient"),
    ],
    ids=["version", "magic", "driver"],
)
def test_tensorrt_refuses_a_plan(
    change: Callable[[bytearray], None], code: str, words: str, built: Path, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(built, engine)
    plan = bytearray((engine / "model.plan").read_bytes())
    change(plan)
    (engine / "model.plan").write_bytes(plan)
    data = json.loads((engine / "manifest.json").read_text())
    record = file_record(engine / "model.plan")
    data["files"]["model.plan"] = {"sha256": record.sha256, "size": record.size}
    (engine / "manifest.json").write_text(json.dumps(data))
    text = expect(
        code,
        2,
        *("run", engine, *IDS, "--executor", "tensorrt"),
        case="a_device",
        # Where there is a driver, there is no device for it.
        environment={"CUDA_VISIBLE_DEVICES": "-1"},
    )
    if code != "PTRT-T006":
        assert words in text


def test_a_build_that_is_refused_has_a_code(model: Path, tmp_path: Path) -> None:
    if NO_RTX:
        pytest.skip("TensorRT is not installed")
    expect("PTRT-B001", 3, "build", model, "-o", tmp_path / "e", *LIMITS, case="no_parse")


@pytest.mark.skipif(NO_RTX, reason="TensorRT is not installed")
def test_a_cancelled_build(model: Path, tmp_path: Path) -> None:
    words = ["build", model, "-o", tmp_path / "e", *LIMITS]
    expect("PTRT-B002", 130, *words, case="cancelled")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("words", [("inspect",), ("run", *IDS), ("explain",)])
def test_an_error_is_json_too(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = words
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", command, str(tmp_path), *rest, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == done.returncode != 0
    assert error["code"] in done.stderr
    assert error["remedy"] == pages()[error["code"]].remedy


def test_every_code_is_raised_here_or_by_the_server() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    here = text.split("ON_A_GPU_TOO = ")[1].split("\n", 1)[1]
    named = set(re.findall(r'"(PTRT-[A-Z]\d{3})"', here))
    assert named == set(pages())
    for elsewhere, codes in (
        ("gpu/test_error_codes.py", ON_A_GPU_TOO),
        ("serving/test_server.py", SERVED_ONLY),
    ):
        text = (Path(__file__).parents[1] / elsewhere).read_text(encoding="utf-8")
        assert set(re.findall(r"PTRT-[A-Z]\d{3}", text)) >= codes


@pytest.mark.skipif(NO_RTX, reason="TensorRT-RTX, whose texts these are, is not installed")
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("PTRT-T001", b"Plugin not found, are the plugin name, version, and namespace correct?"),
        ("PTRT-T001", b"Cannot find plugin: "),
        ("PTRT-T002", b"Failed due to an old deserialization call on a newer plan file"),
        ("PTRT-T002", b"engine plan file is not compatible with this version of TensorRT"),
        ("PTRT-T003", b"does not satisfy any optimization profiles."),
        ("PTRT-T004", b"could not find any supported formats consistent with input/output data"),
        ("PTRT-T005", b"The engine cannot run on this GPU, which has compute capability "),
        ("PTRT-T005", b"Expected compute capability >="),
    ],
)
def test_the_text_is_tensorrts_own(code: str, text: bytes) -> None:
    """Where no machine without a GPU makes a message, its text lies in the library."""
    (translation,) = (each for each in TRANSLATIONS if each.code == code)
    assert translation.pattern.search(text.decode())
    if text in SINCE_RTX_17 and importlib.metadata.version("tensorrt-rtx") < "1.7":
        pytest.skip("a text of TensorRT-RTX 1.7; 1.6 has no such message")
    specification = importlib.util.find_spec("tensorrt_rtx_libs")
    assert specification is not None
    assert specification.submodule_search_locations is not None
    (folder,) = specification.submodule_search_locations
    assert any(holds(path, text) for path in Path(folder).glob("*.so*"))


def holds(path: Path, text: bytes) -> bool:
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(text) >= 0
