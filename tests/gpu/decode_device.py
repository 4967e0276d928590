"""Runs append, decode and merge kernels on the device; torch holds the memory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu.decode_cases import Case, Inputs

from paged_trt.plugins import cuda
from paged_trt.plugins.device import launch_attributes
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.launch import kernels_decode
from paged_trt.plugins.launch.compiler import KernelCompiler
from paged_trt.plugins.launch.plans import AttentionPlan
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.workspace import decode_workspace, plan_blocks
from paged_trt.plugins.operands import Operand, StepShape

Array = npt.NDArray[Any]
Plan = AttentionPlan


def check(result: tuple[Any, ...]) -> Any:
    """Value of a driver call."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"driver call failed: {error!r}")
    return values[0] if values else None


@functools.cache
def arch() -> str:
    """Architecture to compile for; the one with Hopper's own instructions where there is one."""
    found = cuda.device_arch()
    return "sm_90a" if found == "sm_90" else found


@functools.cache
def load_kernel(source: str, name_expression: str) -> Any:
    """A compiled function in the current context. The module stays loaded."""
    from cuda.bindings import driver

    # Its cache on disk serves all workers of pytest-xdist and runs under compute-sanitizer.
    cubin = KernelCompiler().compile(source, name_expression, arch=arch())
    module = check(driver.cuModuleLoadData(cubin.code))
    return check(driver.cuModuleGetFunction(module, cubin.names[name_expression].encode()))


def to_device(array: Array) -> Any:
    """The bytes of `array`; types that torch lacks make no difference."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1)).cuda()


def to_host(tensor: Any, shape: Sequence[int], dtype: DType) -> Array:
    """A host copy of a device tensor as `dtype`."""
    return tensor.cpu().numpy().view(dtype.numpy).reshape(shape)


def launch(
    function: Any,
    grid: tuple[int, int, int],
    threads: int,
    block: ctypes.Structure,
    *,
    is_programmatic: bool,
    cluster: int = 1,
) -> None:
    """Launch on torch's current stream; programmatic: before the kernel ahead has ended."""
    import torch
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    attributes = launch_attributes(driver, overlaps=is_programmatic, cluster=cluster)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))


class DecodeStep:
    """One step with its tensors on the device.

    Attributes:
        tensors: uint8 tensor of each operand.
        output: uint8 tensor, NaN until the step has run.
        is_programmatic: whether kernels may start before the one ahead has ended.
        has_small_blocks: whether a direct decode takes the kernel of large grids, whatever N is.
    """

    is_programmatic = False
    has_small_blocks = False

    def __init__(
        self, case: Case, inputs: Inputs, plan: Plan, pools: Mapping[str, Any] | None = None
    ) -> None:
        import torch

        self.case, self.plan = case, plan
        attention = case.attention
        self.tensors = {
            operand.name.lower(): (pools or {}).get(operand.name.lower()) for operand in Operand
        }
        for name, tensor in self.tensors.items():
            if tensor is None:
                self.tensors[name] = to_device(inputs[name])
        tokens = len(inputs["query"])
        num_seqs, width = inputs["page_table"].shape
        self.step = StepShape(num_tokens=tokens, num_seqs=num_seqs, table_width=width)
        tile_bytes = attention.num_kv_heads * 128 * attention.head_dim * case.kv.itemsize
        self.pool = KvPoolSpec(
            num_pages=self.tensors["key_pool"].numel() // tile_bytes,
            max_batch_size=1,
            max_kv_cache_capacity=1,
        )
        self.output_shape = (tokens, attention.num_q_heads, attention.value_head_dim)
        size = int(np.prod(self.output_shape)) * case.activation.itemsize
        self.output = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        self.workspace = self._workspace()

    def _workspace(self) -> Any:
        """NaN everywhere: the kernels must not read what they did not write."""
        import torch

        sizes = decode_workspace(self.plan, self.case.attention, self.step, self.partitions)
        return torch.full((sizes.num_bytes + 1,), 255, dtype=torch.uint8, device="cuda")

    @property
    def request(self) -> AttentionPlanRequest:
        return AttentionPlanRequest(
            arch=cuda.device_arch(),
            attention=self.case.attention,
            activation_dtype=self.case.activation,
            kv_cache_dtype=self.case.kv,
            step=self.step,
            num_multiprocessors=cuda.multiprocessors(),
        )

    @property
    def partitions(self) -> int:
        return plan_blocks(self.plan, self.request)

    @property
    def attention_paths(self) -> tuple[KernelPath, ...]:
        if self.has_small_blocks:
            return (KernelPath.DECODE_DIRECT,)
        # Not ahead: a host for measurements may lack what planners import.
        from paged_trt.plugins.launch.dispatch import kernel_paths

        # T is not N where the append of a prefill is tested.
        step = StepShape(
            num_tokens=self.step.num_seqs,
            num_seqs=self.step.num_seqs,
            table_width=self.step.table_width,
        )
        request = dataclasses.replace(self.request, step=step)
        return kernel_paths(request, self.plan)[1:]

    def launch(self, *paths: KernelPath) -> None:
        """Launch kernels on torch's current stream."""
        for path in paths:
            self._launch_one(path)

    def _launch_one(self, path: KernelPath) -> None:
        attention = self.case.attention
        key = KernelKey.of(path, self.request)
        build = kernels_decode.kernel_build(key)
        grid = kernels_decode.kernel_grid(
            key,
            build,
            self.step,
            num_kv_heads=attention.num_kv_heads,
            partitions=self.partitions,
        )
        launch(
            load_kernel(build.source, build.name_expression),
            grid,
            build.threads,
            self.arguments(path),
            is_programmatic=self.is_programmatic,
            cluster=self.partitions if path is KernelPath.DECODE_CLUSTER else 1,
        )

    def arguments(self, path: KernelPath) -> ctypes.Structure:
        attention = self.case.attention
        addresses = kernels_decode.CallAddresses(
            operands=tuple(self.tensors[op.name.lower()].data_ptr() for op in Operand),
            token_strides=(
                attention.num_q_heads * attention.head_dim,
                attention.num_kv_heads * attention.head_dim,
                attention.num_kv_heads * attention.value_head_dim,
            ),
            output=self.output.data_ptr(),
            workspace=self.workspace.data_ptr(),
        )
        return kernels_decode.fill_arguments(
            kernels_decode.ARGUMENTS[path],
            addresses,
            attention=attention,
            pool=self.pool,
            step=self.step,
            plan=self.plan,
            blocks=self.partitions,
        )

    def run(self) -> Array:
        """Append, attend, and give the output."""
        import torch

        self.launch(KernelPath.APPEND, *self.attention_paths)
        torch.cuda.synchronize()
        return self.host_output()

    def host_output(self) -> Array:
        return to_host(self.output, self.output_shape, self.case.activation)

    def host_pool(self, name: str, like: Array) -> Array:
        return to_host(self.tensors[name], like.shape, self.case.kv)
