"""From one attention call to kernel launches: what `enqueue` of the plugin calls."""

from __future__ import annotations

from typing import Final

from paged_trt.plugins.launch.planner import Planner
from paged_trt.plugins.launch.plans import Direct
from paged_trt.plugins.launch.registry import (
    EmptyRegistry,
    KernelKey,
    KernelPath,
    KernelRegistry,
)
from paged_trt.plugins.launch.requests import AttentionCall, AttentionPlanRequest

REGISTRY: Final[KernelRegistry] = EmptyRegistry()
"""The kernels of this version."""


def kernel_paths(request: AttentionPlanRequest, planner: Planner) -> tuple[KernelPath, ...]:
    """Kernels of one step, in launch order."""
    if not request.is_decode:
        return (KernelPath.APPEND, KernelPath.PREFILL)
    if isinstance(planner.plan(request).plan, Direct):
        return (KernelPath.APPEND, KernelPath.DECODE_DIRECT)
    return (KernelPath.APPEND, KernelPath.DECODE_SPLIT, KernelPath.MERGE)


def enqueue(
    call: AttentionCall,
    request: AttentionPlanRequest,
    *,
    planner: Planner,
    registry: KernelRegistry = REGISTRY,
) -> None:
    """Launch the kernels of one step on the call's stream; nothing waits or allocates.

    Args:
        call: addresses.
        request: sizes and types.
        planner: chooses between direct and split decode.
        registry: where the kernels are.

    Raises:
        KernelLaunchError: a kernel is missing or does not launch.
    """
    kernels = [
        registry.find(KernelKey.of(path, request)) for path in kernel_paths(request, planner)
    ]
    for kernel in kernels:
        kernel.launch(call, request)
