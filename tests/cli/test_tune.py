"""`paged-trt tune`: what it would time, what it refuses, what it prints."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paged_models
import pytest
from engine_dirs import small_spec, write_manifest, write_plan
from rich.console import Console
from safetensors.numpy import save_file

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError, KernelCompileError, UnsupportedError
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.plugins.launch.tuned_file import read_tuned
from paged_trt.plugins.launch.tuner import TimePlan, engine_requests
from paged_trt.plugins.manifest import MANIFEST_FILE, SourceRecord
from paged_trt.plugins.tensors import kv_scales_name
from paged_trt.scripts import tune, tune_device
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.toy import TOY, write_toy
from paged_trt.scripts.tune import tune_all
from paged_trt.scripts.tune_report import TuneRun, problem_lines, to_json, tunings_table

SHAPES = ["--heads", "32/8", "--batch", "1,8", "--tokens", "4096"]


def test_a_dry_run_shows_plans_reasons_and_candidates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["tune", *SHAPES, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "N 1, M 32" in out
    assert "N 8, M 32" in out
    assert "(heuristic)" in out
    assert "132" in out  # multiprocessors that the reason names
    assert "direct" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "`--heads`, `--batch`, `--tokens`"),
        (["--heads", "32/8"], "`--batch`, `--tokens`"),
        (["--heads", "32"], "32/8"),
        (["--heads", "32/8", "--batch", "0", "--tokens", "1"], "positive"),
        (["--heads", "32/7", "--batch", "1", "--tokens", "1"], "num_kv_heads=7"),
        ([*SHAPES, "--head-dim", "0"], "x>=1"),
        ([*SHAPES, "--json", "/no/such/folder/x.json"], "no directory"),
    ],
)
def test_bad_words_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_cache_that_cannot_be_used_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "tuning_target", lambda device: TARGET)
    monkeypatch.setattr(tune, "start_compiling", lambda keys: pytest.fail("it began"))
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PAGED_TRT_CACHE_DIR", str(tmp_path))
    assert main(["tune", *SHAPES]) == 3
    assert "other users may write" in capsys.readouterr().err
    monkeypatch.setenv("PAGED_TRT_CACHE_DIR", str(Path(__file__)))
    assert main(["tune", *SHAPES]) == 3
    assert "exists" in capsys.readouterr().err


def test_engine_requests_are_the_buckets_of_every_different_layer() -> None:
    spec = paged_models.make_spec()
    requests = list(engine_requests(spec, arch=None, num_multiprocessors=None))
    assert len(set(requests)) == len(requests)
    assert all(request.is_decode for request in requests)
    widest = max(request.step.table_width for request in requests)
    assert widest == spec.pool.max_pages_per_seq
    assert max(request.step.num_seqs for request in requests) == spec.pool.max_batch_size


def _requests() -> list[AttentionPlanRequest]:
    spec = paged_models.make_spec()
    return list(engine_requests(spec, arch="sm_90", num_multiprocessors=132))[:2]


def timed(requests: list[AttentionPlanRequest], time_plan: TimePlan, **options: Any) -> TuneRun:
    run = TuneRun()
    options = {"keep": lambda tuning: None, "is_usable": lambda: True, **options}
    tune_all(requests, time_plan, run=run, **options)
    return run


def test_what_does_not_fit_is_skipped_and_named() -> None:
    first, second = _requests()

    def time_plan(request: AttentionPlanRequest, plan: object) -> float:
        if request == first:
            raise UnsupportedError("no kernel for that")
        return 3.0

    run = timed([first, second], time_plan)
    assert [tuning.request for tuning in run.tunings] == [second]
    assert run.skipped == [(first, "no kernel for that")]
    assert run.error() is None
    assert to_json(run)["skipped"][0]["reason"] == "no kernel for that"
    console = Console(width=160, record=True)
    console.print(tunings_table(run.tunings))
    assert "the same" in console.export_text()


def test_the_limit_keeps_what_was_timed() -> None:
    run = timed(_requests(), lambda request, plan: 1.0, limit_s=-1.0)
    assert run.tunings == []
    assert all("limit" in reason for _, reason in run.skipped)
    assert len(problem_lines(run)) == 1
    assert "and 1 more" in problem_lines(run)[0]


TARGET = TuningTarget(
    gpu="none",
    arch="sm_90",
    num_multiprocessors=132,
    driver="1",
    kernels="ab" * 32,
    compiler="13.0",
)


class Timer:
    """A device that fails, or does not come back, where a test says so.

    `fails` gets the number of the step, the plan and whether it is the heuristic's.
    """

    def __init__(self, fails: Callable[[int, str, bool], None], *, is_lost: bool) -> None:
        self.fails, self.is_lost = fails, is_lost
        self.steps: list[AttentionPlanRequest] = []

    def __call__(self, request: AttentionPlanRequest, plan: object) -> float:
        is_first = request not in self.steps
        if is_first:
            self.steps.append(request)
        self.fails(len(self.steps), str(plan), is_first)
        return 3.0

    def is_usable(self) -> bool:
        return not self.is_lost


@pytest.fixture
def tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, int]]:
    """Runs `tune` on a Timer: exit code, standard error, and how many plans the file has."""

    def run(
        fails: Callable[[int, str, bool], None], *, is_lost: bool = False
    ) -> tuple[int, str, int]:
        @contextlib.contextmanager
        def source(device: int, requests: object) -> Iterator[Timer]:
            try:
                yield Timer(fails, is_lost=is_lost)
            finally:
                if is_lost:
                    raise ExecutionError("cuMemFree failed")

        monkeypatch.setenv("PAGED_TRT_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(tune, "tuning_target", lambda device: TARGET)
        compiled: concurrent.futures.Future[None] = concurrent.futures.Future()
        compiled.set_result(None)
        monkeypatch.setattr(tune, "start_compiling", lambda keys: compiled)
        monkeypatch.setattr(tune_device, "timing_source", source)
        code = main(["tune", *SHAPES, "--json", str(tmp_path / "times.json")])
        return code, capsys.readouterr().err, len(read_tuned(TARGET))

    return run


def test_a_step_that_fails_loses_nothing_that_was_timed(
    tuned: Callable[..., tuple[int, str, int]], tmp_path: Path
) -> None:
    def fails(step: int, plan: str, is_first: bool) -> None:
        if step == 1:
            raise KernelCompileError("no such instruction")

    code, error, kept = tuned(fails)
    assert (code, kept) == (3, 1)
    assert "no such instruction" in error
    assert "N 1, M 32" in error
    assert "timed steps, which are kept: 1;" in error
    data = json.loads((tmp_path / "times.json").read_text())
    assert [each["code"] for each in data["failed"]] == ["PTRT-K002"]
    assert len(data["tunings"]) == 1


def test_a_plan_that_fails_is_named_and_the_step_is_kept(
    tuned: Callable[..., tuple[int, str, int]],
) -> None:
    def fails(step: int, plan: str, is_first: bool) -> None:
        if step == 2 and plan == "counter:4":
            raise KernelCompileError("no such instruction")

    code, error, kept = tuned(fails)
    assert (code, kept) == (3, 2)
    assert "N 8, M 32, plan counter:4" in error


def test_a_lost_device_ends_the_run_and_what_came_before_is_kept(
    tuned: Callable[..., tuple[int, str, int]], tmp_path: Path
) -> None:
    """It was lost behind the heuristic's plan: that one is not said to be the fastest."""

    def fails(step: int, plan: str, is_first: bool) -> None:
        if step == 1 and not is_first:
            raise ExecutionError("the launch failed")

    code, error, kept = tuned(fails, is_lost=True)
    assert (code, kept) == (3, 0)
    assert "the launch failed" in error
    assert "cuMemFree" not in error
    skipped = json.loads((tmp_path / "times.json").read_text())["skipped"]
    assert [each["reason"] for each in skipped] == [
        "the device stopped working at the step that failed"
    ]

    def fails_later(step: int, plan: str, is_first: bool) -> None:
        if step == 2:
            raise ExecutionError("the launch failed")

    assert tuned(fails_later, is_lost=True)[2] == 1


def test_an_interrupt_keeps_what_was_timed(
    tuned: Callable[..., tuple[int, str, int]],
) -> None:
    def fails(step: int, plan: str, is_first: bool) -> None:
        if step == 2:
            raise KeyboardInterrupt

    code, error, kept = tuned(fails)
    assert (code, kept) == (130, 1)
    assert "1 plans were timed and are kept" in error


def _engine_dir(folder: Path, plan: str | None) -> Path:
    spec = small_spec(DType.FLOAT16, DType.FLOAT16)
    write_plan(folder, spec)
    write_manifest(folder, spec, source=SourceRecord(name="m", sha256="0" * 64, dialect="none"))
    path = folder / MANIFEST_FILE
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    data["build"]["attention_plan"] = plan
    path.write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_an_engine_with_a_fixed_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(_engine_dir(tmp_path, "direct")), "--dry-run"]) == 2
    assert "switches tuning off" in capsys.readouterr().err


def test_an_engine_that_gathers_is_tuned_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plan says nothing about decode steps; these have one page and no choice."""
    assert main(["tune", str(_engine_dir(tmp_path, "gather")), "--dry-run"]) == 2
    assert "one plan only" in capsys.readouterr().err


def test_an_engine_whose_steps_leave_no_choice_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page: there is nothing to split."""
    assert main(["tune", str(_engine_dir(tmp_path, None)), "--dry-run"]) == 2
    assert "one plan only" in capsys.readouterr().err


def test_a_build_says_how_much_an_explicit_split_takes_and_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_toy(tmp_path / "toy", "attention23-past")
    words = [
        *("build", str(tmp_path / "toy" / "model.onnx"), "--dry-run"),
        *("--max-batch-size", "70000", "--max-input-len", "64"),
        *("--max-kv-cache-capacity", "2048", "--attention-plan"),
    ]
    assert main([*words, "split:128"]) == 2
    error = capsys.readouterr().err
    assert "1,164,800,000 bytes of workspace" in error
    assert "`split:256` (582,400,000 bytes)" in error
    assert main([*words, "split:256"]) == 0
    assert "582,400,000" in capsys.readouterr().out


def test_a_build_takes_gather_for_8_bit_pools_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_toy(tmp_path / "toy", "attention23-past")
    words = [
        *("build", str(tmp_path / "toy" / "model.onnx"), "--dry-run"),
        *("--max-batch-size", "2", "--max-input-len", "64", "--max-kv-cache-capacity", "256"),
        *("--attention-plan", "gather"),
    ]
    assert main(words) == 2
    assert "a float16 pool is read as it is; leave it to `auto`" in capsys.readouterr().err
    scales = np.ones((2, TOY.num_kv_heads), np.float32)
    file = tmp_path / "scales.safetensors"
    save_file({kv_scales_name(layer): scales for layer in range(TOY.num_layers)}, file)
    assert main([*words, "--kv-cache-dtype", "float8", "--kv-scales", str(file)]) == 0
    # Two sequences of two pages: keys and values of every key head, the table, the counter.
    out = capsys.readouterr().out
    heads = TOY.num_kv_heads * TOY.head_dim
    assert f"{4 * 128 * heads * 2 * 2 + 256 + 4:,}" in out
