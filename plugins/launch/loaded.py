"""The kernels of a process: compiled and loaded when an engine is, looked up when it runs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from paged_trt.plugins import device
from paged_trt.plugins.errors import KernelError, KernelLaunchError
from paged_trt.plugins.launch.args import GatherArgs, PrefillArgs, PrefillSm90Args
from paged_trt.plugins.launch.compiler import KernelCompiler, compile_arch
from paged_trt.plugins.launch.gather import gather_build, gather_grid
from paged_trt.plugins.launch.kernels_decode import (
    ARGUMENTS,
    Grid,
    KernelBuild,
    kernel_build,
    kernel_grid,
)
from paged_trt.plugins.launch.kernels_prefill import prefill_build, prefill_grid
from paged_trt.plugins.launch.kernels_prefill_sm90 import prefill_sm90_build
from paged_trt.plugins.launch.plans import AttentionPlan, PrefillPlan
from paged_trt.plugins.launch.registry import SPECIALISED, KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest

ARGUMENT_STRUCTS: Final[Mapping[KernelPath, type[Any]]] = {
    **ARGUMENTS,
    KernelPath.PREFILL: PrefillArgs,
    KernelPath.PREFILL_SM90: PrefillSm90Args,
    KernelPath.PREFILL_SM90_SPLIT: PrefillSm90Args,
    KernelPath.GATHER: GatherArgs,
}
"""Argument struct of each path."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedKernel:
    """A kernel in one context.

    Attributes:
        key: what it was compiled for.
        build: how it is launched.
        function: the driver's handle.
    """

    key: KernelKey
    build: KernelBuild
    function: Any


class KernelRegistry(Protocol):
    """Finds loaded kernels."""

    def find(self, key: KernelKey) -> LoadedKernel:
        """The kernel of `key` in the current context; nothing is compiled.

        Raises:
            KernelLaunchError: it is not loaded; the message names the key.
        """


def build_of(key: KernelKey) -> KernelBuild:
    """The kernel of a key.

    Raises:
        UnsupportedError: no kernel covers its types or head dims.
    """
    if key.path in SPECIALISED:
        return prefill_sm90_build(key)
    if key.path is KernelPath.GATHER:
        return gather_build(key)
    return prefill_build(key) if key.path is KernelPath.PREFILL else kernel_build(key)


def grid_of(
    kernel: LoadedKernel,
    request: AttentionPlanRequest,
    *,
    partitions: int,
    plan: AttentionPlan | PrefillPlan,
) -> Grid:
    """Grid of one launch.

    Args:
        kernel: the kernel.
        request: the step.
        partitions: `plan_blocks` of a decode plan; 1 otherwise.
        plan: of the step; that of a prefill may say how many blocks there are.
    """
    key, step, num_kv_heads = kernel.key, request.step, request.attention.num_kv_heads
    if key.path in SPECIALISED and isinstance(plan, PrefillPlan):
        return (plan.blocks, 1, 1)
    if key.path is KernelPath.GATHER:
        return gather_grid(request)
    if key.path is KernelPath.PREFILL:
        return prefill_grid(key, step, num_kv_heads=num_kv_heads)
    return kernel_grid(key, kernel.build, step, num_kv_heads=num_kv_heads, partitions=partitions)


class DeviceKernels:
    """Loaded kernels by context and key.

    Args:
        compiler: makes machine code.
        load: from code, mangled name and dynamic shared memory to a handle in the current
            context.
        context: number of the current context.
    """

    def __init__(
        self,
        compiler: KernelCompiler | None = None,
        *,
        load: Callable[..., Any] = device.load_function,
        context: Callable[[], int] = device.context_id,
    ) -> None:
        self.compiler = compiler or KernelCompiler()
        self._load = load
        self._context = context
        self._kernels: dict[tuple[int, KernelKey], LoadedKernel] = {}
        self._functions: dict[tuple[int, KernelBuild, str], Any] = {}
        self._lock = threading.Lock()

    def warm(self, keys: Iterable[KernelKey]) -> None:
        """Compile and load kernels in the current context; those that are there stay.

        Args:
            keys: with the architecture of the current device.

        Raises:
            UnsupportedError: no kernel covers a key, or no compiler is installed.
            KernelError: a kernel did not compile or load.
        """
        context = self._context()
        with self._lock:
            for key in keys:
                if (context, key) not in self._kernels:
                    self._kernels[context, key] = self._make(key)

    def load(self, build: KernelBuild, arch: str) -> Any:
        """The handle of a kernel that no key names, in the current context.

        Args:
            build: the kernel.
            arch: architecture of the current device.

        Raises:
            UnsupportedError: no compiler is installed.
            KernelError: it did not compile or load.
        """
        place = (self._context(), build, arch)
        with self._lock:
            if place not in self._functions:
                self._functions[place] = self._function(build, arch)
            return self._functions[place]

    def find(self, key: KernelKey) -> LoadedKernel:
        """The kernel of `key` in the current context; nothing is compiled.

        Raises:
            KernelLaunchError: it is not loaded.
        """
        kernel = self._kernels.get((self._context(), key)) if self._kernels else None
        if kernel is None:
            raise KernelLaunchError(
                f"no kernel for {key}: kernels are loaded with the engine and never while it "
                "runs; load the engine with `paged_trt.runtime.engine.load_engine`"
            )
        return kernel

    def _make(self, key: KernelKey) -> LoadedKernel:
        if key.arch is None:
            raise KernelError(
                f"{key}: a kernel is compiled for one architecture, and none is named"
            )
        build = build_of(key)
        return LoadedKernel(key=key, build=build, function=self._function(build, key.arch))

    def _function(self, build: KernelBuild, arch: str) -> Any:
        cubin = self.compiler.compile(build.source, build.name_expression, arch=compile_arch(arch))
        name = cubin.names[build.name_expression]
        return self._load(cubin.code, name, shared_bytes=build.shared_bytes)


KERNELS: Final = DeviceKernels()
"""The kernels of this process: TensorRT makes plugins on its own, so no caller can hand one in."""
