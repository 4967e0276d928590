"""Results files of a GPU host."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paged_trt.plugins import cuda, trt
from paged_trt.plugins.errors import ConfigError, UnsupportedError
from paged_trt.scripts.machine import gpu_and_driver
from paged_trt.scripts.results import Results, commit, read_results

METHODS: Final = {
    "e2e": (
        "greedy decode of a ragged batch, tokens and logits against the reference executor on the "
        "CPU; step times are host times from the inputs of a decode step to its logits in host "
        "memory, enqueue is the host time of one plugin call, and eager_us_per_layer beside it the "
        "whole eager step over its layers, TensorRT's own calls and kernels included; median, "
        "minimum and maximum of the second of two runs"
    ),
    "gpu-matrix": (
        "kernels against NumPy in float64 over the same pools; the error of each token row is at "
        "most twice that of a computation of the same precision, and one rounding of the output; "
        "the row whose error is the largest part of its allowance is kept; pool bytes after an "
        "append are equal"
    ),
    "gpu-tests": "pytest over tests/gpu, one row per file and run of pytest",
    "polygraphy": (
        "`polygraphy run` of the plan against inputs and outputs that the reference executor made "
        "on another machine's CPU, with the tolerances that `paged-trt polygraphy` printed there"
    ),
    "profile": (
        "Nsight Compute around one call of each cell and library, after two calls without it: "
        "every kernel runs once per pass, alone, with the memory it changes put back and the "
        "caches emptied before each pass, clocks not locked; microseconds are of that, and no "
        "benchmark; "
        "a row's percentages, stalls and waves are of the longest kernel of its call, stalls as "
        "shares of the time of its warps; pipes and issue slots are of the cycles in which a "
        "multiprocessor works, DRAM is of all; `metrics` are Nsight Compute's own, in base units"
    ),
    "racecheck-orders": (
        "kernels that hand shared memory on in one order each, under compute-sanitizer's racecheck "
        "in its analysis mode: `freed` says who tells that a buffer is free, `awaited` who asks, "
        "`filled` how it is filled again; hazards are summed over the pairs of accesses that were "
        "reported of a kernel; `is_race` are races on purpose; `is_right` are the sums of what was "
        "read, and `Unordered` reads nothing"
    ),
    "run": "`paged-trt run` with the same prompts, greedy, on each executor",
    "sanitizer": (
        "compute-sanitizer around every process of pytest; errors and hazards are summed over the "
        "processes; return codes of driver calls are not errors; torch allocates each tensor by "
        "itself; `covered` are the tests that passed under the tool"
    ),
}


def results_path(output: Path, kind: str, *, device: int, label: str = "") -> Path:
    """`<kind>[-<label>]-<gpu>-<date>.json` in a folder.

    Args:
        output: the folder.
        kind: of the results.
        device: number of the CUDA device.
        label: what tells two files of a kind apart, such as a model.
    """
    gpu, _ = gpu_and_driver(device)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    date = datetime.datetime.now(datetime.UTC).date()
    return output / "-".join(filter(None, (kind, label, slug, f"{date:%Y%m%d}.json")))


def tensorrt_in_use() -> str:
    """Flavour and version of TensorRT."""
    try:
        return f"{trt.flavor()} {trt.version()}"
    except UnsupportedError:
        return "not installed"


def write_results(
    path: Path,
    kind: str,
    rows: list[dict[str, Any]],
    *,
    tensorrt: str = "not used",
    device: int,
    tree: str | None,
    peers: Mapping[str, str] | None = None,
    note: str = "",
) -> Path:
    """Write a results file; one that is there is replaced.

    Args:
        path: the file.
        kind: one of METHODS.
        rows: what was measured.
        tensorrt: flavour and version.
        device: number of the CUDA device.
        tree: commit of the tree that ran; None asks git.
        peers: version of each other library.
        note: what the method did not do this time.
    """
    gpu, driver = gpu_and_driver(device)
    Results.model_validate(
        {
            "kind": kind,
            "commit": tree or commit(),
            "date": datetime.datetime.now(datetime.UTC).date(),
            "gpu": gpu,
            "driver": driver,
            "cuda": cuda.nvrtc_version(),
            "tensorrt": tensorrt,
            "method": METHODS[kind] + (f"; {note}" if note else ""),
            "peers": dict(peers or {}),
            "rows": rows,
        }
    ).write(path)
    return path


def name_commit(output: Path, tree: str) -> None:
    """Give results files the commit that ran where git did not know it.

    There is no git, or it has an older commit and sees what was carried there since as changes.
    """
    for path in output.glob("*.json"):
        try:
            found = read_results(path)
        except ConfigError:
            # Other reports are JSON too.
            continue
        if found.commit == "unknown" or found.commit.endswith("-dirty"):
            found.model_copy(update={"commit": tree}).write(path)
