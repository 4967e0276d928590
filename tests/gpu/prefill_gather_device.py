"""Runs the gather path of prefill on the device, through what the plugin launches it with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from gpu.decode_cases import Case, Inputs
from gpu.decode_device import to_host
from gpu.prefill_device import Array, PrefillStep

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.launch.dispatch import PreparedStep, kernel_paths
from paged_trt.plugins.launch.gather import GatherWorkspace, as_gathered, gather_workspace
from paged_trt.plugins.launch.kernels_decode import CallAddresses
from paged_trt.plugins.launch.kernels_prefill_sm90 import most_tiles
from paged_trt.plugins.launch.loaded import KERNELS
from paged_trt.plugins.launch.planner import PlannedAttention, PolicyPlanner
from paged_trt.plugins.launch.plans import Gather, PlanSource, PrefillPlan
from paged_trt.plugins.launch.registry import KernelKey
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import Operand


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """A planner with one plan."""

    chosen: PrefillPlan

    def plan(self, request: AttentionPlanRequest) -> PlannedAttention:
        return PlannedAttention(plan=self.chosen, source=PlanSource.EXPLICIT, reason="a test")

    def workspace_bytes(self, largest: AttentionPlanRequest) -> int:
        return gather_workspace(largest).num_bytes


class GatherStep(PrefillStep):
    """One step with its tensors on the device.

    Args:
        case: attributes and types.
        inputs: the op's inputs.
        pools: on the device already, instead of those of `inputs`.
        partitions: blocks that share the keys of a tile; 0: as planned.
        takes_tiles: whether tiles come from a counter, where no keys are shared.
        garbage: byte that the workspace is full of.
    """

    def __init__(
        self,
        case: Case,
        inputs: Inputs,
        pools: Mapping[str, Any] | None = None,
        *,
        partitions: int = 0,
        takes_tiles: bool = False,
        garbage: int = 255,
    ) -> None:
        self.garbage = garbage
        super().__init__(case, inputs, pools)
        planned = PolicyPlanner(explicit=Gather()).plan(self.request)
        assert isinstance(planned.plan, PrefillPlan)
        assert planned.plan.gathers, planned.reason
        self.prefill_plan = planned.plan
        if partitions:
            tiles = most_tiles(as_gathered(self.request))
            blocks = tiles * partitions if partitions > 1 else max(1, tiles // 3)
            self.prefill_plan = dataclasses.replace(
                planned.plan, blocks=blocks, partitions=partitions, takes_tiles=takes_tiles
            )

    def _workspace(self) -> Any:
        """As another layer may leave it."""
        import torch

        size = self.sizes.num_bytes
        return torch.full((size,), self.garbage, dtype=torch.uint8, device="cuda")

    @property
    def sizes(self) -> GatherWorkspace:
        return gather_workspace(self.request)

    @functools.cached_property
    def prepared(self) -> PreparedStep:
        attention, request = self.case.attention, self.request
        addresses = CallAddresses(
            operands=tuple(self.tensors[op.name.lower()].data_ptr() for op in Operand),
            token_strides=(
                attention.num_q_heads * attention.head_dim,
                attention.num_kv_heads * attention.head_dim,
                attention.num_kv_heads * attention.value_head_dim,
            ),
            output=self.output.data_ptr(),
            workspace=self.workspace.data_ptr(),
        )
        paths = kernel_paths(request, self.prefill_plan)
        KERNELS.warm(KernelKey.of(path, request) for path in paths)
        step = PreparedStep(
            request,
            OperatorSpec(pool=self.pool, attention=attention),
            addresses,
            planner=_Fixed(self.prefill_plan),
        )
        step.bind(addresses)
        return step

    def launch_all(self) -> None:
        """Append, gather and attend on torch's current stream."""
        import torch

        self.prepared.launch(torch.cuda.current_stream().cuda_stream)

    def run(self) -> Array:
        import torch

        self.launch_all()
        torch.cuda.synchronize()
        return self.host_output()

    def gathered(self) -> tuple[Array, list[Array]]:
        """The table of gathered pages `[N, M]`, and their keys and values, from the workspace."""
        attention, sizes = self.case.attention, self.sizes
        table = to_host(
            self.workspace[sizes.table_offset : sizes.counter_offset], (-1,), DType.INT32
        )
        rows = (self.step.num_seqs, self.step.table_width)
        starts = (0, sizes.key_bytes, sizes.table_offset)
        pages = [
            to_host(
                self.workspace[start:end],
                (sizes.pages, attention.num_kv_heads, 128, dim),
                self.case.activation,
            )
            for start, end, dim in zip(
                starts, starts[1:], (attention.head_dim, attention.value_head_dim), strict=False
            )
        ]
        return table[: int(np.prod(rows))].reshape(rows), pages
