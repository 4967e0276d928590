"""What a kernel is compiled for. The loaded kernels are in `loaded`."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.requests import AttentionPlanRequest


class KernelPath(enum.Enum):
    """One kind of kernel; each has its own argument struct in `args`."""

    APPEND = "append"
    DECODE_DIRECT = "decode_direct"
    DECODE_CLUSTER = "decode_cluster"
    DECODE_COUNTER = "decode_counter"
    DECODE_BALANCED = "decode_balanced"
    DECODE_SPLIT = "decode_split"
    MERGE = "merge"
    PREFILL = "prefill"
    PREFILL_SM90 = "prefill_sm90"
    PREFILL_SM90_SPLIT = "prefill_sm90_split"
    GATHER = "gather"


SPECIALISED: Final = frozenset({KernelPath.PREFILL_SM90, KernelPath.PREFILL_SM90_SPLIT})
"""Kernels that are compiled with or without window and softcap; others look at run time."""


DECODE_PATHS: Final = (
    KernelPath.DECODE_DIRECT,
    KernelPath.DECODE_CLUSTER,
    KernelPath.DECODE_COUNTER,
    KernelPath.DECODE_BALANCED,
    KernelPath.DECODE_SPLIT,
)
"""Kernels that attend one token per sequence."""


class Feature(enum.Flag):
    """Features of the op that a kernel is compiled for; off, one costs nothing.

    The values are those of `kernels/decode_config.cuh`.
    """

    NONE = 0
    WINDOW = 1
    SOFTCAP = 2
    ROPE = 4

    @classmethod
    def of(cls, attention: AttentionSpec) -> Feature:
        """What a layer uses."""
        found = cls.NONE
        if attention.window != FULL_WINDOW:
            found |= cls.WINDOW
        if attention.softcap > 0:
            found |= cls.SOFTCAP
        if attention.rope is not Rope.NONE:
            found |= cls.ROPE
        return found


_ALL_FEATURES: Final = Feature.WINDOW | Feature.SOFTCAP | Feature.ROPE
_FEATURES: Final = {KernelPath.APPEND: Feature.ROPE, **dict.fromkeys(DECODE_PATHS, _ALL_FEATURES)}
"""Features that each kind of kernel is compiled for; the others read them at run time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant:
    """How a kernel is built differently from what engines run; only benchmarks ask for one.

    Attributes:
        warps: of a decode block; None: as engines have it.
        other_depth: of a decode: one step of a warp in flight where engines have two, two where
            they have one.
    """

    warps: int | None = None
    other_depth: bool = False

    def bits(self, path: KernelPath) -> int:
        """What it adds to the number of a kernel's features, as in `kernels/decode_config.cuh`."""
        if path not in DECODE_PATHS:
            return 0
        return _OTHER_DEPTH * self.other_depth

    def __str__(self) -> str:
        words = [f"{self.warps} warps"] if self.warps else []
        words += ["other depth"] if self.other_depth else []
        return ", ".join(words)


_OTHER_DEPTH: Final = 8
USUAL: Final = KernelVariant()
"""What engines run."""


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
        features: what the kernel does besides, of what the layer uses.
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
    features: Feature = Feature.NONE

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
            features=Feature.of(attention) & _FEATURES.get(path, Feature.NONE),
        )

    def __str__(self) -> str:
        features = f", {self.features.name}" if self.features else ""
        return (
            f"{self.path.value} {self.activation_dtype.value} -> {self.kv_cache_dtype.value}, "
            f"head_dim {self.head_dim}, value_head_dim {self.value_head_dim}, "
            f"group_size {self.group_size}{features}, {'window, ' if self.has_window else ''}"
            f"{'softcap, ' if self.has_softcap else ''}{self.arch or 'any device'}"
        )
