"""`paged-trt inspect`: plans, profiles, bytes, sessions and their picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins.kv import power_of_two_buckets, table_width_buckets
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.sources import kernel_source_sha256
from paged_trt.plugins.launch.tuned import RequestKey, TunedPlan, TuningTarget
from paged_trt.plugins.launch.tuned_file import write_tuned
from paged_trt.plugins.launch.tuner import engine_requests
from paged_trt.plugins.manifest import read_manifest
from paged_trt.scripts import inspect, inspect_tuned, pool_picture
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.inspect_plans import (
    Device,
    folded_names,
    folded_tensors,
    layer_kinds,
    ranges,
    step_plans,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    write_toy(folder / "toy", Dialect.GQA)
    limits = {"max_batch_size": 5, "max_kv_cache_capacity": 2048, "max_input_len": 2048}
    return write_engine_dir(folder / "toy" / "model.onnx", folder / "engine", **limits)


@pytest.fixture(scope="module")
def session(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("session") / "session.json"
    words = ["--input-ids", "1,2,3", "--input-ids", "4", "--max-new-tokens", "3"]
    options = ["--executor", "reference", "--record", str(path)]
    assert main(["run", str(engine), *words, *options]) == 0
    return path


def inspected(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    capsys.readouterr()
    assert main(["inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_bucket_has_the_planners_plan(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(engine)
    pool = manifest.spec.pool
    plans = inspected(capsys, engine)["decode_plans"]
    found = [(each["num_seqs"], each["table_width"]) for each in plans]
    assert found == list(
        itertools.product(power_of_two_buckets(pool.max_batch_size), table_width_buckets(pool))
    )
    assert {tuple(each["layers"]) for each in plans} == {(0, 1)}
    kinds = {each["plan"].split(":")[0] for each in plans}
    assert "direct" in kinds  # one page
    assert len(kinds) > 1
    assert {each["source"] for each in plans} == {"heuristic"}


def test_plans_are_those_of_the_device(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = PolicyPlanner.plan

    def plan(self: PolicyPlanner, request: object) -> object:
        asked.append((request.arch, request.num_multiprocessors))  # type: ignore[attr-defined]
        return original(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicyPlanner, "plan", plan)
    step_plans(read_manifest(engine), Device(arch="sm_90", multiprocessors=132))
    assert set(asked) == {("sm_90", 132)}


def test_an_explicit_plan_is_said_to_be_one(
    engine: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import shutil

    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    data = json.loads((copy / "manifest.json").read_text())
    data["build"]["attention_plan"] = "split:256"
    (copy / "manifest.json").write_text(json.dumps(data))
    plans = inspected(capsys, copy)["decode_plans"]
    assert {(each["plan"], each["source"]) for each in plans} == {("split:256:256", "explicit")}
    assert "--attention-plan" in plans[0]["reason"]


def test_tables_show_profiles_bytes_and_hops(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["inspect", str(engine)]) == 0
    text = capsys.readouterr().out
    for title in ("Optimization profiles", "decode plans", "Page plan", "Hops of the page count"):
        assert title in text
    assert text.count("✓") == 6
    data = inspected(capsys, engine)
    size = (engine / "model.plan").stat().st_size
    assert data["bytes"]["file model.plan"] == size
    assert data["bytes"]["KV pools"] == data["pool_bytes"]


def test_a_session_is_shown(
    engine: Path, session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = inspected(capsys, engine, "--session", session)["session"]
    assert [slot["tokens"] for slot in record["fullest"]["slots"]] == [3, 1]
    assert main(["inspect", str(engine), "--session", str(session)]) == 0
    assert "2 of 80 pages in use" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="the extra `plots` is not installed"
)
def test_a_picture_is_a_png(engine: Path, session: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pages.png"
    words = ["--session", str(session), "--picture", str(picture)]
    assert main(["inspect", str(engine), *words]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["pages.png"]


def test_what_cannot_be_drawn_is_refused_first(
    engine: Path,
    session: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(code: int, *words: object) -> str:
        assert main(["inspect", str(engine), *map(str, words)]) == code
        return " ".join(capsys.readouterr().err.split())

    picture = tmp_path / "p.png"
    assert "--record FILE" in fails(2, "--picture", picture)
    assert "create it first" in fails(2, "--session", session, "--picture", "/no/p.png")
    assert "--record FILE" in fails(4, "--session", tmp_path / "absent.json")
    data = json.loads(session.read_text())
    data["geometry_sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(data))
    assert "must be" in fails(4, "--session", tmp_path / "other.json")

    def missing(*_: object) -> None:
        raise pool_picture.PackageMissingError('needs `pip install "paged-trt[plots]"`')

    monkeypatch.setattr(inspect, "write_picture", missing)
    assert "plots" in fails(2, "--session", session, "--picture", picture)
    assert not picture.exists()


def test_layers_are_told_in_ranges() -> None:
    assert ranges((0, 1, 2, 5, 7, 8)) == "0..2, 5, 7..8"


def test_equal_tensors_share_a_line_and_json_names_each(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["inspect", str(engine)]) == 0
    text = capsys.readouterr().out
    for name in ("key_pool.{0..1}", "value_pool.{0..1}", "key_pool_out.{0..1}"):
        assert name in text
    assert "key_pool.1 " not in text
    assert {"key_pool.1", "value_pool_out.1"} <= {
        tensor["name"] for tensor in inspected(capsys, engine)["tensors"]
    }


def test_tensors_of_different_layers_do_not_share_a_line(engine: Path) -> None:
    spec = read_manifest(engine).spec
    wide = dataclasses.replace(spec.layers[0], head_dim=128, value_head_dim=128)
    alternating = dataclasses.replace(spec, layers=(spec.layers[0], wide) * 15)
    names = [
        folded_names([tensor.name for tensor in group])
        for group in folded_tensors(alternating.tensors())
    ]
    even, odd = (", ".join(map(str, range(first, 30, 2))) for first in (0, 1))
    assert f"key_pool.{{{even}}}" in names
    assert f"value_pool_out.{{{odd}}}" in names
    # Each layer of the toy has its own line there: two layers, two kinds.
    assert len(names) == len(spec.tensors())
    assert names[0] == "input_ids"
    assert [len(numbers) for numbers in layer_kinds(alternating).values()] == [15, 15]


TARGET = TuningTarget(
    gpu="NVIDIA H200",
    arch="sm_90",
    num_multiprocessors=132,
    driver="580.1, CUDA 13.0",
    kernels=kernel_source_sha256(),
    compiler="13.0",
)


def tuned_plan(engine: Path) -> TunedPlan:
    """The engine's widest step of one sequence, where another plan than the heuristic's won."""
    spec = read_manifest(engine).spec
    (request,) = [
        each
        for each in engine_requests(spec, arch=TARGET.arch, num_multiprocessors=132)
        if (each.step.num_seqs, each.step.table_width) == (1, spec.pool.max_pages_per_seq)
    ]
    heuristic, *others = candidates(request)
    return TunedPlan(
        request=RequestKey.of(request),
        plan_text=str(others[-1]),
        microseconds=5.0,
        heuristic_text=str(heuristic),
        heuristic_microseconds=8.0,
    )


def test_tuned_plans_are_shown_with_their_file(
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = tuned_plan(engine)
    path = write_tuned([plan], TARGET, tmp_path)
    data = inspected(capsys, engine, "--tuned", path)
    assert data["device"] == {"arch": "sm_90", "multiprocessors": 132}
    assert data["tuned_plans"]["file"] == str(path)
    assert data["tuned_plans"]["plans"] == 1
    found = [each for each in data["decode_plans"] if each["source"] == "tuned"]
    assert [(each["num_seqs"], each["plan"]) for each in found] == [(1, plan.plan_text)]
    assert "5.00 us" in found[0]["reason"]
    assert {each["source"] for each in data["decode_plans"]} == {"tuned", "heuristic"}
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", str(engine), "--tuned", str(path)]) == 0
    text = capsys.readouterr().out
    assert "│ tuned " in text
    assert str(path) in text


def test_a_device_has_the_plans_that_were_tuned_on_it(
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the probes say on a machine with a GPU."""
    device = {"arch": TARGET.arch, "multiprocessors": 132}
    answers = {
        "device": {"devices": [device]},
        "engine": {"error": {"message": "not asked"}},
        "tuning": dataclasses.asdict(TARGET),
    }
    for module in (inspect, inspect_tuned):
        monkeypatch.setattr(module, "run_probe", lambda name, *words: answers[name])
    monkeypatch.setenv("PAGED_TRT_CACHE_DIR", str(tmp_path))
    none = inspected(capsys, engine)["tuned_plans"]
    assert none["plans"] == 0
    assert "nothing was tuned" in none["note"]
    path = write_tuned([tuned_plan(engine)], TARGET)
    data = inspected(capsys, engine)
    assert data["tuned_plans"]["file"] == str(path)
    assert "tuned" in {each["source"] for each in data["decode_plans"]}
    answers["tuning"] = {**answers["tuning"], "driver": "600.1, CUDA 14.0"}
    stale = inspected(capsys, engine)
    assert "stale" in stale["tuned_plans"]["note"]
    assert {each["source"] for each in stale["decode_plans"]} == {"heuristic"}


def test_a_wrong_file_of_tuned_plans_is_refused(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        assert main(["inspect", str(engine), "--tuned", str(path)]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "`paged-trt tune` wrote" in refused(tmp_path / "absent.json")
    assert "`paged-trt tune` wrote" in refused(engine / "manifest.json")
    assert "`paged-trt tune` wrote" in refused(engine)
    other = dataclasses.replace(TARGET, kernels="0" * 64)
    assert "tune` again" in refused(write_tuned([tuned_plan(engine)], other, tmp_path))
