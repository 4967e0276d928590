"""A file is written whole or not at all, whenever the writing ends."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.files import PRIVATE_MODE, naming, write_bytes
from paged_trt.scripts.error_output import system_error_text
from paged_trt.scripts.files import require_writable


@pytest.mark.parametrize("moment", ["open", "chmod", "replace"])
def test_an_interrupt_leaves_the_old_file_or_the_new_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes right after one of the calls that make, change or move the file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            signal.raise_signal(signal.SIGINT)
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, interrupted(getattr(os, moment)))
        with pytest.raises(KeyboardInterrupt):
            write_bytes(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == (b"new" if moment == "replace" else b"old")


def test_a_private_file_is_private_and_a_long_name_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_bytes(path, b"secret", mode=PRIVATE_MODE)
    assert path.stat().st_mode & 0o777 == PRIVATE_MODE
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "shown"),
    [(None, "engine"), (".engine.1/model.onnx", "engine"), ("tokenizer.json", "tokenizer.json")],
    ids=["none", "staged", "other"],
)
def test_an_error_names_what_the_user_asked_for(name: str | None, shown: str) -> None:
    with pytest.raises(OSError) as caught, naming(Path("engine"), staged=Path(".engine.1")):  # noqa: PT011
        raise OSError(errno.ENOSPC, "No space left on device", name)
    assert system_error_text(caught.value) == (
        f"`{shown}`: No space left on device; free space, or pass another place; nothing is left "
        "half-written"
    )


def test_a_file_that_is_refused_is_named_and_not_its_stage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_bytes(tmp_path / "none" / "file", b"")
    assert caught.value.filename == str(tmp_path / "none" / "file")


def test_a_folder_that_may_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may do all
    with pytest.raises(ConfigError, match="may not be written; pass another place to `--json`"):
        require_writable(tmp_path / "x.json", option="--json")
