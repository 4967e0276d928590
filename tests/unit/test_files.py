"""A file is written whole or not at all, whenever the writing ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged_trt.plugins.files import PRIVATE_MODE, write_bytes


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
