"""From an engine directory to a TensorRtExecutor: every check before anything is allocated."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins import cuda, trt
from paged_trt.plugins.callback_errors import CALLBACK_ERRORS
from paged_trt.plugins.device import Device, kept_device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import (
    ComputeCapabilityError,
    ExecutionError,
    PlanVersionError,
    UnsupportedError,
)
from paged_trt.plugins.launch.dispatch import warm_keys
from paged_trt.plugins.launch.loaded import KERNELS
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.sampling import TAKE_TOKENS, sample_build
from paged_trt.plugins.load_check import (
    check_engine_table,
    engine_information,
    table_from_engine,
)
from paged_trt.plugins.manifest import PLAN_FILE, BuildRecord, EngineManifest, read_checked
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensorrt_messages import tensorrt_error
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.jit_cache import JitCache
from paged_trt.runtime.step_sampling import samples_on_device
from paged_trt.runtime.tensorrt_executor import GENERATION_PROFILE, TensorRtExecutor

_LOG: Final = logging.getLogger("paged_trt")
_HOPPER: Final = "sm_90"
HOPPER_NOTE: Final = (
    "NVIDIA does not list compute capability 9.0 for TensorRT-RTX: times of the whole engine say "
    "little about other devices"
)


def check_runnable(build: BuildRecord, ordinal: int) -> str:
    """Whether a plan can run here, by its record; nothing of the plan is read.

    Args:
        build: what built the plan.
        ordinal: number of the device.

    Returns:
        Architecture of the device, such as `sm_90`.

    Raises:
        UnsupportedError: no device or no TensorRT, another flavour or version, or a device that
            the plan was not built for; the message names both sides.
    """
    arch = cuda.device_arch(ordinal)
    built = (build.flavor, build.tensorrt_version)
    found = (trt.flavor(), trt.version())
    if built != found:
        raise PlanVersionError(
            f"the plan was built by {built[0]} {built[1]} and {found[0]} {found[1]} is installed; "
            "install the first, or rebuild the engine with `paged-trt build`"
        )
    if not _covers(build.compute_capabilities, arch):
        raise ComputeCapabilityError(
            f"the plan was built for compute capability {', '.join(build.compute_capabilities)} "
            f"and device {ordinal} has {_capability(arch)}; rebuild the engine on this machine"
        )
    return arch


def open_engine(
    folder: Path,
    manifest: EngineManifest,
    *,
    kv_scales: Mapping[str, npt.NDArray[np.float32]],
    ordinal: int = 0,
    uses_graphs: bool = True,
    pipelines: bool = False,
) -> TensorRtExecutor:
    """Run the plan of an engine directory, whose files were checked.

    Args:
        folder: the engine directory.
        manifest: its manifest.
        kv_scales: as in TensorRtExecutor.
        ordinal: number of the device.
        uses_graphs: as in TensorRtExecutor.
        pipelines: load what steps need that are handed over before the one before is collected.

    Raises:
        UnsupportedError: the plan cannot run here.
        ManifestError: the plan is no longer the file that was checked.
        SpecMismatchError: the plan is not what the manifest says.
        KernelError: a kernel did not compile or load.
        ExecutionError: there is too little memory, or TensorRT refused.
    """
    arch = check_runnable(manifest.build, ordinal)
    device = kept_device(ordinal)
    with device.current_to_the_end():
        _check_memory(device, manifest.spec, plan_bytes=manifest.files[PLAN_FILE].size)
        return _open(
            folder,
            manifest,
            device,
            arch=arch,
            kv_scales=kv_scales,
            uses_graphs=uses_graphs,
            pipelines=pipelines,
        )


def _open(
    folder: Path,
    manifest: EngineManifest,
    device: Device,
    *,
    arch: str,
    kv_scales: Mapping[str, npt.NDArray[np.float32]],
    uses_graphs: bool,
    pipelines: bool,
) -> TensorRtExecutor:
    spec = manifest.spec
    warm_kernels(spec, arch)
    sampling_kernel = load_sampling_kernel(spec, arch)
    token_kernel = load_token_kernel(spec, arch) if pipelines else None
    lines = trt.LogLines()
    # Hashed again: another process may have replaced the file since it was checked.
    plan = read_checked(folder, PLAN_FILE, manifest.files[PLAN_FILE])
    engine, keep = _deserialize(plan, folder / PLAN_FILE, lines)
    del plan
    check_engine_table(spec, table_from_engine(engine))
    key = (manifest.files[PLAN_FILE].sha256, trt.flavor(), trt.version(), arch)
    cache = JitCache(engine, key)
    is_rtx_on_hopper = arch == _HOPPER and trt.flavor() == "tensorrt_rtx"
    return TensorRtExecutor(
        engine,
        spec,
        device,
        kv_scales=kv_scales,
        notes=(HOPPER_NOTE,) if is_rtx_on_hopper else (),
        lines=lines,
        keep=keep,
        make_context=functools.partial(make_context, cache=cache),
        keep_compiled=cache.save,
        uses_graphs=uses_graphs,
        sampling_kernel=sampling_kernel,
        token_kernel=token_kernel,
    )


def describe_plan(folder: Path, manifest: EngineManifest, *, ordinal: int = 0) -> dict[str, Any]:
    """What TensorRT says of the plan of an engine directory, whose files were checked.

    Args:
        folder: the engine directory.
        manifest: its manifest.
        ordinal: number of the device.

    Raises:
        PagedTrtError: as `open_engine`; no pool is allocated.
    """
    check_runnable(manifest.build, ordinal)
    with kept_device(ordinal).current_to_the_end():
        return _describe(folder, manifest)


def _describe(folder: Path, manifest: EngineManifest) -> dict[str, Any]:
    plan = read_checked(folder, PLAN_FILE, manifest.files[PLAN_FILE])
    engine, keep = _deserialize(plan, folder / PLAN_FILE, trt.LogLines())
    check_engine_table(manifest.spec, table_from_engine(engine))
    found = engine_information(engine)
    # The engine goes before what made it.
    del engine
    del keep
    return found


def load_sampling_kernel(spec: EngineSpec, arch: str) -> Any:
    """The sampling kernel of an engine in the current context; None where none reads its logits.

    Raises:
        UnsupportedError: no compiler is installed.
        KernelError: it did not compile or load.
    """
    if not samples_on_device(spec):
        return None
    build = sample_build(spec.logits_dtype, DType.INT64, vocab_size=spec.vocab_size)
    return KERNELS.load(build, arch)


def load_token_kernel(spec: EngineSpec, arch: str) -> Any:
    """The kernel that takes tokens of the step before, in the current context.

    None where the tokens of an engine are chosen on the host.

    Raises:
        UnsupportedError: no compiler is installed.
        KernelError: it did not compile or load.
    """
    if not spec.greedy_in_engine and not samples_on_device(spec):
        return None
    return KERNELS.load(TAKE_TOKENS, arch)


def warm_kernels(spec: EngineSpec, arch: str) -> None:
    """Compile and load every kernel of an engine in the current context.

    Raises:
        UnsupportedError: no kernel covers a layer, or no compiler is installed.
        KernelError: a kernel did not compile or load.
    """
    for layer in dict.fromkeys(spec.layers):
        request = AttentionPlanRequest(
            arch=arch,
            attention=layer,
            activation_dtype=spec.activation_dtype,
            kv_cache_dtype=spec.kv_cache_dtype,
            step=StepShape(num_tokens=1, num_seqs=1, table_width=1),
        )
        KERNELS.warm(warm_keys(request))


def make_context(engine: Any, profile: int, *, cache: JitCache) -> Any:
    """An execution context without memory of its own; its profile is not chosen yet.

    RTX compiles its kernels for each shape that it meets, by default in the background. Then a
    CUDA graph could hold the slow kernels for good, and two equal steps could differ in their
    last bits. Decode steps have few shapes: they wait for their own kernels. The token count of
    a prefill step is rarely seen twice: it runs on the kernels that fit every shape.

    Args:
        engine: TensorRT engine.
        profile: what the context is for.
        cache: kernels that were compiled before.
    """
    api = trt.load()
    settings = engine.create_runtime_config()
    settings.set_execution_context_allocation_strategy(
        api.ExecutionContextAllocationStrategy.USER_MANAGED
    )
    strategies = getattr(api, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is not None:
        settings.dynamic_shapes_kernel_specialization_strategy = (
            strategies.EAGER if profile == GENERATION_PROFILE else strategies.NONE
        )
    cache.attach(settings)
    return engine.create_execution_context(runtime_config=settings)


def _covers(capabilities: Sequence[str], arch: str) -> bool:
    found = tuple(map(int, _capability(arch).split(".")))
    for text in capabilities:
        wanted = tuple(map(int, text.removesuffix("+").split(".")))
        if found == wanted or (text.endswith("+") and found > wanted):
            return True
    return False


def _capability(arch: str) -> str:
    digits = arch.removeprefix("sm_")
    return f"{digits[:-1]}.{digits[-1]}"


def _check_memory(device: Device, spec: EngineSpec, *, plan_bytes: int) -> None:
    """Refuse what cannot fit before any of it is there."""
    pools, free = spec.pool_bytes(), device.free_bytes()
    layers = spec.layer_output_bytes()
    if pools + layers + plan_bytes > free:
        also = f", the layers' outputs {layers:,}" if layers else ""
        raise ExecutionError(
            f"the KV pools need {pools:,} bytes{also} and the plan {plan_bytes:,}, and device "
            f"{device.ordinal} has {free:,} bytes free; end other processes, or build the engine "
            "with fewer pages"
        )


def _deserialize(plan: bytes, path: Path, lines: trt.LogLines) -> tuple[Any, object]:
    """The engine, and what must outlive it; `path` is for messages."""
    api = trt.load()
    # The plugin classes derive from TensorRT's: importing them loads TensorRT.
    from paged_trt.plugins import creator

    creator.register()
    runtime = api.Runtime(trt.logger(lines))
    # A plan may carry host code; ours never does.
    runtime.engine_host_code_allowed = False
    CALLBACK_ERRORS.clear()
    engine = runtime.deserialize_cuda_engine(plan)
    cause = CALLBACK_ERRORS.first
    if cause is not None:
        raise cause
    if engine is None:
        problem = f"{trt.flavor()} {trt.version()} does not load {path} on this device"
        raise tensorrt_error(UnsupportedError, problem, log=lines.tail())
    return engine, runtime
