"""The record of a session: who held which page, written while it runs, read with suspicion."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from engine_dirs import write_engine_dir

from paged_trt.plugins.errors import ExecutionError, ManifestError
from paged_trt.runtime import snapshot as snapshots
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.session import Session
from paged_trt.runtime.snapshot import SessionRecord, SessionRecorder, read_record
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

PROMPT_LENS = (120, 3)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshot")
    write_toy(folder / "toy", Dialect.GQA)
    return write_engine_dir(folder / "toy" / "model.onnx", folder / "engine", max_batch_size=2)


def recorded(engine: Path, path: Path) -> SessionRecord:
    recorder = SessionRecorder(load_engine(engine, "reference"), path, geometry_sha256="a")
    with Session(recorder, page_order=[7, 6, 5, 4, 3, 2, 1, 0]) as session:
        recorder.take = session.snapshot
        session.generate([[1] * length for length in PROMPT_LENS], NEW_TOKENS)
        assert session.snapshot().pages_in_use == 0
    return read_record(path)


def test_a_record_holds_the_pages_of_every_step(engine: Path, tmp_path: Path) -> None:
    record = recorded(engine, tmp_path / "record.json")
    assert not record.is_running
    # The first sequence crosses into its second page at its 129th token.
    assert [(each.step, each.pages_in_use) for each in record.timeline] == [
        (1, 2),
        (10, 3),
        (NEW_TOKENS, 3),
    ]
    first, second = record.fullest.slots
    assert (first.tokens, first.pages) == (129, (7, 5))
    assert (second.tokens, second.pages) == (12, (6,))
    assert [page for page, count in enumerate(record.fullest.references) if count] == [5, 6, 7]
    assert record.latest.slots[0].tokens == PROMPT_LENS[0] + NEW_TOKENS - 1


def test_a_running_session_is_written_too(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "WRITE_SECONDS", 0.0)
    path = tmp_path / "record.json"
    recorder = SessionRecorder(load_engine(engine, "reference"), path, geometry_sha256="a")
    with Session(recorder) as session:
        recorder.take = session.snapshot
        session.add([1, 2, 3], 4)
        session.step()
        running = read_record(path)
        assert running.is_running
        assert running.latest.slots[0].tokens == 3
    assert not read_record(path).is_running
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_steps_that_draw_where_the_logits_are_count(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a TensorRT engine does in every step."""
    expected = recorded(engine, tmp_path / "logits.json")
    monkeypatch.setattr(ReferenceExecutor, "samples_on_device", True)
    assert recorded(engine, tmp_path / "drawn.json") == expected


def test_the_executor_is_closed_where_the_record_cannot_be_written(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "WRITE_SECONDS", math.inf)
    folder = tmp_path / "gone"
    folder.mkdir()
    executor = load_engine(engine, "reference")
    recorder = SessionRecorder(executor, folder / "record.json", geometry_sha256="a")
    session = Session(recorder)
    recorder.take = session.snapshot
    session.generate([[1, 2, 3]], 2)
    folder.rmdir()
    with pytest.raises(OSError, match=r"record\.json"):
        session.close()
    with pytest.raises(ExecutionError, match="closed"):
        executor.warm_up()


def test_a_pipe_is_no_record(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ManifestError, match="no regular file"):
        read_record(tmp_path / "pipe")


def test_a_session_without_steps_writes_nothing(engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with Session(SessionRecorder(load_engine(engine, "reference"), path, geometry_sha256="a")):
        pass
    assert not path.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(schema_version=2),
        lambda data: data.update(surplus=1),
        lambda data: data["fullest"]["slots"][0]["pages"].append(8),
        lambda data: data["latest"]["slots"].append(data["latest"]["slots"][0]),
        lambda data: data["fullest"]["references"].__setitem__(0, -1),
        lambda data: data["timeline"][0].update(step="1"),
        lambda data: data["timeline"][0].update(step=10**400),
        lambda data: data["fullest"]["slots"][0].update(tokens=10**400),
        lambda data: data["fullest"].update(references=[], slots=[]),
    ],
)
def test_a_record_that_is_none_is_refused(change: object, engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    recorded(engine, path)
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    with pytest.raises(ManifestError, match=r"record\.json .*record"):
        read_record(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ManifestError, match="--record FILE"):
        read_record(path)
