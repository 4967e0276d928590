"""Commands in which TensorRT, NVRTC or our own code fails: `python error_child.py CASE WORD...`.

Each case breaks one function of ours and then runs the command line; what TensorRT and NVRTC say
about it is their own. A process each, for TensorRT may end it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from fake_driver import FakeDriver, Function

from paged_trt.scripts.cli import end, main


@contextlib.contextmanager
def no_creator() -> Iterator[None]:
    from paged_trt.plugins import creator

    with mock.patch.object(creator, "register"):
        yield


@contextlib.contextmanager
def profiles_upside_down() -> Iterator[None]:
    from paged_trt.builder import engine

    original = engine.make_profiles

    def upside_down(*arguments: Any) -> Any:
        return tuple(
            dataclasses.replace(
                profile,
                shapes={
                    name: three if "pool" in name else three[::-1]
                    for name, three in profile.shapes.items()
                },
            )
            for profile in original(*arguments)
        )

    with mock.patch.object(engine, "make_profiles", upside_down):
        yield


@contextlib.contextmanager
def no_formats() -> Iterator[None]:
    """Only the log: RTX 1.6 and 1.7 end the process where a plugin supports no format."""
    from paged_trt.builder import engine
    from paged_trt.plugins.tensorrt_messages import TRANSLATIONS

    (line,) = (each.example for each in TRANSLATIONS if each.code == "PTRT-T004")

    def serialize(self: Any, listener: Any) -> bytes:
        self._lines.warnings.append(line)
        raise self._error("TensorRT built no engine")

    with mock.patch.object(engine._Session, "serialize", serialize):
        yield


@contextlib.contextmanager
def no_parse() -> Iterator[None]:
    """One node more is expected than the model has."""
    from paged_trt.builder import engine

    original = engine._Session.parse

    def parse(self: Any, path: Path, *, num_nodes: int) -> None:
        original(self, path, num_nodes=num_nodes + 1)

    with mock.patch.object(engine._Session, "parse", parse):
        yield


@contextlib.contextmanager
def cancelled() -> Iterator[None]:
    from paged_trt.builder import engine
    from paged_trt.plugins.errors import BuildCancelledError

    error = BuildCancelledError("the build was stopped; nothing was written")
    with mock.patch.object(engine._Session, "serialize", side_effect=error):
        yield


@contextlib.contextmanager
def no_onnxruntime() -> Iterator[None]:
    with mock.patch.dict(sys.modules, {"onnxruntime": None}):
        yield


@contextlib.contextmanager
def a_device(*, warm: bool = False, arch: str = "sm_80") -> Iterator[None]:
    """As if there were one; TensorRT, which is not asked about it, is the real one."""
    from paged_trt.plugins.device import Device
    from paged_trt.runtime import tensorrt_loader

    device = Device(0, driver=FakeDriver())
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(tensorrt_loader.cuda, "device_arch", lambda *_: arch))
        stack.enter_context(patch(tensorrt_loader, "kept_device", lambda _: device))
        if not warm:
            for name in ("warm_kernels", "load_sampling_kernel", "load_token_kernel"):
                stack.enter_context(patch(tensorrt_loader, name))
        yield


@contextlib.contextmanager
def kernels(*, source: str | None = None, loads: bool = True) -> Iterator[None]:
    """A device whose driver loads no code, or a kernel source that is none."""
    from paged_trt.plugins import device
    from paged_trt.plugins.launch import compiler, loaded
    from paged_trt.runtime import tensorrt_loader

    driver = FakeDriver()
    if not loads:
        driver.failing["cuModuleLoadData"] = 1

    def load(*arguments: Any, **keywords: Any) -> Any:
        return device.load_function(*arguments, **keywords, driver=driver)

    def compile_source(self: Any, source: str, name: str, *, arch: str) -> Any:
        return compiler.cuda.compile_cubin("no kernel at all", arch=arch, name_expressions=[name])

    registry = loaded.DeviceKernels(load=load, context=lambda: 1)
    with a_device(warm=True), mock.patch.object(tensorrt_loader, "KERNELS", registry):
        if source is None:
            yield
            return
        with mock.patch.object(compiler.KernelCompiler, "compile", compile_source):
            yield


@contextlib.contextmanager
def no_launch() -> Iterator[None]:
    """`tune` on a device that is there and launches nothing."""
    from paged_trt.plugins.device import Device, KernelLaunch
    from paged_trt.plugins.launch.loaded import ARGUMENT_STRUCTS, LoadedKernel, build_of
    from paged_trt.plugins.launch.tuned import TuningTarget
    from paged_trt.scripts import tune, tune_device

    class Kernels:
        def find(self, key: Any) -> LoadedKernel:
            function = Function(key.path.value, ARGUMENT_STRUCTS[key.path])
            return LoadedKernel(key=key, build=build_of(key), function=function)

        def warm(self, keys: Any) -> None:
            list(keys)

    target = TuningTarget(
        gpu="none",
        arch="sm_80",
        num_multiprocessors=8,
        driver="1",
        kernels="0" * 64,
        compiler="13.0",
    )
    driver = FakeDriver(memory_bytes=1 << 26)
    driver.failing["cuLaunchKernelEx"] = 1_000
    source = functools.partial(
        tune_device.timing_source,
        device=Device(driver=driver),
        kernels=Kernels(),  # type: ignore[arg-type]
        make_launch=functools.partial(KernelLaunch, driver=driver),
    )
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_result(None)
    with (
        mock.patch.object(tune, "tuning_target", return_value=target),
        mock.patch.object(tune, "start_compiling", return_value=done),
        mock.patch.object(tune_device, "timing_source", source),
    ):
        yield


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    yield


@contextlib.contextmanager
def pages_are_held() -> Iterator[None]:
    """Somebody else holds the pages: a pool is never smaller than its sequences need."""
    from paged_trt.runtime import batch

    original = batch.Batch.__init__

    def held(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        self.registry.allocate(self.registry.num_free)

    with mock.patch.object(batch.Batch, "__init__", held):
        yield


@contextlib.contextmanager
def raises(error: BaseException) -> Iterator[None]:
    from paged_trt.scripts import run

    with mock.patch.object(run, "load_engine", side_effect=error):
        yield


CASES: dict[str, Callable[[], Any]] = {
    "no_creator": no_creator,
    "profiles_upside_down": profiles_upside_down,
    "no_formats": no_formats,
    "no_parse": no_parse,
    "cancelled": cancelled,
    "no_onnxruntime": no_onnxruntime,
    "a_device": a_device,
    "no_kernel_loads": lambda: kernels(loads=False),
    "no_kernel_compiles": lambda: kernels(source="no kernel at all"),
    "an_old_device": lambda: a_device(arch="sm_75"),
    "no_launch": no_launch,
    "pages_are_held": pages_are_held,
    "small_files": small_files,
    "no_space": lambda: raises(OSError(28, "No space left on device")),
    "no_memory": lambda: raises(MemoryError()),
    "interrupted": lambda: raises(KeyboardInterrupt()),
}

if __name__ == "__main__":
    case, *words = sys.argv[1:]
    with CASES[case]():
        code = main(words)
    end(code)
