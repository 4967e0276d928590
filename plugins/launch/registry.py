"""What a kernel is compiled for. The loaded kernels are in `loaded`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from paged_trt.plugins.attention import FULL_WINDOW
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.requests import AttentionPlanRequest


class KernelPath(enum.Enum):
    """One kind of kernel; each has its own argument struct in `args`."""

    APPEND = "append"
    DECODE_DIRECT = "decode_direct"
    DECODE_SPLIT = "decode_split"
    MERGE = "merge"
    PREFILL = "prefill"
    PREFILL_SM90 = "prefill_sm90"
    PREFILL_SM90_SPLIT = "prefill_sm90_split"


SPECIALISED: Final = frozenset({KernelPath.PREFILL_SM90, KernelPath.PREFILL_SM90_SPLIT})
"""Kernels that are compiled with or without window and softcap; others look at run time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelKey:
    """What a kernel is compiled for.

    Attributes:
        path: kind of kernel.
        arch: architecture, such as `sm_90`.
        activation_dtype: type of query, key, value and output.
        kv_cache_dtype: type of both pools.
        head_dim: elements of a key head.
        value_head_dim: elements of a value head.
        group_size: query heads that share a key head.
        has_window: whether a SPECIALISED kernel handles a window; False for others.
        has_softcap: the same for softcap.
    """

    path: KernelPath
    arch: str | None
    activation_dtype: DType
    kv_cache_dtype: DType
    head_dim: int
    value_head_dim: int
    group_size: int
    has_window: bool = False
    has_softcap: bool = False

    @classmethod
    def of(cls, path: KernelPath, request: AttentionPlanRequest) -> KernelKey:
        """Key of the kernel that serves `request` on `path`."""
        attention = request.attention
        is_specialised = path in SPECIALISED
        return cls(
            path=path,
            arch=request.arch,
            activation_dtype=request.activation_dtype,
            kv_cache_dtype=request.kv_cache_dtype,
            head_dim=attention.head_dim,
            value_head_dim=attention.value_head_dim,
            group_size=attention.group_size,
            has_window=is_specialised and attention.window != FULL_WINDOW,
            has_softcap=is_specialised and attention.softcap > 0,
        )

    def __str__(self) -> str:
        return (
            f"{self.path.value} {self.activation_dtype.value} -> {self.kv_cache_dtype.value}, "
            f"head_dim {self.head_dim}, value_head_dim {self.value_head_dim}, "
            f"group_size {self.group_size}, {'window, ' if self.has_window else ''}"
            f"{'softcap, ' if self.has_softcap else ''}{self.arch or 'any device'}"
        )
