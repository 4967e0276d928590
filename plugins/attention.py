"""Geometry of one attention layer, as the PagedAttention op sees it."""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import INT32_MAX

FULL_WINDOW = -1
"""Value of `window` where every past key is visible."""


class Rope(enum.IntEnum):
    """Rotary embedding inside the op; the value is the op's attribute `rope`."""

    NONE = 0
    HALF_SPLIT = 1
    INTERLEAVED = 2


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's heads, scale, window, softcap and rope; valid by construction.

    Attributes:
        num_q_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key and value heads.
        head_dim: elements of one query or key head.
        value_head_dim: elements of one value head.
        softmax_scale: factor on q.k before softcap.
        window: keys visible to the left including self, or FULL_WINDOW.
        softcap: s -> softcap * tanh(s / softcap); 0 switches it off.
        rope: rotary embedding applied by the op.
        rotary_dim: leading elements of a head that rotate; 0 without rope.

    Raises:
        ConfigError: a value is out of range or two values do not fit together.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    softmax_scale: float
    window: int = FULL_WINDOW
    softcap: float = 0.0
    rope: Rope = Rope.NONE
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "value_head_dim"):
            value = getattr(self, name)
            _require(
                type(value) is int and 0 < value <= INT32_MAX,
                f"`{name}` must be a positive int32, got {value!r}",
            )
        _require(
            self.num_q_heads % self.num_kv_heads == 0,
            f"num_q_heads={self.num_q_heads} is no multiple of num_kv_heads={self.num_kv_heads}",
        )
        for name in ("softmax_scale", "softcap"):
            value = getattr(self, name)
            _require(
                type(value) is float and math.isfinite(value),
                f"`{name}` must be a finite float, got {value!r}",
            )
            # ONNX and TensorRT carry float32: what is stored must compare equal at every hop.
            object.__setattr__(self, name, float(np.float32(value)))
        _require(self.softcap >= 0, f"`softcap` must be 0 or positive, got {self.softcap}")
        _require(
            type(self.window) is int
            and (self.window == FULL_WINDOW or 0 < self.window <= INT32_MAX),
            f"`window` must be {FULL_WINDOW} (all keys) or a positive int32, got {self.window!r}",
        )
        self._check_rope()

    def _check_rope(self) -> None:
        _require(isinstance(self.rope, Rope), f"`rope` must be a Rope, got {self.rope!r}")
        _require(
            type(self.rotary_dim) is int,
            f"`rotary_dim` must be an int, got {self.rotary_dim!r}",
        )
        if self.rope is Rope.NONE:
            _require(
                self.rotary_dim == 0, f"rotary_dim={self.rotary_dim} needs a rope, which is off"
            )
            return
        _require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"`rotary_dim` must be even and from 2 to head_dim={self.head_dim}, "
            f"got {self.rotary_dim}",
        )

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_head_dim)
