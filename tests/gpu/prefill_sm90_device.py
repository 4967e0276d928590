"""Runs Hopper's prefill kernels on the device, launched as the plugin launches them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from gpu.decode_cases import Case, Inputs
from gpu.decode_device import arch
from gpu.prefill_device import PrefillStep

from paged_trt.plugins import cuda
from paged_trt.plugins.device import KernelLaunch, load_function
from paged_trt.plugins.launch.args import PrefillSm90Args
from paged_trt.plugins.launch.compiler import KernelCompiler
from paged_trt.plugins.launch.kernels_decode import CallAddresses, KernelBuild, fill_arguments
from paged_trt.plugins.launch.kernels_prefill_sm90 import (
    most_tiles,
    plan_prefill,
    prefill_sm90_build,
    set_pool_maps,
)
from paged_trt.plugins.launch.plans import PrefillPlan
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import Operand


@functools.cache
def load(build: KernelBuild) -> Any:
    """A compiled function in the current context."""
    cubin = KernelCompiler().compile(build.source, build.name_expression, arch=arch())
    name = cubin.names[build.name_expression]
    return load_function(cubin.code, name, shared_bytes=build.shared_bytes)


class PrefillSm90Step(PrefillStep):
    """One step with its tensors on the device.

    Attributes:
        plan_override: another plan than the planner's, for measurements and tests of both kernels.
        query_bytes: where the queries are, instead of in `tensors`, and elements of a token row.
    """

    def __init__(
        self,
        case: Case,
        inputs: Inputs,
        pools: Mapping[str, Any] | None = None,
        plan: PrefillPlan | None = None,
    ) -> None:
        super().__init__(case, inputs, pools)
        self.plan_override = plan
        self.query: tuple[int, int] | None = None

    @property
    def request(self) -> AttentionPlanRequest:
        return AttentionPlanRequest(
            arch=arch(),
            attention=self.case.attention,
            activation_dtype=self.case.activation,
            kv_cache_dtype=self.case.kv,
            step=self.step,
            num_multiprocessors=cuda.multiprocessors(),
        )

    @property
    def prefill_plan(self) -> PrefillPlan:
        return self.plan_override or plan_prefill(self.request)

    def with_counter(self, takes_tiles: bool) -> PrefillSm90Step:
        """This step, its tiles taken from a counter or dealt out."""
        self.plan_override = dataclasses.replace(self.prefill_plan, takes_tiles=takes_tiles)
        return self

    def prefill_block(self) -> PrefillSm90Args:
        attention = self.case.attention
        address, stride = self.query or (
            self.tensors["query"].data_ptr(),
            attention.num_q_heads * attention.head_dim,
        )
        operands = [self.tensors[op.name.lower()].data_ptr() for op in Operand]
        operands[Operand.QUERY] = address
        addresses = CallAddresses(
            operands=tuple(operands),
            token_strides=(stride, 0, 0),
            output=self.output.data_ptr(),
        )
        block = fill_arguments(
            PrefillSm90Args, addresses, attention=attention, pool=self.pool, step=self.step
        )
        pools = (operands[Operand.KEY_POOL], operands[Operand.VALUE_POOL])
        set_pool_maps(block, *pools, request=self.request, pool=self.pool)
        if self.prefill_plan.takes_tiles:
            block.tile_counter = self.counter.data_ptr()
        return block

    @functools.cached_property
    def launch_prefill(self) -> KernelLaunch:
        plan = self.prefill_plan
        assert plan.kernel == "hopper", str(plan)
        is_split = plan.partitions > 1
        path = KernelPath.PREFILL_SM90_SPLIT if is_split else KernelPath.PREFILL_SM90
        build = prefill_sm90_build(KernelKey.of(path, self.request))
        return KernelLaunch(
            load(build),
            self.prefill_block(),
            grid=(plan.blocks, 1, 1),
            threads=build.threads,
            shared_bytes=build.shared_bytes,
            overlaps=False,
            cluster=plan.partitions,
            label=str(plan),
        )

    @functools.cached_property
    def counter(self) -> Any:
        import torch

        return torch.zeros(1, dtype=torch.int32, device="cuda")

    def prefill(self) -> None:
        """Launch on torch's current stream; a launch leaves its counter at zero."""
        import torch

        self.launch_prefill(torch.cuda.current_stream().cuda_stream)


def with_partitions(step: PrefillSm90Step, partitions: int) -> PrefillPlan:
    """The plan of a step with so many partitions; without, few blocks do all tiles in turn."""
    plan = plan_prefill(step.request)
    tiles = most_tiles(step.request)
    blocks = tiles * partitions if partitions > 1 else max(1, tiles // 3)
    return dataclasses.replace(plan, blocks=blocks, partitions=partitions)
