"""One CUDA device: its primary context, memory, streams, graphs, kernels.

Every object takes the driver module, `cuda.driver()` where none is given; tests bring their own.
Handles and addresses are ints.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins import cuda
from paged_trt.plugins.cuda import check
from paged_trt.plugins.errors import ExecutionError, KernelError, KernelLaunchError

Grid = tuple[int, int, int]


class Device:
    """The primary context of a device, the one that TensorRT and torch use; retained.

    Args:
        ordinal: number of the device.
        driver: module of driver calls.

    Attributes:
        ordinal: number of the device.
        driver: module of driver calls.

    Raises:
        ExecutionError: the context cannot be made.
    """

    def __init__(self, ordinal: int = 0, *, driver: Any = None) -> None:
        self.driver: Any = cuda.driver() if driver is None else driver
        self.ordinal = ordinal
        self._handle = check(self.driver.cuDeviceGet(ordinal), "cuDeviceGet")
        self._context: Any = check(
            self.driver.cuDevicePrimaryCtxRetain(self._handle), "cuDevicePrimaryCtxRetain"
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current; the caller's context is current again afterwards."""
        check(self.driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            check(self.driver.cuCtxPopCurrent(), "cuCtxPopCurrent")

    @contextlib.contextmanager
    def current_to_the_end(self) -> Iterator[None]:
        """As `current`, also while objects go that an error leaves in the functions it passed.

        TensorRT calls CUDA's runtime. In a thread where no context is current, that makes the
        device's own one current, and the caller's thread would keep it.
        """
        with self.current():
            try:
                yield
            except BaseException as error:
                # Otherwise they go when the error does.
                traceback.clear_frames(error.__traceback__)
                raise

    def free_bytes(self) -> int:
        """Free memory of the current device."""
        free, _ = check(self.driver.cuMemGetInfo(), "cuMemGetInfo")
        return int(free)

    def allocate(self, num_bytes: int, what: str) -> int:
        """Address of device memory.

        Args:
            num_bytes: at least 1.
            what: what it holds, for the message.

        Raises:
            ExecutionError: there is too little memory.
        """
        error, address = self.driver.cuMemAlloc(num_bytes)
        if int(error):
            raise ExecutionError(
                f"the device has no {num_bytes:,} bytes for {what} ({_name(error)}), "
                f"{self.free_bytes():,} are free; end other processes, or build with fewer pages"
            )
        return int(address)

    def free(self, address: int) -> None:
        """Give device memory back."""
        check(self.driver.cuMemFree(address), "cuMemFree")

    def allocate_pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, `[num_bytes]` uint8; lives until `free_pinned`.

        Raises:
            ExecutionError: there is too little memory.
        """
        address = check(
            self.driver.cuMemHostAlloc(num_bytes, 0), f"cuMemHostAlloc of {num_bytes:,} bytes"
        )
        block = (ctypes.c_uint8 * num_bytes).from_address(int(address))
        return np.ctypeslib.as_array(block)

    def free_pinned(self, array: npt.NDArray[np.uint8]) -> None:
        """Give page-locked memory back; no view of it may be used afterwards."""
        check(self.driver.cuMemFreeHost(array.ctypes.data), "cuMemFreeHost")


@functools.cache
def kept_device(ordinal: int) -> Device:
    """A device whose context the process keeps, because its loaded kernels live there.

    Raises:
        UnsupportedError: there is no driver.
        ExecutionError: the context cannot be made.
    """
    return Device(ordinal)


class Stream:
    """A stream of the current context that does not wait for the default stream.

    Args:
        driver: module of driver calls.

    Attributes:
        handle: the stream.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        flag = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._stream: Any = check(driver.cuStreamCreate(flag), "cuStreamCreate")
        self.handle = int(self._stream)

    def upload(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from page-locked memory to the device."""
        check(
            self._driver.cuMemcpyHtoDAsync(target, source, num_bytes, self._stream),
            "cuMemcpyHtoDAsync",
        )

    def download(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from the device to page-locked memory."""
        check(
            self._driver.cuMemcpyDtoHAsync(target, source, num_bytes, self._stream),
            "cuMemcpyDtoHAsync",
        )

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy within the device."""
        check(
            self._driver.cuMemcpyDtoDAsync(target, source, num_bytes, self._stream),
            "cuMemcpyDtoDAsync",
        )

    def fill(self, target: int, num_bytes: int, *, byte: int) -> None:
        """Set every byte of device memory."""
        check(
            self._driver.cuMemsetD8Async(target, byte, num_bytes, self._stream), "cuMemsetD8Async"
        )

    def synchronize(self) -> None:
        """Wait for everything on the stream.

        Raises:
            ExecutionError: something on the stream failed.
        """
        check(self._driver.cuStreamSynchronize(self._stream), "cuStreamSynchronize")

    def capture(self, record: Callable[[], None]) -> Graph:
        """The graph of what `record` puts on the stream; nothing of it runs.

        Raises:
            ExecutionError: the work cannot be captured; the stream is usable again.
            Exception: what `record` raised.
        """
        driver, stream = self._driver, self._stream
        # Other threads, such as a compiler of TensorRT's own, may go on with their calls.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        try:
            record()
        except BaseException:
            _, graph = driver.cuStreamEndCapture(stream)
            if graph is not None and int(graph):
                driver.cuGraphDestroy(graph)
            raise
        graph = check(driver.cuStreamEndCapture(stream), "cuStreamEndCapture")
        try:
            return Graph(driver, check(driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate"))
        finally:
            check(driver.cuGraphDestroy(graph), "cuGraphDestroy")

    def launch(self, graph: Graph) -> None:
        """Replay a graph."""
        check(self._driver.cuGraphLaunch(graph.executable, self._stream), "cuGraphLaunch")

    def close(self) -> None:
        """Destroy the stream; a second call does nothing."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            check(self._driver.cuStreamDestroy(stream), "cuStreamDestroy")


class Event:
    """A place in the work of a stream that the host can wait for; it takes no times.

    Args:
        driver: module of driver calls.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        flag = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._event: Any = check(driver.cuEventCreate(flag), "cuEventCreate")

    def record(self, stream: Stream) -> None:
        """Mark the end of what is on a stream now."""
        check(self._driver.cuEventRecord(self._event, stream.handle), "cuEventRecord")

    def synchronize(self) -> None:
        """Wait for what was marked last.

        Raises:
            ExecutionError: something before it failed.
        """
        check(self._driver.cuEventSynchronize(self._event), "cuEventSynchronize")

    def close(self) -> None:
        """Destroy the event; a second call does nothing."""
        if self._event is not None:
            event, self._event = self._event, None
            check(self._driver.cuEventDestroy(event), "cuEventDestroy")


class Graph:
    """An executable graph.

    Args:
        driver: module of driver calls.
        executable: the instantiated graph.
    """

    def __init__(self, driver: Any, executable: Any) -> None:
        self._driver = driver
        self.executable: Any = executable

    def close(self) -> None:
        """Destroy the graph; a second call does nothing."""
        if self.executable is not None:
            executable, self.executable = self.executable, None
            check(self._driver.cuGraphExecDestroy(executable), "cuGraphExecDestroy")


def load_function(code: bytes, name: str, *, shared_bytes: int, driver: Any = None) -> Any:
    """A kernel of a cubin in the current context; its module stays loaded.

    Args:
        code: the cubin.
        name: mangled name.
        shared_bytes: dynamic shared memory that a launch will ask for.
        driver: module of driver calls.

    Raises:
        KernelError: the driver refused the code, or the device has not enough shared memory.
    """
    module = cuda.driver() if driver is None else driver
    try:
        loaded = check(module.cuModuleLoadData(code), "cuModuleLoadData")
        function = check(module.cuModuleGetFunction(loaded, name.encode()), "cuModuleGetFunction")
        # By default the driver loads the code at the first launch: in a step, from its memory.
        check(module.cuFuncLoad(function), "cuFuncLoad")
        # Static shared memory of the kernel counts too: near the default limit the sum passes it.
        if shared_bytes:
            limit = module.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(
                module.cuFuncSetAttribute(function, limit, shared_bytes),
                f"cuFuncSetAttribute of {shared_bytes:,} bytes of shared memory",
            )
    except ExecutionError as error:
        raise KernelError(f"kernel `{name}` cannot be loaded: {error}") from error
    return function


def context_id(driver: Any = None) -> int:
    """Number of the current context, 0 where none is."""
    module = cuda.driver() if driver is None else driver
    return int(check(module.cuCtxGetCurrent(), "cuCtxGetCurrent"))


class KernelLaunch:
    """One launch with everything but the stream fixed: a call is one driver call.

    Args:
        function: the kernel.
        block: argument struct, passed by value; its contents at the call count.
        grid: blocks.
        threads: of a block.
        shared_bytes: dynamic shared memory of a block.
        overlaps: start while the kernel ahead on the stream is ending (programmatic dependent
            launch); the kernel waits for it before it reads what that one wrote.
        cluster: blocks of a thread block cluster, along x; 1: none.
        driver: module of driver calls.
        label: the kernel, for messages.
    """

    __slots__ = ("_arguments", "_block", "_call", "_config", "_label", "_parameters", "_stream")

    def __init__(
        self,
        function: Any,
        block: ctypes.Structure,
        *,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        overlaps: bool,
        label: str,
        cluster: int = 1,
        driver: Any = None,
    ) -> None:
        module = cuda.driver() if driver is None else driver
        self._label = label
        self._block = block
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        self._call: Any = module.cuLaunchKernelEx
        self._config: Any = module.CUlaunchConfig()
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        attributes = launch_attributes(module, overlaps=overlaps, cluster=cluster)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        self._arguments = (config, function, ctypes.addressof(self._parameters), 0)
        self._stream: int | None = None

    def __call__(self, stream: int) -> None:
        """Launch on a stream.

        Raises:
            KernelLaunchError: the driver refused.
        """
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        error = self._call(*self._arguments)[0]
        if error:
            raise KernelLaunchError(f"{self._label} did not launch: {_name(error)}")


def launch_attributes(module: Any, *, overlaps: bool, cluster: int) -> list[Any]:
    """Attributes of a launch, as in `KernelLaunch`."""
    kind = module.CUlaunchAttributeID
    attributes = []
    if overlaps:
        attribute = module.CUlaunchAttribute()
        attribute.id = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster > 1:
        attribute = module.CUlaunchAttribute()
        attribute.id = kind.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = cluster, 1, 1
        attributes.append(attribute)
    return attributes


def _name(error: Any) -> str:
    return str(getattr(error, "name", error))
