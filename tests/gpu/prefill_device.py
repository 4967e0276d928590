"""Runs append and prefill kernels on the device; torch holds the memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from gpu.decode_cases import Case, Inputs
from gpu.decode_device import Array, DecodeStep, arch, check, load_kernel

from paged_trt.plugins.launch.args import PrefillArgs
from paged_trt.plugins.launch.kernels_prefill import PrefillTile, prefill_build, prefill_grid
from paged_trt.plugins.launch.plans import Direct
from paged_trt.plugins.launch.registry import KernelKey, KernelPath


class PrefillStep(DecodeStep):
    """One step with its tensors on the device.

    Attributes:
        tile: another tile than the table's, for measurements.
    """

    def __init__(
        self,
        case: Case,
        inputs: Inputs,
        pools: Mapping[str, Any] | None = None,
        tile: PrefillTile | None = None,
    ) -> None:
        super().__init__(case, inputs, Direct(), pools)
        self.tile = tile

    @property
    def key(self) -> KernelKey:
        attention = self.case.attention
        return KernelKey(
            path=KernelPath.PREFILL,
            arch=arch(),
            activation_dtype=self.case.activation,
            kv_cache_dtype=self.case.kv,
            head_dim=attention.head_dim,
            value_head_dim=attention.value_head_dim,
            group_size=attention.group_size,
        )

    def prefill_arguments(self) -> PrefillArgs:
        """A direct decode has the same arguments, but for the number of tokens."""
        direct = self.arguments(KernelPath.DECODE_DIRECT)
        names = {name for name, *_ in PrefillArgs._fields_} - {"num_tokens"}
        return PrefillArgs(
            num_tokens=self.step.num_tokens, **{name: getattr(direct, name) for name in names}
        )

    def prefill(self) -> None:
        """Launch the prefill kernel on torch's current stream."""
        import torch
        from cuda.bindings import driver

        build = prefill_build(self.key, self.tile)
        kernel = load_kernel(build.source, build.name_expression)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(kernel, attribute, build.shared_bytes))
        grid = prefill_grid(
            self.key, self.step, num_kv_heads=self.case.num_kv_heads, tile=self.tile
        )
        block = self.prefill_arguments()
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        stream = torch.cuda.current_stream().cuda_stream
        check(
            driver.cuLaunchKernel(
                kernel,
                *grid,
                *(build.threads, 1, 1),
                build.shared_bytes,
                stream,
                ctypes.addressof(parameters),
                0,
            )
        )

    def run(self) -> Array:
        """Append, attend, and give the output."""
        import torch

        self.launch(KernelPath.APPEND)
        self.prefill()
        torch.cuda.synchronize()
        return self.host_output()
