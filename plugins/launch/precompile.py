"""Compiles many kernels at once into the cache on disk, before they are asked for."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from typing import Final

from paged_trt.plugins.errors import PagedTrtError
from paged_trt.plugins.launch.compiler import KernelCompiler, compile_arch
from paged_trt.plugins.launch.kernels_decode import KernelBuild
from paged_trt.plugins.launch.loaded import build_of
from paged_trt.plugins.launch.registry import KernelKey

MOST_PROCESSES: Final = 16
_LOG: Final = logging.getLogger("paged_trt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildJob:
    """A kernel that no key names.

    Attributes:
        build: the kernel.
        arch: architecture of a device, such as `sm_90`.
    """

    build: KernelBuild
    arch: str


def start_compiling(keys: Iterable[KernelKey]) -> concurrent.futures.Future[None]:
    """Compile kernels in processes of their own; what fails here fails again where it is used.

    The cache is how they come back: without one, nothing is gained.

    Args:
        keys: with an architecture.

    Returns:
        Done when everything was compiled or has failed.
    """
    # The widest heads take longest: they go first.
    ordered = sorted(dict.fromkeys(keys), key=lambda key: (-key.head_dim, str(key)))
    return _start(ordered)


def start_compiling_builds(
    builds: Iterable[KernelBuild], arch: str
) -> concurrent.futures.Future[None]:
    """As `start_compiling`, for kernels that no key names.

    Args:
        builds: the kernels, in the order to begin with them.
        arch: architecture of the device, such as `sm_90`.
    """
    return _start([BuildJob(build=build, arch=arch) for build in dict.fromkeys(builds)])


def _start(jobs: Sequence[KernelKey | BuildJob]) -> concurrent.futures.Future[None]:
    waiter = concurrent.futures.ThreadPoolExecutor(1)
    done = waiter.submit(_compile_all, jobs)
    waiter.shutdown(wait=False)
    return done


def _compile_all(jobs: Sequence[KernelKey | BuildJob]) -> None:
    count = min(MOST_PROCESSES, os.cpu_count() or 1, len(jobs))
    if count < 2:
        for key in jobs:
            compile_one(key)
        return
    # Never forked: the parent may hold a CUDA context.
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool:
            for problem in pool.map(compile_one, jobs):
                if problem:
                    _LOG.info("%s", problem)
    except concurrent.futures.BrokenExecutor as error:
        # A compiler that was killed, such as by a lack of memory, is no reason to stop.
        _LOG.info("kernels are compiled one by one: %s", error)


def compile_one(key: KernelKey | BuildJob) -> str:
    """Compile one kernel into the cache; why it failed, or nothing."""
    try:
        build = key.build if isinstance(key, BuildJob) else build_of(key)
        arch = compile_arch(key.arch or "")
        KernelCompiler().compile(build.source, build.name_expression, arch=arch)
    except PagedTrtError as error:
        return f"{key}: {error}"
    return ""
