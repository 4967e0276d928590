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
        num_multiprocessors: of the device; None where it is not here.
    """

    arch: str | None
    attention: AttentionSpec
    activation_dtype: DType
    kv_cache_dtype: DType
    step: StepShape
    num_multiprocessors: int | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every sequence row holds one token: T == N says so."""
        return self.step.num_tokens == self.step.num_seqs
