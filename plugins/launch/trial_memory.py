"""Device memory of trials: pools of random numbers, and operands that come and go."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import Device, Stream
from paged_trt.plugins.dtypes import DType

Array = npt.NDArray[Any]
_PATTERN_BYTES: Final = 2**23
_PATTERN_NUMBERS: Final = 2**22
_INT8_SPREAD: Final = 40.0


class TrialMemory:
    """Device memory of trials; the contents of the pools are random numbers of their type.

    Args:
        device: current while this is used.
        stream: of all copies.
        pool_bytes: of the keys, and of the values.
    """

    def __init__(self, device: Device, stream: Stream, *, pool_bytes: int) -> None:
        self.device, self.stream = device, stream
        self.pool_bytes = pool_bytes
        self.pools: list[int] = []
        self._filled: DType | None = None
        self._lent: list[int] = []
        self._pattern: tuple[DType, int] | None = None
        self._pinned = device.allocate_pinned(_PATTERN_BYTES)
        try:
            for what in ("keys", "values"):
                self.pools.append(device.allocate(pool_bytes, f"{what} of a trial"))
        except BaseException:
            self.close()
            raise

    def fill(self, kv: DType) -> None:
        """Random numbers of a type in both pools; a second call of a type does nothing."""
        if self._filled is kv:
            return
        numbers = np.random.default_rng(1).standard_normal(_PATTERN_NUMBERS, np.float32)
        pattern = (numbers * (_INT8_SPREAD if kv is DType.INT8 else 1.0)).astype(kv.numpy)
        self._pinned[: pattern.nbytes] = pattern.view(np.uint8)
        for pool in self.pools:
            done = min(pattern.nbytes, self.pool_bytes)
            self.stream.upload(pool, self._pinned.ctypes.data, done)
            self._repeat(pool, done, self.pool_bytes)
        self.stream.synchronize()
        self._filled = kv

    def random(self, dtype: DType, count: int, *, seed: int) -> int:
        """Address of `count` random numbers, until `release`.

        Args:
            dtype: an activation type.
            count: of numbers.
            seed: which stretch of the pattern comes first.
        """
        size = count * dtype.itemsize
        address = self.scratch(size, "an operand of a trial")
        # Quantised pools hold other numbers than activations: they have a pattern of their own.
        if self._pattern is None or self._pattern[0] is not dtype:
            if self._pattern is not None:
                self.device.free(self._pattern[1])
            numbers = np.random.default_rng(2).standard_normal(_PATTERN_NUMBERS, np.float32)
            data = numbers.astype(dtype.numpy)
            self._pattern = (dtype, self.device.allocate(data.nbytes, "random numbers"))
            self._send(self._pattern[1], data.view(np.uint8))
        pattern_bytes = _PATTERN_NUMBERS * dtype.itemsize
        start = seed % 16 * (pattern_bytes // 16)
        done = min(size, pattern_bytes - start)
        self.stream.copy(address, self._pattern[1] + start, done)
        self._repeat(address, done, size)
        return address

    def upload(self, array: Array) -> int:
        """Address of a copy of `array`, until `release`."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.scratch(data.nbytes, "an operand of a trial")
        self._send(address, data)
        return address

    def _send(self, address: int, data: Array) -> None:
        for start in range(0, data.nbytes, _PATTERN_BYTES):
            part = data[start : start + _PATTERN_BYTES]
            self._pinned[: part.nbytes] = part
            self.stream.upload(address + start, self._pinned.ctypes.data, part.nbytes)
            self.stream.synchronize()

    def download(self, address: int, num_bytes: int) -> Array:
        """`[num_bytes]` uint8, a copy of device memory; waits for the stream."""
        found = np.empty(num_bytes, np.uint8)
        for start in range(0, num_bytes, _PATTERN_BYTES):
            part = found[start : start + _PATTERN_BYTES]
            self.stream.download(self._pinned.ctypes.data, address + start, part.nbytes)
            self.stream.synchronize()
            part[:] = self._pinned[: part.nbytes]
        return found

    def _repeat(self, address: int, done: int, size: int) -> None:
        """Fill memory with copies of its first `done` bytes."""
        while done < size:
            part = min(done, size - done)
            self.stream.copy(address + done, address, part)
            done += part

    def scratch(self, num_bytes: int, what: str) -> int:
        """Address of uninitialized memory, until `release`."""
        address = self.device.allocate(max(1, num_bytes), what)
        self._lent.append(address)
        return address

    def release(self) -> None:
        """Free everything but the pools."""
        while self._lent:
            self.device.free(self._lent.pop())

    def close(self) -> None:
        """Free everything."""
        self.release()
        if self._pattern is not None:
            self.device.free(self._pattern[1])
            self._pattern = None
        while self.pools:
            self.device.free(self.pools.pop())
        self.device.free_pinned(self._pinned)


def pool_scale(kv: DType) -> float:
    """Scale under which what is read from a filled pool has about unit variance."""
    return 1.0 / _INT8_SPREAD if kv is DType.INT8 else 1.0
