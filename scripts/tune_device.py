"""The GPU side of `paged-trt tune`: memory, kernels and a timing source."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from paged_trt.plugins.device import Device, Stream, kept_device
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.kv import tokens_in_pages
from paged_trt.plugins.launch.dispatch import kernel_paths
from paged_trt.plugins.launch.loaded import KERNELS, DeviceKernels
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import AttentionPlan
from paged_trt.plugins.launch.registry import KernelKey
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.step_sizes import BYTES_IN_TURN, StepSizes
from paged_trt.plugins.launch.trial import is_attention, prepare_trial
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.plugins.launch.tuner import query_lengths, step_lengths
from paged_trt.plugins.timing import DriverGraphs, measure

FREE_PART: Final = 0.8
"""Of the free memory that pools may take: queries, outputs and workspaces come on top."""


def on_device(request: AttentionPlanRequest, target: TuningTarget) -> AttentionPlanRequest:
    """The request as the plugin will make it on a device."""
    return dataclasses.replace(
        request, arch=target.arch, num_multiprocessors=target.num_multiprocessors
    )


def step_sizes(request: AttentionPlanRequest) -> StepSizes:
    """Lengths of the sequences of a timed step."""
    step = request.step
    queries = query_lengths(step.num_seqs, step.num_tokens)
    lengths = step_lengths(step.num_seqs, tokens_in_pages(step.table_width))
    return StepSizes(query_lens=tuple(queries), kv_lens=tuple(map(max, queries, lengths)))


def keys_of(request: AttentionPlanRequest, plan: AttentionPlan) -> list[KernelKey]:
    """Kernels of a step under a plan."""
    planned = PolicyPlanner(explicit=plan).plan(request).plan
    return [KernelKey.of(path, request) for path in kernel_paths(request, planned)]


def pool_bytes(requests: Sequence[AttentionPlanRequest], free: int) -> int:
    """Bytes of the keys, and of the values, that the largest step needs; bounded by what is free.

    A step that does not fit is refused when its turn comes.
    """
    needed = [
        # Whole pages, and the wider of keys and values.
        2 * max(BYTES_IN_TURN, step_sizes(request).kv_bytes(request.attention,
                                                              request.kv_cache_dtype))
        for request in requests
    ]  # fmt: skip
    return min(max(needed), int(free * FREE_PART) // 2)


class DeviceTimer:
    """Times plans of steps on a device; a `TimePlan`.

    Args:
        memory: of the device, with its pools.
        kernels: where kernels are loaded.
        graphs: records and replays.
        trial_options: for `prepare_trial`.
    """

    def __init__(
        self,
        memory: TrialMemory,
        kernels: DeviceKernels,
        graphs: DriverGraphs,
        trial_options: dict[str, Any],
    ) -> None:
        self._memory, self._kernels, self._graphs = memory, kernels, graphs
        self._trial_options = trial_options

    def __call__(self, request: AttentionPlanRequest, plan: AttentionPlan) -> float:
        """Median microseconds of a step.

        Raises:
            PagedTrtError: the step does not fit, has no kernel, or failed.
        """
        self._kernels.warm(keys_of(request, plan))
        try:
            trial = prepare_trial(
                self._memory,
                request,
                step_sizes(request),
                planner=PolicyPlanner(explicit=plan),
                registry=self._kernels,
                **self._trial_options,
            )
            calls = trial.calls(self._memory.stream.handle, only=is_attention)
            return measure(self._graphs, calls).median
        finally:
            self._memory.release()

    def is_usable(self) -> bool:
        """Whether the device still answers: after some failures every later call fails."""
        try:
            self._memory.stream.synchronize()
            self._memory.device.free_bytes()
        except ExecutionError:
            return False
        return True


@contextlib.contextmanager
def timing_source(
    ordinal: int,
    requests: Sequence[AttentionPlanRequest],
    *,
    device: Device | None = None,
    kernels: DeviceKernels = KERNELS,
    **trial_options: Any,
) -> Iterator[DeviceTimer]:
    """Times plans on a device.

    Args:
        ordinal: number of the device.
        requests: all that are going to be timed.
        device: instead of the process's own.
        kernels: where kernels are loaded.
        trial_options: for `prepare_trial`.

    Raises:
        UnsupportedError: there is no device.
        ExecutionError: there is too little memory.
    """
    device = kept_device(ordinal) if device is None else device
    with device.current(), contextlib.ExitStack() as stack:
        stream = Stream(device.driver)
        stack.callback(stream.close)
        graphs = DriverGraphs(stream, driver=device.driver)
        stack.callback(graphs.close)
        size = pool_bytes(requests, device.free_bytes())
        memory = TrialMemory(device, stream, pool_bytes=size)
        stack.callback(memory.close)
        yield DeviceTimer(memory, kernels, graphs, trial_options)
