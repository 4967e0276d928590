"""Attention outputs of an engine that was built with `--layer-outputs`, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.tensors import EngineSpec, attention_name
from paged_trt.runtime.bindings import Binding
from paged_trt.runtime.pool import DeviceArena, aligned


def require_layer_outputs(spec: EngineSpec) -> None:
    """Refuse an engine that gives no attention outputs.

    Raises:
        UnsupportedError: it was built without `--layer-outputs`.
    """
    if not spec.layer_outputs:
        raise UnsupportedError(
            "the engine gives no attention outputs of its layers; rebuild it with "
            "`paged-trt build --layer-outputs`"
        )


class LayerBuffers:
    """Memory of the attention outputs of one step, for the largest one.

    Args:
        arena: owner of the memory.
        spec: interface of the engine; without layer outputs nothing is allocated.
    """

    def __init__(self, arena: DeviceArena, spec: EngineSpec) -> None:
        self._dtype = spec.activation_dtype
        self._heads = [(layer.num_q_heads, layer.value_head_dim) for layer in spec.layers]
        itemsize = self._dtype.itemsize
        sizes = [
            aligned(spec.max_token_rows * heads * dim * itemsize) for heads, dim in self._heads
        ]
        self._addresses: list[int] = []
        if spec.layer_outputs:
            self._host = arena.allocate_pinned(max(sizes))
            self._addresses = [arena.allocate(size, "the layers' outputs") for size in sizes]

    def bindings(self) -> dict[str, Binding]:
        """Address of each output, the same for every step."""
        return {
            attention_name(layer): (address, None) for layer, address in enumerate(self._addresses)
        }

    def download(self, num_tokens: int, stream: Stream) -> list[npt.NDArray[Any]]:
        """Those of the last step, `[T, num_q_heads, value_head_dim]` by layer.

        Returns:
            float16, or float32 of bfloat16.

        Raises:
            ExecutionError: the device failed.
        """
        found = []
        for address, (heads, dim) in zip(self._addresses, self._heads, strict=True):
            raw = self._host[: num_tokens * heads * dim * self._dtype.itemsize]
            stream.download(raw.ctypes.data, address, raw.nbytes)
            stream.synchronize()
            array = raw.view(self._dtype.numpy).reshape(num_tokens, heads, dim)
            found.append(array.astype(np.float32 if self._dtype is DType.BFLOAT16 else array.dtype))
        return found
