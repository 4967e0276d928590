"""The engine directory takes its place whole, and takes nobody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_trt.builder import artifact, pipeline
from paged_trt.plugins.errors import ConfigError


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def build(target: Path, *, force: bool, meanwhile: str) -> None:
    """A build that takes long enough for `meanwhile` to appear in its place."""
    with artifact.staged_directory(target, force=force) as staging:
        (staging / "model.plan").write_text("ours")
        write(target, meanwhile, "theirs")


def test_a_build_that_finished_first_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with pytest.raises(ConfigError, match="--force"):
        build(target, force=False, meanwhile="model.plan")
    assert (target / "model.plan").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_force_replaces_what_came_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    build(target, force=True, meanwhile="manifest.json")
    assert (target / "model.plan").read_text() == "ours"
    assert not (target / "manifest.json").exists()
    assert list(tmp_path.iterdir()) == [target]


def test_force_keeps_a_stranger_that_came_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    with pytest.raises(ConfigError, match=r"precious\.txt"):
        build(target, force=True, meanwhile="precious.txt")
    assert (target / "precious.txt").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_leaves_the_old_engine_or_the_new_one(
    moment: int, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes right after one of the calls that make or move a folder."""
    target = tmp_path / "engine"
    if is_there:
        write(target, "manifest.json", "old")
    calls: list[str] = []

    def interrupted(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            function(*arguments, **options)
            calls.append(function.__name__)
            if len(calls) == moment + 1:
                signal.raise_signal(signal.SIGINT)

        return call

    num_calls = 4 if is_there else 2
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename"):
            patch.setattr(os, name, interrupted(getattr(os, name)))
        try:
            with artifact.staged_directory(target, force=True) as staging:
                (staging / "manifest.json").write_text("new")
            was_interrupted = False
        except KeyboardInterrupt:
            was_interrupted = True
    assert was_interrupted == (moment < num_calls)
    is_new = moment >= num_calls - 1
    assert list(tmp_path.iterdir()) == ([target] if is_there or is_new else [])
    if target.exists():
        assert (target / "manifest.json").read_text() == ("new" if is_new else "old")


def test_an_old_engine_that_cannot_go_back_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    write(target, "manifest.json", "old")
    rename = os.rename

    def rename_and_fill(source: Path, place: Path) -> None:
        rename(source, place)
        if source == target:
            write(target, "precious.txt", "theirs")

    monkeypatch.setattr(os, "rename", rename_and_fill)
    with pytest.raises(OSError, match="not empty"):
        build(target, force=True, meanwhile="manifest.json")
    assert (target / "precious.txt").read_text() == "theirs"
    assert [path.read_text() for path in tmp_path.rglob("manifest.json")] == ["theirs"]


def test_force_keeps_a_folder_with_a_model_in_it(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for name in ("model.onnx", "model.onnx.data", "tokenizer.json", "config.json"):
        write(target, name, "theirs")
    with pytest.raises(ConfigError, match="no engine directory"):
        artifact.require_target(target, force=True)


def test_an_empty_folder_may_be_replaced(tmp_path: Path) -> None:
    artifact.require_target(tmp_path, force=True)


def test_nothing_that_a_build_reads_lies_in_its_target(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    write(target, "model.onnx", "theirs")
    (tmp_path / "link").symlink_to(target)
    for path in (target, target / "model.onnx", tmp_path / "link" / "new.onnx"):
        with pytest.raises(ConfigError, match="lies in"):
            artifact.require_outside(target, [tmp_path / "model.onnx", path])
    artifact.require_outside(target, [tmp_path, tmp_path / "engine.onnx"])


def test_a_saved_model_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(model: object, path: Path, *, external_data: str) -> None:
        (path.parent / external_data).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(pipeline.ir, "load", lambda path: None)
    monkeypatch.setattr(pipeline.ir, "save", save)
    with pytest.raises(OSError, match="disk full"):
        pipeline._save_onnx(tmp_path, tmp_path / "paged.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_model_replaces_nothing_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(model: object, path: Path, *, external_data: str) -> None:
        path.write_text("ours")
        write(tmp_path, external_data, "theirs")

    monkeypatch.setattr(pipeline.ir, "load", lambda path: None)
    monkeypatch.setattr(pipeline.ir, "save", save)
    with pytest.raises(ConfigError, match=r"paged\.onnx\.data exists"):
        pipeline._save_onnx(tmp_path, tmp_path / "paged.onnx")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]
