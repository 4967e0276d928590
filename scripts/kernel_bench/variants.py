"""Kernels of a candidate: which are compiled, loaded and how an append of it is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from paged_trt.plugins.launch.dispatch import kernel_paths
from paged_trt.plugins.launch.kernels_decode import KernelBuild, kernel_build
from paged_trt.plugins.launch.loaded import DeviceKernels, LoadedKernel, build_of
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.registry import DECODE_PATHS, USUAL, KernelKey, KernelPath
from paged_trt.plugins.launch.trial import is_append
from paged_trt.scripts.kernel_bench.candidates import (
    Candidate,
    append_candidates,
    decode_candidates,
    variants_of,
)
from paged_trt.scripts.kernel_bench.cells import Cell, Family


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VariantKernels:
    """Kernels of one candidate: its variant where that counts, the usual ones elsewhere.

    Attributes:
        candidate: whose kernels they are.
        kernels: where they are loaded.
    """

    candidate: Candidate
    kernels: DeviceKernels

    def find(self, key: KernelKey) -> LoadedKernel:
        """The kernel of `key` in the current context, compiled where it is not there.

        Raises:
            UnsupportedError: no kernel covers the key.
            KernelError: it did not compile or load.
        """
        build = variant_build(self.candidate, key)
        if build is None or key.arch is None:
            self.kernels.warm([key])
            return self.kernels.find(key)
        return LoadedKernel(key=key, build=build, function=self.kernels.load(build, key.arch))


def variant_build(candidate: Candidate, key: KernelKey) -> KernelBuild | None:
    """The kernel that a candidate has instead of the usual one; None where it has that."""
    timed = DECODE_PATHS if candidate.plan is not None else (KernelPath.APPEND,)
    if candidate.variant == USUAL or key.path not in timed:
        return None
    return kernel_build(key, candidate.variant)


def cut_append(candidate: Candidate, make_launch: Callable[..., Any]) -> Callable[..., Any]:
    """`make_launch` that cuts an append as the candidate wants it."""
    rounds = candidate.append_rounds
    if rounds is None:
        return make_launch

    def make(function: Any, block: Any, *, grid: Any, label: str, **options: Any) -> Any:
        if is_append(label):
            # A part too many, where these do not come out even, has nothing to do.
            grid = (grid[0], -(-grid[1] * block.rounds_per_warp // rounds), 1)
            block.rounds_per_warp = rounds
        return make_launch(function, block, grid=grid, label=label, **options)

    return make


def builds_of(cells: Sequence[Cell], *, arch: str, num_multiprocessors: int) -> list[KernelBuild]:
    """Every kernel that a sweep of the cells may load, each once."""
    found: dict[KernelBuild, None] = {}
    for cell in cells:
        request = cell.request(arch=arch, num_multiprocessors=num_multiprocessors)
        if cell.family is Family.APPEND:
            wanted = append_candidates()
        else:
            plans = decode_candidates(request)
            wanted = [*plans, *variants_of(request, plans)]
        planner = PolicyPlanner(explicit=None)
        for each in wanted:
            plan = each.plan if each.plan is not None else planner.plan(request).plan
            for path in kernel_paths(request, plan):
                key = KernelKey.of(path, request)
                found[variant_build(each, key) or build_of(key)] = None
    return list(found)
