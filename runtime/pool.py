"""Device memory of an executor: allocated at load, freed at close, never in between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import Device, Stream
from paged_trt.plugins.tensors import EngineSpec, key_pool_name, value_pool_name

ALIGNMENT: Final = 256
"""Of every address that TensorRT gets, bytes."""


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class DeviceArena:
    """Every allocation of one executor.

    Args:
        device: current while the arena is used.

    Attributes:
        num_allocations: calls that reached the driver, device and page-locked.
        num_bytes: device bytes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._addresses: list[int] = []
        self._pinned: list[npt.NDArray[np.uint8]] = []
        self.num_allocations = 0
        self.num_bytes = 0

    def allocate(self, num_bytes: int, what: str) -> int:
        """Address of device memory.

        Raises:
            ExecutionError: there is too little memory.
        """
        address = self._device.allocate(num_bytes, what)
        self._addresses.append(address)
        self.num_allocations += 1
        self.num_bytes += num_bytes
        return address

    def allocate_pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked memory, `[num_bytes]` uint8.

        Raises:
            ExecutionError: there is too little memory.
        """
        array = self._device.allocate_pinned(num_bytes)
        self._pinned.append(array)
        self.num_allocations += 1
        return array

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        while self._addresses:
            self._device.free(self._addresses.pop())
        while self._pinned:
            self._device.free_pinned(self._pinned.pop())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """Where the pools of a layer lie in its allocation.

    Attributes:
        key_name: input that holds the keys.
        value_name: input that holds the values.
        value_offset: bytes from the keys to the values. Where both pools have one shape it is
            their size, so that value page ids follow key page ids in the combined view.
        num_bytes: of both.
    """

    key_name: str
    value_name: str
    value_offset: int
    num_bytes: int


def layer_pools(spec: EngineSpec) -> tuple[LayerPool, ...]:
    """The allocation of each layer."""
    sizes = {
        pool.name: math.prod(int(dim) for dim in pool.dims) * pool.dtype.itemsize
        for pool in spec.pools()
    }
    layers = []
    for index in range(len(spec.layers)):
        key, value = key_pool_name(index), value_pool_name(index)
        offset = aligned(sizes[key])
        layers.append(
            LayerPool(
                key_name=key,
                value_name=value,
                value_offset=offset,
                num_bytes=offset + sizes[value],
            )
        )
    return tuple(layers)


Addresses = Mapping[str, int]
"""Address of each pool input, by its name."""


def copy_pages(
    spec: EngineSpec, pools: Addresses, pages: Sequence[tuple[int, int]], stream: Stream
) -> None:
    """Copy keys and values of whole pages, `(source, target)`, in every layer."""
    for base, num_bytes in _pages_of_pools(spec, pools):
        for source, target in pages:
            stream.copy(base + target * num_bytes, base + source * num_bytes, num_bytes)


def poison_pages(
    spec: EngineSpec, pools: Addresses, page_ids: Sequence[int], stream: Stream
) -> None:
    """Fill pages with bytes of 0xFF in every layer."""
    for base, num_bytes in _pages_of_pools(spec, pools):
        for page_id in page_ids:
            stream.fill(base + page_id * num_bytes, num_bytes, byte=0xFF)


def _pages_of_pools(spec: EngineSpec, pools: Addresses) -> list[tuple[int, int]]:
    """Address of each pool, and bytes of one of its pages."""
    return [
        (pools[pool.name], math.prod(int(dim) for dim in pool.dims[1:]) * pool.dtype.itemsize)
        for pool in spec.pools()
    ]


def allocate_pools(arena: DeviceArena, spec: EngineSpec, stream: Stream) -> Addresses:
    """Allocate the pools of all layers, zero, and give the address of each pool input.

    Raises:
        ExecutionError: there is too little memory.
    """
    addresses = {}
    for index, layer in enumerate(layer_pools(spec)):
        base = arena.allocate(layer.num_bytes, f"the KV pools of layer {index}")
        stream.fill(base, layer.num_bytes, byte=0)
        addresses[layer.key_name] = base
        addresses[layer.value_name] = base + layer.value_offset
    return addresses


def download_pages(
    stream: Stream, spec: EngineSpec, name: str, address: int, pages: Sequence[int]
) -> npt.NDArray[Any]:
    """Pages of a pool that lies at `address`, `[len(pages), num_kv_heads, 128, head_dim]`.

    Raises:
        ExecutionError: the device failed.
    """
    pool = next(each for each in spec.pools() if each.name == name)
    copies = np.empty((len(pages), *map(int, pool.dims[1:])), pool.dtype.numpy)
    for copy, page in zip(copies, pages, strict=True):
        stream.download(copy.ctypes.data, address + page * copy.nbytes, copy.nbytes)
    stream.synchronize()
    return copies
