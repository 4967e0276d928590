"""`paged-trt doctor`: what is missing has a remedy, and nothing crashes it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins.error_catalog import pages
from paged_trt.plugins.launch.compiler import CACHE_VARIABLE
from paged_trt.scripts import doctor, doctor_probes
from paged_trt.scripts.cli import main
from paged_trt.scripts.doctor_findings import NOTE, OK, PROBLEM
from paged_trt.scripts.doctor_probes import Probe, run_probe
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

H200 = {
    "cuda": "13.0",
    "devices": [
        {
            "ordinal": 0,
            "name": "NVIDIA H200",
            "arch": "sm_90",
            "multiprocessors": 132,
            "memory_bytes": 150 * 10**9,
        }
    ],
}
RTX16 = {
    "version": "1.6.1.120",
    "library_fix": True,
    "route": "gqa",
    "builds": True,
    "runs": True,
    "problem": None,
}
RTX17_ON_HOPPER = RTX16 | {
    "version": "1.7.1.116",
    "route": "plugin",
    "runs": False,
    "problem": ["PTRT-T005", "opens no plan on this device\nlast lines of its log:\n..."],
}
KERNELS = {"nvrtc": "13.0", "headers": ["/x"], "arch": "sm_90a", "kernels": 5}
ONNXRUNTIME = {"version": "1.32.0", "providers": ["CPUExecutionProvider"]}
WORKING: dict[str, Any] = {
    "device": H200,
    "tensorrt_rtx": RTX16,
    "kernels": KERNELS,
    "onnxruntime": ONNXRUNTIME,
    "plan": {"arch": "sm_90"},
}


def error(code: str, message: str = "it is not there") -> Probe:
    return {"error": {"code": code, "message": message}}


def answer(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Probe | None]) -> None:
    """Probes answer as on a machine that is not here; None is a flavour that is not installed."""
    probes = {**WORKING, **changes}
    found = [name for name in ("tensorrt", "tensorrt_rtx") if probes.get(name)]
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: name if name in found else None
    )
    monkeypatch.setattr(
        doctor, "run_probes", lambda wanted: {label: probes[label] for label in wanted}
    )
    monkeypatch.setattr(doctor.trt, "flavor", lambda: found[0] if found else "none")


def diagnosed(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> dict[str, Any]:
    assert main(["doctor", *map(str, words), "--json"]) == code
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["can_serve"] == (code == 0)
    return data


def finding(data: dict[str, Any], topic: str) -> dict[str, Any]:
    (found,) = (each for each in data["findings"] if each["topic"] == topic)
    return dict(found)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does much else compiles the probe's kernels in more than two minutes."""
    monkeypatch.setattr(doctor_probes, "TIMEOUT_SECONDS", 600)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    write_toy(folder / "toy", Dialect.GQA)
    return write_engine_dir(folder / "toy" / "model.onnx", folder / "engine")


def test_this_machine_can_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real: the tests run where onnxruntime is."""
    # A busy machine takes long to compile seven kernels, and that is no finding of this test.
    monkeypatch.setattr(doctor_probes, "TIMEOUT_SECONDS", 3600)
    data = diagnosed(capsys, 0)
    assert data["executors"]["reference"] == {"can_serve": True, "reason": None}
    assert finding(data, "NVRTC and kernels")["status"] == OK
    assert main(["doctor"]) == 0
    assert "reference executor: can serve a model here" in capsys.readouterr().out


def test_a_gpu_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch, {})
    data = diagnosed(capsys, 0)
    assert {each["can_serve"] for each in data["executors"].values()} == {True}
    assert "compute capability 9.0" in finding(data, "GPU and driver")["found"]
    assert "GroupQueryAttention route" in finding(data, "tensorrt_rtx")["found"]
    assert "NVIDIA lists no Hopper GPU" in finding(data, "tensorrt_rtx")["remedy"]


@pytest.mark.parametrize(
    ("changes", "topic", "code", "remedy"),
    [
        ({"device": error("PTRT-U002")}, "GPU and driver", "PTRT-U002", "--executor reference"),
        ({"tensorrt_rtx": None}, "TensorRT", "PTRT-U003", "paged-trt[rtx]"),
        ({"tensorrt_rtx": RTX17_ON_HOPPER}, "tensorrt_rtx", "PTRT-T005", "rtx-hopper"),
        (
            {"tensorrt_rtx": RTX17_ON_HOPPER | {"problem": ["PTRT-U001", "in other words"]}},
            "tensorrt_rtx",
            "PTRT-T005",
            "rtx-hopper",
        ),
        ({"tensorrt_rtx": error("PTRT-U001", "SIGABRT")}, "tensorrt_rtx", "PTRT-U001", "another"),
        (
            {"tensorrt_rtx": RTX16 | {"library_fix": False}},
            "tensorrt_rtx library",
            "PTRT-U003",
            "link libtensorrt_rtx.so",
        ),
        ({"kernels": error("PTRT-K002")}, "NVRTC and kernels", "PTRT-K002", "paged-trt[cuda]"),
        ({"kernels": error("PTRT-U004")}, "NVRTC and kernels", "PTRT-U004", "extra"),
    ],
)
def test_what_keeps_tensorrt_from_serving_has_a_remedy(
    changes: dict[str, Probe | None],
    topic: str,
    code: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(monkeypatch, changes)
    data = diagnosed(capsys, 0)
    assert data["executors"]["reference"]["can_serve"]
    reason = data["executors"]["tensorrt"]["reason"]
    assert (reason["topic"], reason["code"]) == (topic, code)
    assert remedy in reason["remedy"]
    assert reason["status"] in (NOTE, PROBLEM)


def test_an_old_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"cuda": "13.0", "devices": [H200["devices"][0] | {"arch": "sm_75"}]}  # type: ignore[index]
    answer(monkeypatch, {"device": old})
    reason = diagnosed(capsys, 0)["executors"]["tensorrt"]["reason"]
    assert (reason["code"], reason["status"]) == ("PTRT-T005", PROBLEM)
    answer(monkeypatch, {})
    reason = diagnosed(capsys, 0, "--device", "1")["executors"]["tensorrt"]["reason"]
    assert reason["found"] == "there is no CUDA device 1, this machine has 1"


def test_where_nothing_serves_the_reason_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, {"onnxruntime": error("PTRT-U004"), "device": error("PTRT-U002")})
    data = diagnosed(capsys, 2)
    assert data["error"]["code"] == "PTRT-U004"
    assert main(["doctor"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("paged-trt: error[PTRT-U004]: no executor can serve a model here.")
    assert "reference: it is not there" in text
    assert "`paged-trt doctor` shows" not in text


def test_a_flavour_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paged_trt.scripts.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PAGED_TRT_FLAVOR": "turbo"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert any(each["code"] == "PTRT-C001" and "unset" in each["remedy"] for each in findings)


def test_an_engine_is_looked_at(
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer(monkeypatch, {})
    data = diagnosed(capsys, 0, engine)
    assert "agree at every hop" in finding(data, "engine directory")["found"]
    answer(monkeypatch, {"plan": error("PTRT-T002", "the plan was built by another")})
    reason = diagnosed(capsys, 0, engine)["executors"]["tensorrt"]["reason"]
    assert (reason["topic"], reason["code"]) == ("plan", "PTRT-T002")
    data = diagnosed(capsys, 2, tmp_path)
    assert data["error"]["code"] == "PTRT-M001"
    assert finding(data, "engine directory")["status"] == PROBLEM


def test_the_plan_of_an_engine_is_tried_for_real(engine: Path) -> None:
    """In a process of its own; the plan of this directory is none, and no device may be here."""
    found = run_probe("plan", str(engine), "0")
    assert found["error"]["code"] in ("PTRT-U002", "PTRT-T002")


def test_a_probe_that_dies_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(code: str) -> Probe:
        words = [sys.executable, "-c", code]
        original = subprocess.run
        monkeypatch.setattr(
            doctor_probes.subprocess, "run", lambda _, **rest: original(words, **rest)
        )
        try:
            return run_probe("device")
        finally:
            monkeypatch.undo()

    died = run("import os, sys; print('gone', file=sys.stderr, flush=True); os.abort()")
    assert died["error"]["message"] == "the library ended the process with SIGABRT: gone"
    odd = run("raise SystemExit(7)")
    assert "exit code 7" in odd["error"]["message"]
    monkeypatch.setattr(doctor_probes, "TIMEOUT_SECONDS", 0.5)
    slow = run("import time; time.sleep(60)")
    assert "this machine is busy" in slow["error"]["message"]


def test_a_cache_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, {})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "new" / "cache"))
    assert finding(diagnosed(capsys, 0), "kernel cache")["status"] == OK
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "cache"):
        monkeypatch.setenv(CACHE_VARIABLE, str(place))
        found = finding(diagnosed(capsys, 0), "kernel cache")
        assert found["status"] == NOTE
        assert f"{tmp_path / 'file'} is no directory" in found["found"]
        assert CACHE_VARIABLE in found["remedy"]


def test_the_verdict_names_one_remedy_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = error("PTRT-U004", "onnxruntime is missing; install it")
    answer(monkeypatch, {"onnxruntime": missing, "device": error("PTRT-U002", "no driver")})
    message = diagnosed(capsys, 2)["error"]["message"]
    assert "reference: onnxruntime is missing; install it | tensorrt: no driver; Run on" in message


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_cache_that_others_may_write_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, {})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    (tmp_path / "a.cubin").write_bytes(b"12345")
    assert "1 kernels, 5 bytes, trusted" in finding(diagnosed(capsys, 0), "kernel cache")["found"]
    tmp_path.chmod(tmp_path.stat().st_mode | stat.S_IWOTH)
    found = finding(diagnosed(capsys, 0), "kernel cache")
    assert (found["status"], "not trusted" in found["found"]) == (NOTE, True)
    assert "chmod" in found["remedy"]


@pytest.mark.parametrize("code", sorted(pages()))
def test_the_page_of_a_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--error", code.lower()]) == 0
    text = capsys.readouterr().out
    assert text.startswith(code)
    assert pages()[code].remedy in text


def test_an_unknown_code_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--error", "PTRT-Z9"]) == 2
    assert "PTRT-K001" in capsys.readouterr().err
