"""What `paged-trt doctor` finds out: one probe per library, each in a process of its own.

A library that ends its process, or hangs, becomes a finding and no crash. A probe prints one
JSON object as its last line.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins import trt
from paged_trt.plugins.errors import PagedTrtError, UnsupportedError

TIMEOUT_SECONDS: Final = 120
PROBE_ARCH: Final = "sm_80"
"""What kernels are compiled for where there is no device."""
_ERROR: Final = "error"
_MODULE: Final = "paged_trt.scripts.doctor_probes"
Probe = dict[str, Any]


def probe_device() -> Probe:
    """Driver and devices."""
    from paged_trt.plugins import cuda
    from paged_trt.plugins.cuda import check

    module = cuda.driver()
    devices = []
    for ordinal in range(check(module.cuDeviceGetCount(), "cuDeviceGetCount")):
        device = check(module.cuDeviceGet(ordinal), "cuDeviceGet")
        name = check(module.cuDeviceGetName(128, device), "cuDeviceGetName")
        devices.append(
            {
                "ordinal": ordinal,
                "name": bytes(name).split(b"\0")[0].decode(),
                "arch": cuda.device_arch(ordinal),
                "multiprocessors": cuda.multiprocessors(ordinal),
                "memory_bytes": check(module.cuDeviceTotalMem(device), "cuDeviceTotalMem"),
            }
        )
    version = int(check(module.cuDriverGetVersion(), "cuDriverGetVersion"))
    return {"cuda": f"{version // 1000}.{version % 1000 // 10}", "devices": devices}


def probe_tensorrt() -> Probe:
    """The flavour that PAGED_TRT_FLAVOR names."""
    from paged_trt.plugins import cuda
    from paged_trt.plugins.trt_probe import probe_flavor

    return dataclasses.asdict(probe_flavor(has_device=cuda.driver_available()))


def probe_kernels() -> Probe:
    """Compiler, headers, and our own kernels compiled for the device that is here."""
    from paged_trt.plugins import cuda
    from paged_trt.plugins.attention import AttentionSpec
    from paged_trt.plugins.dtypes import DType
    from paged_trt.plugins.launch.compiler import compile_arch
    from paged_trt.plugins.launch.dispatch import warm_keys
    from paged_trt.plugins.launch.loaded import build_of
    from paged_trt.plugins.launch.requests import AttentionPlanRequest
    from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY
    from paged_trt.plugins.operands import StepShape

    device = cuda.device_arch() if cuda.driver_available() else PROBE_ARCH
    arch = compile_arch(device)
    heads = AttentionSpec(
        num_q_heads=1, num_kv_heads=1, head_dim=64, value_head_dim=64, softmax_scale=0.125
    )
    request = AttentionPlanRequest(
        arch=device,
        attention=heads,
        activation_dtype=DType.FLOAT16,
        kv_cache_dtype=DType.FLOAT16,
        step=StepShape(num_tokens=1, num_seqs=1, table_width=1),
    )
    builds = [build_of(key) for key in warm_keys(request)]
    for build in builds:
        cuda.compile_cubin(
            f'#include "{build.source}"\n',
            arch=arch,
            name_expressions=[build.name_expression],
            include_directories=[KERNEL_DIRECTORY],
        )
    return {
        "nvrtc": cuda.nvrtc_version(),
        "headers": [str(each) for each in cuda.cuda_headers()],
        "arch": arch,
        "kernels": len(builds),
    }


def probe_tuning(device: str) -> Probe:
    """What plans that are measured now hold for."""
    from paged_trt.plugins.launch.tuning_target import tuning_target

    return dataclasses.asdict(tuning_target(int(device)))


def probe_onnxruntime() -> Probe:
    """A model of one node, run as the reference executor runs one."""
    import onnx

    from paged_trt.runtime.dense import open_session

    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "probe", value[:1], value[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=9)
    open_session(model.SerializeToString())
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    return {"version": onnxruntime.__version__, "providers": providers}


def probe_plan(directory: str, device: str) -> Probe:
    """Whether the plan of an engine directory fits TensorRT and device, by its manifest."""
    from paged_trt.plugins.manifest import read_manifest
    from paged_trt.runtime.tensorrt_loader import check_runnable

    return {"arch": check_runnable(read_manifest(Path(directory)).build, int(device))}


def probe_engine(directory: str, device: str) -> Probe:
    """What TensorRT says of the plan of an engine directory."""
    from paged_trt.plugins.manifest import check_files, read_manifest
    from paged_trt.runtime.tensorrt_loader import describe_plan

    folder = Path(directory)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return describe_plan(folder, manifest, ordinal=int(device))


PROBES: Final[dict[str, Callable[..., Probe]]] = {
    "device": probe_device,
    "tensorrt": probe_tensorrt,
    "kernels": probe_kernels,
    "onnxruntime": probe_onnxruntime,
    "tuning": probe_tuning,
    "plan": probe_plan,
    "engine": probe_engine,
}


def run_probe(name: str, *words: str, environment: Mapping[str, str] | None = None) -> Probe:
    """What a probe found in a process of its own, or `{"error": {"code", "message"}}`.

    Args:
        name: key of PROBES.
        words: its arguments.
        environment: changes to the environment.
    """
    # -P: a file in the current folder is not taken for a library.
    command = [sys.executable, "-P", "-m", _MODULE, name, *words]
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(  # noqa: S603 - this module, by this Python
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_SECONDS,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        return _error(UnsupportedError.code, f"it did not answer in {TIMEOUT_SECONDS} seconds")
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        return _error(UnsupportedError.code, _how_it_ended(done))
    return found if isinstance(found, dict) else _error(UnsupportedError.code, str(found))


def run_probes(
    wanted: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]],
) -> dict[str, Probe]:
    """Several probes at once.

    Args:
        wanted: label -> (name and arguments of the probe, changes to the environment).
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        running = {
            label: pool.submit(run_probe, *words, environment=environment)
            for label, (words, environment) in wanted.items()
        }
        return {label: each.result() for label, each in running.items()}


def flavor_environment(flavor: str) -> dict[str, str]:
    """Environment in which a flavour is the one that is used."""
    return {trt.FLAVOR_VARIABLE: flavor}


def _how_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    last = done.stderr.strip().splitlines()[-1:]
    tail = f": {last[0]}" if last else ""
    if done.returncode < 0:
        return f"the library ended the process with {signal.Signals(-done.returncode).name}{tail}"
    return f"the probe ended with exit code {done.returncode}{tail}"


def _error(code: str, message: str) -> Probe:
    return {_ERROR: {"code": code, "message": message}}


def main() -> None:
    """Run the probe that the command line names."""
    name, *words = sys.argv[1:]
    try:
        found = PROBES[name](*words)
    except PagedTrtError as error:
        found = _error(error.code, str(error))
    except Exception as error:  # whatever a library raises is what is being looked for
        found = _error(UnsupportedError.code, f"{type(error).__name__}: {error}")
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    # Destructors of a library that failed are none of our business.
    os._exit(0)


if __name__ == "__main__":
    main()
