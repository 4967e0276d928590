"""`paged-trt tune`: what it would time, what it refuses, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import paged_models
import pytest
from engine_dirs import small_spec, write_manifest, write_plan
from rich.console import Console

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError, UnsupportedError
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.plugins.launch.tuner import engine_requests
from paged_trt.plugins.manifest import MANIFEST_FILE, SourceRecord
from paged_trt.scripts import tune
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.tune import to_json, tune_all, tunings_table

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
    target = TuningTarget(
        gpu="none",
        arch="sm_90",
        num_multiprocessors=132,
        driver="1",
        kernels="ab" * 32,
        compiler="13.0",
    )
    monkeypatch.setattr(tune, "tuning_target", lambda device: target)
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


def test_what_does_not_fit_is_skipped_and_named() -> None:
    first, second = _requests()

    def time_plan(request: AttentionPlanRequest, plan: object) -> float:
        if request == first:
            raise UnsupportedError("no kernel for that")
        return 3.0

    run = tune_all([first, second], time_plan)
    assert [tuning.request for tuning in run.tunings] == [second]
    assert run.skipped == [(first, "no kernel for that")]
    assert to_json(run)["skipped"][0]["reason"] == "no kernel for that"
    console = Console(width=160, record=True)
    console.print(tunings_table(run.tunings))
    assert "the same" in console.export_text()


def test_a_broken_device_ends_the_run() -> None:
    def time_plan(request: AttentionPlanRequest, plan: object) -> float:
        raise ExecutionError("the device is lost")

    with pytest.raises(ExecutionError):
        tune_all(_requests(), time_plan)


def test_the_limit_keeps_what_was_timed() -> None:
    run = tune_all(_requests(), lambda request, plan: 1.0, limit_s=-1.0)
    assert run.tunings == []
    assert all("limit" in reason for _, reason in run.skipped)


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
