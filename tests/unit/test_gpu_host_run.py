"""What runs on a GPU host: steps with limits, commands that parse, reports that survive."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from engine_dirs import write_engine_dir

from paged_trt.plugins import cuda, trt
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.plugins.manifest import read_manifest
from paged_trt.runtime.comparison import Tolerance
from paged_trt.runtime.results import Generation
from paged_trt.runtime.sequences import FinishReason
from paged_trt.scripts import cli
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.gpu_host import (
    device_tests,
    end_to_end,
    golden,
    host_results,
    running,
    same_text,
    sanitizer,
)
from paged_trt.scripts.gpu_host.command import main
from paged_trt.scripts.gpu_host.kit import ROOT
from paged_trt.scripts.gpu_host.phases import ALONE, PHASES, steps_of
from paged_trt.scripts.gpu_host.settings import Settings, Step
from paged_trt.scripts.results import Results, read_results

Make = Callable[..., Settings]


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_results, "gpu_and_driver", lambda device: ("NVIDIA Test 1", "1.2"))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "13.0")


@pytest.fixture
def settings(tmp_path: Path) -> Make:
    def make(**options: Any) -> Settings:
        defaults = Settings(
            output=tmp_path / "out",
            workspace=tmp_path / "work",
            model="smollm2",
            golden=tmp_path / "golden.tar.xz",
            device=0,
            parallel=2,
            tree="abc",
            dry_run=False,
        )
        return dataclasses.replace(defaults, **options)

    return make


def python(code: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *words)


Plan = Callable[..., list[running.Outcome]]


@pytest.fixture
def run(settings: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    """Runs steps of a phase `p`."""

    def go(*steps: Step, seconds: float = 3600, **limits: float) -> list[running.Outcome]:
        monkeypatch.setattr(running, "steps_of", lambda *_: [("p", step) for step in steps])
        return running.run_phases(
            settings(),
            ["p"],
            seconds=seconds,
            limits={f"p/{name}": limit for name, limit in limits.items()},
            archive=tmp_path / "all.tar.gz",
        )

    return go


def test_a_step_that_fails_takes_nothing_from_the_others(run: Plan, tmp_path: Path) -> None:
    out, made = tmp_path / "out", tmp_path / "made"
    write = "import sys; open(sys.argv[1], 'w').write('x')"
    outcomes = run(
        Step(name="first", words=python(write, str(out / "first.txt")), limit_s=300),
        Step(name="bad", words=python("raise SystemExit('what went wrong')"), limit_s=300),
        Step(name="build", words=python(write, str(made)), limit_s=300, makes=made),
        Step(name="again", words=python(write, str(made)), limit_s=300, makes=made),
        Step(name="uses", words=python("print(1)"), limit_s=300, needs=made),
        Step(name="lacks", words=python("print(1)"), limit_s=300, needs=tmp_path / "no"),
    )
    statuses = [each.status for each in outcomes]
    assert statuses == ["passed", "failed", "passed", "there", "passed", "not run"]
    assert (outcomes[1].exit_code, outcomes[1].tail) == (1, "what went wrong\n")
    assert "an earlier step makes it" in outcomes[-1].why
    summary = json.loads((out / "summary.json").read_text())
    assert [step["status"] for step in summary["steps"]] == statuses
    assert summary["passed"] is False
    with tarfile.open(tmp_path / "all.tar.gz") as tar:
        names = tar.getnames()
    assert {"results/summary.json", "results/first.txt", "results/logs/p-bad.log"} <= set(names)


def test_what_is_done_is_on_disk_before_the_next_step_begins(run: Plan, tmp_path: Path) -> None:
    look = (
        "import json, sys; d = json.load(open(sys.argv[1]));"
        "print([s['status'] for s in d['steps']])"
    )
    summary = str(tmp_path / "out" / "summary.json")
    run(
        Step(name="one", words=python("pass"), limit_s=300),
        Step(name="two", words=python(look, summary), limit_s=300),
    )
    log = (tmp_path / "out" / "logs" / "p-two.log").read_text()
    assert log == "['passed', 'not run']\n"


def test_a_step_ends_at_its_limit_and_the_next_one_runs(run: Plan) -> None:
    waits = python("import threading; threading.Event().wait()")
    outcomes = run(
        Step(name="long", words=waits, limit_s=300),
        Step(name="next", words=python("pass"), limit_s=300),
        long=running.LEAST_SECONDS,
    )
    assert [each.status for each in outcomes] == ["ended", "passed"]
    assert outcomes[0].why == "its limit of 5 s"


def test_no_step_begins_without_time(run: Plan) -> None:
    outcomes = run(Step(name="late", words=python("pass"), limit_s=300), seconds=1)
    assert [(each.status, each.why) for each in outcomes] == [
        ("not run", "the time of the run has ended")
    ]


def test_an_interrupt_lets_a_process_write_what_it_has() -> None:
    code = """
import threading
try:
    print("ready", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("kept", flush=True)
"""
    with (
        running.interruptible(),
        subprocess.Popen(python(code), stdout=subprocess.PIPE, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        running._interrupt(process)
        assert process.stdout.read() == b"kept\n"


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("model", [None, "smollm2", "model.onnx"])
def test_every_command_is_one_that_exists(settings: Make, model: str, dry_run: bool) -> None:
    """Each command line is parsed by the command that it names."""
    steps = steps_of(settings(model=model, dry_run=dry_run), list(PHASES))
    assert len(steps) > 12
    for phase, step in steps:
        _, minus_m, module, *words = step.words
        assert minus_m == "-m"
        if module == "paged_trt.scripts.cli":
            parse(cli.cli, words)
        else:
            parse(importlib.import_module(module).main, words)
        assert step.limit_s > running.LEAST_SECONDS, (phase, step.name)


def parse(command: click.Command, words: list[str]) -> None:
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words.pop(0))
        assert found is not None
        command = found
    command.make_context(command.name, words)


def test_a_step_brings_those_that_make_what_it_needs(settings: Make) -> None:
    found = [f"{phase}/{step.name}" for phase, step in steps_of(settings(), ["serving/host"])]
    assert found == ["serving/model", "serving/build", "serving/host"]
    for name in ("nothing", "tests/nothing"):
        with pytest.raises(ValueError, match="nothing`; "):
            steps_of(settings(), [name])


def test_the_list_of_commands_needs_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(tmp_path / "out"), "--list", "--phases", "tests", "--commit", "abc"]
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == ["tests/alone", "tests/engines", "tests/kernels"]
    assert not (tmp_path / "out").exists()
    for bad in (["--phases", "no"], ["--limit", "tests"]):
        assert main(["run", str(tmp_path / "out"), *bad]) == 2
        assert "gpu_host: error" in capsys.readouterr().err


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="one[x]" time="1.5"/>
<testcase classname="tests.gpu.test_a" name="two" time="0.25">
  <failure message="assert 1 == 2">long text</failure></testcase>
<testcase classname="tests.gpu.test_b" name="three" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_report_becomes_a_row_per_file(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert device_tests.rows_of(report, "run", 2) == []
    report.write_text(JUNIT)
    first, second = device_tests.rows_of(report, "run", 1)
    assert (first["file"], first["passed"], first["failed"]) == ("tests/gpu/test_a.py", 1, 1)
    assert first["failures"] == [
        {"id": "tests/gpu/test_a.py::two", "text": "assert 1 == 2\nlong text"}
    ]
    assert first["seconds"] == 1.75
    assert (second["skipped"], second["skips"]) == (1, {"no GPU": 1})


def test_runs_of_tests_are_gathered_in_one_file(tmp_path: Path) -> None:
    """Two real runs of pytest, of tests that skip or pass without a GPU."""
    options = ["-o", str(tmp_path), "--no-gpu", "--commit", "abc"]
    for name, words in (("one", ["tests/gpu/test_inspect.py"]), ("two", ["no/such/file.py"])):
        done = CliRunner().invoke(device_tests.main, [*options, "--name", name, "--", *words])
        assert done.exit_code == (0 if name == "one" else 1), done.output
    (path,) = tmp_path.glob("gpu-tests-nvidia-test-1-*.json")
    rows = read_results(path).rows
    assert [(row["run"], row["exit_code"] == 0) for row in rows] == [("one", True), ("two", False)]
    assert rows[0]["passed"] + rows[0]["skipped"] == 1


def test_a_test_that_hangs_fails_alone(tmp_path: Path) -> None:
    """As one does that waits for a kernel that never ends."""
    report, file = tmp_path / "report.xml", tmp_path / "test_hang.py"
    file.write_text(
        "import threading\n"
        "def test_hangs():\n    threading.Event().wait()\n"
        "def test_passes():\n    pass\n"
    )
    words = ["-n", "1", f"--junitxml={report}", str(file)]
    assert device_tests.run_pytest(words, test_seconds=4.0) == 1
    (row,) = (row for row in device_tests.rows_of(report, "run", 1) if row["passed"])
    assert (row["passed"], row["failed"]) == (1, 1)
    assert "test_hangs" in row["failures"][0]["id"]
    assert "crashed" in row["failures"][0]["text"]


def test_plugins_of_the_host_cannot_spoil_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that warns, as pytest-benchmark does beside pytest-xdist."""
    info = tmp_path / "host" / "spoiler-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spoiler\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nspoiler = spoiler\n")
    (info.parent / "spoiler.py").write_text(
        "import warnings\n\ndef pytest_configure(config):\n    warnings.warn('spoilt')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{info.parent}{os.pathsep}{ROOT / '.typing'}")
    test = "tests/unit/test_gpu_host_run.py::test_a_report_becomes_a_row_per_file"
    plain = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", test]
    spoilt = subprocess.run(plain, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "spoilt" in spoilt.stdout + spoilt.stderr
    assert spoilt.returncode != 0
    options = ["-o", str(tmp_path), "--no-gpu", "--commit", "abc", "--name", "one"]
    done = CliRunner().invoke(device_tests.main, [*options, "--", test])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("gpu-tests-nvidia-test-1-*.json")
    assert [(row["passed"], row["failed"]) for row in read_results(path).rows] == [(1, 0)]


def test_tests_that_measure_free_memory_run_alone() -> None:
    measuring, marked = set(), set()
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        marked |= set(re.findall(rf"^@pytest\.mark\.{ALONE}\ndef (\w+)", text, re.MULTILINE))
        for name, body in re.findall(
            r"^def (test_\w+)(.*?)(?=^(?:def|class|@)|\Z)", text, re.MULTILINE | re.DOTALL
        ):
            if "free_bytes()" in body:
                measuring.add(name)
    assert len(measuring) >= 4
    assert measuring <= marked


def test_every_sanitized_test_exists() -> None:
    tests = [test for group in sanitizer.SELECTION.values() for test in group]
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", *tests]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_results_without_git_get_the_commit_that_ran(tmp_path: Path) -> None:
    results = Results.model_validate(
        {
            "kind": "host",
            "date": "2026-11-30",
            "gpu": "g",
            "driver": "d",
            "cuda": "c",
            "tensorrt": "t",
            "method": "m",
            "rows": [],
            "commit": "unknown",
        }
    )
    results.write(tmp_path / "one.json")
    results.model_copy(update={"commit": "known"}).write(tmp_path / "two.json")
    results.model_copy(update={"commit": "older-dirty"}).write(tmp_path / "three.json")
    (tmp_path / "other.json").write_text("{}")
    host_results.name_commit(tmp_path, "abc")
    assert read_results(tmp_path / "one.json").commit == "abc"
    assert read_results(tmp_path / "two.json").commit == "known"
    assert read_results(tmp_path / "three.json").commit == "abc"


def test_results_say_which_tensorrt_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    assert host_results.tensorrt_in_use() == f"tensorrt_rtx {trt.version()}"

    def refuse() -> str:
        raise UnsupportedError("no TensorRT is installed")

    monkeypatch.setattr(trt, "flavor", refuse)
    assert host_results.tensorrt_in_use() == "not installed"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_rtx")
    folder = tmp_path_factory.mktemp("engine")
    write_toy(folder / "toy", "gqa")
    return write_engine_dir(folder / "toy" / "model.onnx", folder / "engine")


def test_an_engine_end_to_end_on_the_reference_executor(engine: Path, tmp_path: Path) -> None:
    words = [str(engine), "-o", str(tmp_path), "--on-cpu", "--new-tokens", "3", "--commit", "abc"]
    done = CliRunner().invoke(end_to_end.main, words)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("e2e-nvidia-test-1-*.json")
    found = read_results(path)
    assert (found.kind, found.commit, found.gpu) == ("e2e", "abc", "NVIDIA Test 1")
    (row,) = found.rows
    assert row["tokens_equal"] is True
    assert row["first_difference"] is None
    assert row["replay_equals_eager"] is True
    assert row["prompts"] == [127, 129, 255, 300]
    assert row["step_us_eager"] > 0
    assert row["eager_us_per_layer"] == pytest.approx(row["step_us_eager"] / row["layers"], abs=0.1)
    assert read_manifest(engine).source.name == row["model"]


def test_the_same_text_comes_from_both_executors(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".typing"))
    words = [str(engine), "-o", str(tmp_path), "--on-cpu", "--commit", "abc"]
    done = CliRunner().invoke(same_text.main, words)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("run-*.json")
    (row,) = read_results(path).rows
    assert row["exit_codes"] == [0, 0]
    assert row["same_tokens"] is True
    assert all(sequence["tokens"] for sequence in row["sequences"][0])


def test_golden_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    archive = tmp_path / "golden.tar.xz"
    archive.write_bytes(b"no archive")
    for folder in (archive, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            golden._unpacked(folder, tmp_path)
    with tarfile.open(archive, "w:xz"):
        pass
    with pytest.raises(ConfigError, match="holds no golden files"):
        golden._unpacked(archive, tmp_path / "other")


def generation(tokens: list[int], logits: list[list[float]]) -> Generation:
    return Generation(
        tokens=tuple(tokens),
        finish_reason=FinishReason.LENGTH,
        logits=np.asarray(logits, np.float32),
    )


@pytest.mark.parametrize(("gap", "excused"), [(0.01, True), (0.5, False)])
def test_the_first_difference_has_its_gap_and_bound(gap: float, excused: bool) -> None:
    tolerance = Tolerance(atol=0, rtol=0, tie_rtol=0.02, reason="test")
    same = generation([1, 0], [[0, 1], [2, 0]])
    want = generation([1, 0], [[0, 1], [2, 2 - gap]])
    have = generation([1, 1], [[0, 1], [2 - gap, 2]])
    found = end_to_end.first_difference([same, want], [same, have], tolerance)
    assert found[0] is not None
    assert (found[0]["sequence"], found[0]["step"]) == (1, 1)
    assert found[0]["gap"] == pytest.approx(gap, abs=1e-6)
    assert found[0]["bound"] == pytest.approx(0.04)
    assert found[1] is excused
    assert end_to_end.first_difference([same], [same], tolerance) == (None, True)


SANITIZER = """#!/bin/sh
[ "$1" = --version ] && echo "NVIDIA\nVersion 2025.3.0" && exit
while [ "$1" != "-m" ]; do
  if [ "$1" = "--tool" ]; then tool=$2; fi
  if [ "$1" = "--log-file" ]; then log=$2; fi
  shift
done
folder=$(dirname "$log")
echo "3 passed"
echo "$FAKE_REPORT" > "$folder/1-$tool.log"
echo "========= ERROR SUMMARY: 0 errors" > "$folder/2-$tool.log"
echo '<testsuite><testcase classname="tests.gpu.test_a" name="one"/></testsuite>' \\
  > "$folder/junit.xml"
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
    report: str, errors: int, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_REPORT", report)
    words = ["-o", str(tmp_path / "out"), "--tool", "memcheck", "--commit", "abc"]
    done = CliRunner().invoke(sanitizer.main, words)
    (path,) = (tmp_path / "out").glob("sanitizer-*.json")
    rows = read_results(path).rows
    assert [row["group"] for row in rows] == sorted(sanitizer.SELECTION)
    for row in rows:
        assert (row["errors"], row["processes"], row["tests"]) == (errors, processes, "3 passed")
        assert row["covered"] == ["tests/gpu/test_a.py::one"]
        assert (row["version"], row["races"]) == ("Version 2025.3.0", [])
        assert (report in row["first_report"]) is (errors > 0 or processes == 1)
    assert (done.exit_code == 0) is (errors == 0 and processes == 2), done.output


def test_a_sanitizer_that_does_not_end_is_killed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n[ $1 = --version ] && exit\nsleep 1000 & sleep 1000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["-o", str(tmp_path / "out"), "--tool", "memcheck", "--test", "t", "--limit-s", "1"]
    done = CliRunner().invoke(sanitizer.main, [*words, "--commit", "abc"])
    (path,) = (tmp_path / "out").glob("sanitizer-*.json")
    (row,) = read_results(path).rows
    assert row["tests"] == "ended after the limit of 1 s"
    assert (row["covered"], row["processes"], done.exit_code) == ([], 0, 1)
