"""The file of TensorRT-RTX's compiled kernels: kept, trusted, damaged, refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paged_trt.runtime.jit_cache import JitCache

KEY = ("plan", "tensorrt_rtx", "1.6.1", "sm_90")


class Kernels:
    """What a runtime cache of RTX does with bytes; those of another device are refused."""

    def __init__(self) -> None:
        self.held = b""

    def serialize(self) -> bytes:
        return self.held

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(b"another device"):
            return False
        self.held = bytes(data)
        return True


class Settings:
    attached: Kernels | None = None

    def create_runtime_cache(self) -> Kernels:
        return Kernels()

    def set_runtime_cache(self, kernels: Kernels) -> None:
        self.attached = kernels


class Engine:
    def create_runtime_config(self) -> Settings:
        return Settings()


def opened(directory: Path, key: tuple[str, ...] = KEY) -> tuple[JitCache, Kernels]:
    cache = JitCache(Engine(), key, directory=directory)
    settings = Settings()
    cache.attach(settings)
    assert settings.attached is not None
    return cache, settings.attached


def test_the_next_process_has_what_this_one_compiled(tmp_path: Path) -> None:
    cache, kernels = opened(tmp_path / "cache")
    assert not cache.was_found
    kernels.held = b"machine code"
    cache.save()
    again, found = opened(tmp_path / "cache")
    assert again.was_found
    assert found.held == b"machine code"
    other, nothing = opened(tmp_path / "cache", ("another plan", *KEY[1:]))
    assert not other.was_found
    assert nothing.held == b""


def test_a_cache_that_did_not_grow_is_not_written_again(tmp_path: Path) -> None:
    cache, kernels = opened(tmp_path)
    kernels.held = b"machine code"
    cache.save()
    (file,) = tmp_path.glob("*.rtx")
    file.unlink()
    cache.save()
    assert not file.exists()
    kernels.held += b", and more"
    cache.save()
    assert file.exists()


@pytest.mark.parametrize("damage", [b"", b"no hash", b"0" * 64 + b"\nmachine code"])
def test_a_damaged_file_is_not_given_to_rtx_and_replaced(tmp_path: Path, damage: bytes) -> None:
    cache, kernels = opened(tmp_path)
    kernels.held = b"machine code"
    cache.save()
    (file,) = tmp_path.glob("*.rtx")
    file.write_bytes(damage)
    again, found = opened(tmp_path)
    assert not again.was_found
    assert found.held == b""
    found.held = b"machine code"
    again.save()
    assert opened(tmp_path)[0].was_found


def test_kernels_of_another_device_are_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, kernels = opened(tmp_path)
    kernels.held = b"another device's code"
    cache.save()
    with caplog.at_level(logging.INFO, logger="paged_trt"):
        again, _ = opened(tmp_path)
    assert not again.was_found
    assert "of another device or driver" in caplog.text


def test_a_cache_that_rtx_cannot_read_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, kernels = opened(tmp_path)
    kernels.held = b"machine code"
    cache.save()

    def refuse(self: Kernels, data: bytes) -> bool:
        raise RuntimeError("bad format")

    with monkeypatch.context() as patch:
        patch.setattr(Kernels, "deserialize", refuse)
        again, found = opened(tmp_path)
    assert not again.was_found
    assert caplog.text.count("bad format") == 1
    found.held = b"newer code"
    again.save()
    assert opened(tmp_path)[1].held == b"newer code"


def test_a_directory_that_others_may_write_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, kernels = opened(tmp_path)
    kernels.held = b"machine code"
    cache.save()
    tmp_path.chmod(0o777)
    again, found = opened(tmp_path)
    assert not again.was_found
    assert found.held == b""
    assert "other users may write" in caplog.text
    found.held = b"new code"
    again.save()
    tmp_path.chmod(0o700)
    assert opened(tmp_path)[1].held == b"machine code"


@pytest.mark.parametrize("problem", [RuntimeError("no device"), OSError("disk full")])
def test_a_cache_that_cannot_be_kept_costs_one_line_and_no_step(
    problem: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache, kernels = opened(tmp_path)

    def fail() -> bytes:
        raise problem

    monkeypatch.setattr(kernels, "serialize", fail)
    cache.save()
    cache.save()
    assert caplog.text.count(str(problem)) == 1
    assert list(tmp_path.iterdir()) == []


def test_full_tensorrt_has_no_such_cache(tmp_path: Path) -> None:
    class Plain:
        def create_runtime_config(self) -> object:
            return object()

    cache = JitCache(Plain(), KEY, directory=tmp_path)
    cache.attach(object())
    cache.save()
    assert not cache.was_found
    assert list(tmp_path.iterdir()) == []
