"""The kernel cache, with real compiles: hits, keys, damage, locks and directories."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from paged_trt.plugins import cuda
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import KernelCompileError, KernelError, KernelLaunchError
from paged_trt.plugins.launch import compiler
from paged_trt.plugins.launch.compiler import KernelCompiler, cache_directory, compile_arch
from paged_trt.plugins.launch.loaded import DeviceKernels
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY, closure_sha256

ARCH = "sm_80"
NAME = "fill<3>"


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "fill.cu").write_text(
        '#include "value.cuh"\n'
        "template <int N> __global__ void fill(int* out) { out[0] = N + VALUE; }\n"
    )
    (folder / "value.cuh").write_text("#define VALUE 1\n")
    (folder / "other.cuh").write_text("#define OTHER 1\n")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def compile_once(cache: Path, kernels: Path, *, arch: str = ARCH, name: str = NAME) -> bool:
    """Compile with a new compiler, as a new process would; True where NVRTC ran."""
    made = KernelCompiler(cache, kernels=kernels)
    cubin = made.compile("fill.cu", name, arch=arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.names[name].encode() in cubin.code
    assert made.num_compiled + made.num_cached == 1
    return made.num_compiled == 1


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.cubin"))


def test_the_second_compile_is_read_from_disk(cache: Path, kernels: Path) -> None:
    assert compile_once(cache, kernels)
    assert not compile_once(cache, kernels)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in cache.iterdir()} <= {".cubin", ".lock"}


@pytest.mark.parametrize("change", ["source", "header", "arch", "name", "nvrtc", "options"])
def test_everything_that_the_code_depends_on_is_in_the_key(
    change: str, cache: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_once(cache, kernels)
    arch, name = ARCH, NAME
    if change in ("source", "header"):
        path = kernels / ("fill.cu" if change == "source" else "value.cuh")
        path.write_text(path.read_text() + "// longer\n")
    elif change == "nvrtc":
        monkeypatch.setattr(cuda, "nvrtc_version", lambda: "99.0")
    elif change == "options":
        monkeypatch.setattr(cuda, "COMPILE_STANDARD", "c++20")
    elif change == "arch":
        arch = "sm_86"
    else:
        name = "fill<4>"
    assert compile_once(cache, kernels, arch=arch, name=name)
    assert len(entries(cache)) == 2


def test_a_header_that_is_not_included_changes_nothing(cache: Path, kernels: Path) -> None:
    compile_once(cache, kernels)
    (kernels / "other.cuh").write_text("#define OTHER 22\n")
    assert not compile_once(cache, kernels)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_damaged_entry_is_compiled_again(damage: str, cache: Path, kernels: Path) -> None:
    compile_once(cache, kernels)
    (path,) = entries(cache)
    good = path.read_bytes()
    flipped = good[:-9] + bytes([good[-9] ^ 1]) + good[-8:]
    bad = {"truncated": good[:-100], "flipped": flipped, "empty": b"", "text": b"no cubin\n{}\n"}
    path.write_bytes(bad[damage])
    assert compile_once(cache, kernels)
    assert path.read_bytes() == good
    assert not compile_once(cache, kernels)


def test_a_cache_that_cannot_be_written_is_said_once(
    tmp_path: Path, kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    made = KernelCompiler(tmp_path / "file" / "cache", kernels=kernels)
    with caplog.at_level(logging.WARNING, "paged_trt"):
        for name in ("fill<1>", "fill<2>"):
            assert made.compile("fill.cu", name, arch=ARCH).code
    (record,) = caplog.records
    assert "PAGED_TRT_CACHE_DIR" in record.getMessage()
    assert made.num_compiled == 2


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")
@pytest.mark.parametrize("problem", ["mode", "owner"])
def test_machine_code_that_others_may_write_is_not_run(
    problem: str,
    cache: Path,
    kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compile_once(cache, kernels)
    if problem == "mode":
        cache.chmod(0o1777)
    elif os.geteuid() == 0:
        os.chown(cache, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with caplog.at_level(logging.WARNING, "paged_trt"):
        assert compile_once(cache, kernels)
    assert f"other users may write {cache}" in caplog.records[0].getMessage()


def test_a_kernel_that_does_not_compile_leaves_no_entry(cache: Path, kernels: Path) -> None:
    (kernels / "fill.cu").write_text("this is no C++\n")
    with pytest.raises(KernelCompileError, match="NVRTC refused"):
        KernelCompiler(cache, kernels=kernels).compile("fill.cu", NAME, arch=ARCH)
    assert entries(cache) == []


def test_one_process_compiles_while_the_other_waits(cache: Path, kernels: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from paged_trt.plugins.launch.compiler import KernelCompiler\n"
        "made = KernelCompiler(pathlib.Path(sys.argv[1]), kernels=pathlib.Path(sys.argv[2]))\n"
        f"made.compile('fill.cu', {NAME!r}, arch={ARCH!r})\n"
        "print(made.num_compiled)\n"
    )
    command = [sys.executable, "-c", code, str(cache), str(kernels)]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=None) for _ in range(3)
    ]
    outputs = [child.communicate()[0] for child in children]
    assert all(child.returncode == 0 for child in children)
    assert sorted(int(output) for output in outputs) == [0, 0, 1]


def test_a_lock_that_is_never_free_does_not_stop_the_load(
    cache: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_once(cache, kernels)
    (path,) = entries(cache)
    path.unlink()
    monkeypatch.setattr(compiler, "LOCK_SECONDS", 0.1)
    with filelock.FileLock(path.with_suffix(".lock")):
        assert compile_once(cache, kernels)


def test_the_directory_follows_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PAGED_TRT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache" / "paged-trt" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "paged-trt" / "kernels"
    monkeypatch.setenv("PAGED_TRT_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


def test_closures_reach_cudas_own_headers(tmp_path: Path) -> None:
    """A kernel that includes `<cuda_fp16.h>` depends on the version of that header."""
    headers = tmp_path / "include"
    headers.mkdir()
    copy = tmp_path / "kernels"
    shutil.copytree(KERNEL_DIRECTORY, copy)
    hashes = []
    for text in ("1", "22"):
        (headers / "cuda_fp16.h").write_text(text)
        hashes.append(closure_sha256("append.cu", (copy, headers)))
    assert hashes[0] != hashes[1]


def test_device_architectures_compile_with_their_own_instructions() -> None:
    assert compile_arch("sm_90") == "sm_90a"
    assert compile_arch("sm_86") == "sm_86"


def key(path: KernelPath = KernelPath.MERGE, arch: str | None = "sm_90") -> KernelKey:
    return KernelKey(
        path=path,
        arch=arch,
        activation_dtype=DType.FLOAT16,
        kv_cache_dtype=DType.FLOAT16,
        head_dim=64,
        value_head_dim=64,
        group_size=2,
    )


def test_kernels_are_loaded_once_per_context(cache: Path) -> None:
    loads: list[str] = []
    context = [1]

    def load(code: bytes, name: str, *, shared_bytes: int) -> str:
        assert name.encode() in code
        assert shared_bytes == 0
        loads.append(name)
        return f"function {len(loads)}"

    found = DeviceKernels(KernelCompiler(cache), load=load, context=lambda: context[0])
    with pytest.raises(KernelLaunchError, match=r"no kernel for merge float16.*never while it"):
        found.find(key())
    found.warm([key()])
    found.warm([key()])
    assert len(loads) == 1
    assert found.find(key()).function == "function 1"
    context[0] = 2
    with pytest.raises(KernelLaunchError):
        found.find(key())
    found.warm([key()])
    assert found.find(key()).function == "function 2"
    assert (found.compiler.num_compiled, found.compiler.num_cached) == (1, 1)


def test_a_kernel_needs_an_architecture(cache: Path) -> None:
    found = DeviceKernels(KernelCompiler(cache), context=lambda: 1)
    with pytest.raises(KernelError, match="one architecture, and none is named"):
        found.warm([key(arch=None)])


KEPT_ERROR = """
import gc
from paged_trt.plugins import cuda
from paged_trt.plugins.errors import KernelCompileError

def fail():
    try:
        cuda.compile_cubin("no kernel", arch="sm_80")
    except KernelCompileError as error:
        kept = error.__cause__  # frame -> error -> traceback -> frame

fail()
gc.collect()
"""


def test_a_kept_error_frees_its_program_quietly() -> None:
    """cuda-core's program prints a traceback where the garbage collector takes it apart."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT_ERROR], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
