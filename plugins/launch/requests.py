"""One attention call: what a planner may know of it, and where its data lies."""

from __future__ import annotations

import dataclasses

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.operands import StepShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlanRequest:
    """One attention call, as far as the choice of kernels goes.

    Attributes:
        arch: architecture of the device, such as `sm_90`; None while an engine is built for
            a device that is not here.
        attention: heads, head dims, window, softcap and rope of the layer.
        activation_dtype: type of query, key, value and output.
        kv_cache_dtype: type of both pools.
        step: T, N and M.
    """

    arch: str | None
    attention: AttentionSpec
    activation_dtype: DType
    kv_cache_dtype: DType
    step: StepShape

    @property
    def is_decode(self) -> bool:
        """Whether every sequence row holds one token: T == N says so."""
        return self.step.num_tokens == self.step.num_seqs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Device addresses and strides of one call.

    Attributes:
        operands: address of each operand, in the order of `Operand`.
        token_strides: elements between two token rows of query, key and value.
        output: address of output 0, dense token rows.
        workspace: address of at least `Planner.workspace_bytes` bytes.
        stream: handle of the CUDA stream.
    """

    operands: tuple[int, ...]
    token_strides: tuple[int, int, int]
    output: int
    workspace: int
    stream: int
