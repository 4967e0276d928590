"""A stand-in for `cuda.bindings.driver`: device memory is host memory, a stream runs at once.

It records what was called and launched, and fails where a test says so. Where `defers`, work of a
stream runs as late as it may: when the host waits for it. What reads page-locked memory then finds
what the host has put there since.
"""
# ruff: noqa: N802, N815 - the names of the bindings

from __future__ import annotations

import collections
import ctypes
import types
from collections.abc import Callable
from typing import Any

SUCCESS, INVALID, OUT_OF_MEMORY = 0, 1, 2
CLUSTER, OVERLAP = 4, 6
"""Ids of launch attributes."""


class Function:
    """A loaded kernel: its argument struct tells how to read a launch."""

    def __init__(
        self,
        name: str,
        struct: type[ctypes.Structure] | None = None,
        run: Callable[[dict[str, Any]], None] = lambda args: None,
    ) -> None:
        self.name, self.struct, self.run = name, struct, run


class Launched:
    """One recorded launch, with a copy of its arguments."""

    def __init__(self, config: Any, function: Function, parameters: int) -> None:
        self.name = function.name
        self.grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self.threads = config.blockDimX
        self.shared_bytes = config.sharedMemBytes
        self.stream = config.hStream
        attributes = {attribute.id: attribute.value for attribute in config.attrs}
        assert config.numAttrs == len(attributes)
        self.overlaps = OVERLAP in attributes
        dim = attributes[CLUSTER].clusterDim if CLUSTER in attributes else None
        self.cluster = (dim.x, dim.y, dim.z) if dim else (1, 1, 1)
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        assert function.struct is not None
        assert address is not None
        block = function.struct.from_buffer_copy(
            ctypes.string_at(address, ctypes.sizeof(function.struct))
        )
        self.args = {name: getattr(block, name) for name, *_ in function.struct._fields_}


class FakeDriver:
    CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUlaunchAttributeID = types.SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=OVERLAP,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=CLUSTER,
    )

    def __init__(self, memory_bytes: int = 1 << 32) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.copied: dict[str, list[int]] = collections.defaultdict(list)
        self.failing: dict[str, int] = {}
        self.launches: list[Launched] = []
        self.blocks: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.contexts = 0
        self.pushed = 0
        self.streams = 0
        self.graphs = 0
        self.memory_bytes = memory_bytes
        self.recording: list[Callable[[], None]] | None = None
        self.defers = False
        self.waiting: collections.deque[Callable[[], None]] = collections.deque()
        self.num_put = 0
        self.places: dict[int, int] = {}
        self.events = 0
        self.is_profiling = False
        self.marks: dict[int, float] = {}
        self.clock_us = 0.0
        self.launch_us: Callable[[Launched], float] = lambda launched: 1.0

    def CUlaunchConfig(self) -> Any:
        return types.SimpleNamespace(numAttrs=0, attrs=[], hStream=None)

    def CUlaunchAttribute(self) -> Any:
        value = types.SimpleNamespace(clusterDim=types.SimpleNamespace())
        return types.SimpleNamespace(id=None, value=value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        method = getattr(type(self), f"_{name}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls[name] += 1
            if name.startswith("cuMemcpy"):
                self.copied[name].append(arguments[2])
            if self.failing.get(name, 0):
                self.failing[name] -= 1
                return (INVALID, None, None)
            result: tuple[Any, ...] = method(self, *arguments)
            return result

        return call

    def perform(self, work: Callable[[], None]) -> None:
        """Run work of a stream, or keep it; record it while a graph is captured."""
        if self.recording is not None:
            self.recording.append(work)
        elif self.defers:
            self.waiting.append(work)
            self.num_put += 1
        else:
            work()

    def run_until(self, place: int) -> None:
        """Run the work that was put on the stream before a place."""
        while self.num_put - len(self.waiting) < place:
            self.waiting.popleft()()

    def _cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return SUCCESS, ordinal

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.contexts += 1
        return SUCCESS, 77

    def _cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.contexts -= 1
        return (SUCCESS,)

    def _cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.pushed += 1
        return (SUCCESS,)

    def _cuCtxPopCurrent(self) -> tuple[Any, ...]:
        self.pushed -= 1
        return SUCCESS, 77

    def _cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return SUCCESS, 77

    def _cuProfilerStart(self) -> tuple[Any, ...]:
        self.is_profiling = True
        return (SUCCESS,)

    def _cuProfilerStop(self) -> tuple[Any, ...]:
        self.is_profiling = False
        return (SUCCESS,)

    def _used(self) -> int:
        return sum(ctypes.sizeof(block) for block in self.blocks.values())

    def _cuMemGetInfo(self) -> tuple[Any, ...]:
        return SUCCESS, self.memory_bytes - self._used(), self.memory_bytes

    def _allocate(self, num_bytes: int, where: dict[int, Any]) -> tuple[Any, ...]:
        block = (ctypes.c_uint8 * (num_bytes + 256))()
        address = -(-ctypes.addressof(block) // 256) * 256
        where[address] = block
        return SUCCESS, address

    def _cuMemAlloc(self, num_bytes: int) -> tuple[Any, ...]:
        if self._used() + num_bytes > self.memory_bytes:
            return OUT_OF_MEMORY, None
        return self._allocate(num_bytes, self.blocks)

    def _cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[Any, ...]:
        return self._allocate(num_bytes, self.pinned)

    def _cuMemFree(self, address: int) -> tuple[Any, ...]:
        del self.blocks[address]
        return (SUCCESS,)

    def _cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        del self.pinned[address]
        return (SUCCESS,)

    def _cuMemsetD8Async(self, target: int, value: int, count: int, stream: int) -> Any:
        self.perform(lambda: ctypes.memset(target, value, count) and None)
        return (SUCCESS,)

    def _copy(self, target: int, source: int, count: int, stream: int) -> tuple[Any, ...]:
        self.perform(lambda: ctypes.memmove(target, source, count) and None)
        return (SUCCESS,)

    _cuMemcpyHtoDAsync = _copy
    _cuMemcpyDtoHAsync = _copy
    _cuMemcpyDtoDAsync = _copy

    def _cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        self.events += 1
        return SUCCESS, self.events

    def _cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return (SUCCESS,)

    def _cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        assert self.recording is None
        self.marks[event] = self.clock_us
        self.places[event] = self.num_put
        return (SUCCESS,)

    def _cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        self.run_until(self.places[event])
        return (SUCCESS,)

    def _cuEventElapsedTime(self, begin: int, end: int) -> tuple[Any, ...]:
        return SUCCESS, (self.marks[end] - self.marks[begin]) / 1e3

    def _cuStreamCreate(self, flag: int) -> tuple[Any, ...]:
        self.streams += 1
        return SUCCESS, 5

    def _cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self.streams -= 1
        return (SUCCESS,)

    def _cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert self.recording is None
        self.run_until(self.num_put)
        return (SUCCESS,)

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        self.recording = []
        return (SUCCESS,)

    def _cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        recorded, self.recording = self.recording, None
        return SUCCESS, _Handle(recorded)

    def _cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        self.graphs += 1
        return SUCCESS, graph

    def _cuGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (SUCCESS,)

    def _cuGraphExecDestroy(self, graph: Any) -> tuple[Any, ...]:
        self.graphs -= 1
        return (SUCCESS,)

    def _cuGraphLaunch(self, graph: Any, stream: int) -> tuple[Any, ...]:
        for work in graph.works:
            self.perform(work)
        return (SUCCESS,)

    def _cuModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        return SUCCESS, code

    def _cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        return SUCCESS, Function(name.decode())

    def _cuFuncLoad(self, function: Function) -> tuple[Any, ...]:
        return (SUCCESS,)

    def _cuFuncSetAttribute(self, function: Function, which: int, value: int) -> tuple[Any, ...]:
        return (SUCCESS,)

    def _cuLaunchKernelEx(
        self, config: Any, function: Function, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        launched = Launched(config, function, parameters)
        self.launches.append(launched)

        def work() -> None:
            function.run(launched.args)
            self.clock_us += self.launch_us(launched)

        self.perform(work)
        return (SUCCESS,)


class _Handle:
    def __init__(self, works: list[Callable[[], None]] | None) -> None:
        self.works = works or []

    def __int__(self) -> int:
        return 1
