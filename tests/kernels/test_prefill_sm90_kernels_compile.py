"""Hopper's prefill kernels compile without spills and keep their products in flight."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_prefill_sm90 import (
    HEAD_DIMS,
    prefill_sm90_build,
    shared_bytes,
)
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

BF16, FP16 = DType.BFLOAT16, DType.FLOAT16
ARCH = "sm_90a"
PLAIN, SPLIT = KernelPath.PREFILL_SM90, KernelPath.PREFILL_SM90_SPLIT
BLOCK_SHARED_LIMIT = 227 * 1024
# 384 threads of 168 registers are what a multiprocessor has; warpgroups then hand some over.
REGISTERS = 168


def key(
    path: KernelPath,
    dtype: DType,
    head_dim: int,
    group_size: int,
    kv: DType | None = None,
    **features: bool,
) -> KernelKey:
    return KernelKey(
        path=path,
        arch=ARCH,
        activation_dtype=dtype,
        kv_cache_dtype=kv or dtype,
        head_dim=head_dim,
        value_head_dim=head_dim,
        group_size=group_size,
        **features,
    )


KEYS = [
    key(PLAIN, BF16, 128, 4),
    key(SPLIT, BF16, 128, 4),
    key(PLAIN, FP16, 128, 7),
    key(PLAIN, BF16, 128, 8, has_window=True, has_softcap=True),
    key(PLAIN, BF16, 64, 1, has_window=True),
    key(PLAIN, BF16, 256, 4, has_window=True),
    key(SPLIT, BF16, 256, 4),
    # From pages that were gathered out of 8-bit pools: with the scales of those.
    key(PLAIN, BF16, 128, 4, DType.FLOAT8),
    key(SPLIT, FP16, 128, 8, DType.INT8, has_window=True, has_softcap=True),
    key(PLAIN, BF16, 256, 8, DType.FLOAT8, has_softcap=True),
    key(SPLIT, BF16, 64, 1, DType.INT8),
]


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


@functools.cache
def compile_kernel(kernel: KernelKey) -> tuple[bytes, str]:
    """Machine code and log, with a proof that Python and CUDA agree on the shared memory."""
    build = prefill_sm90_build(kernel)
    layout = build.name_expression.replace("prefill_sm90<", "PrefillLayout<")
    source = (
        f'#include "{build.source}"\n'
        f"static_assert({layout}::kSharedBytes == {build.shared_bytes});\n"
        f"static_assert(paged_trt::kPrefillThreads == {build.threads});\n"
    )
    include = [str(KERNEL_DIRECTORY), pathfinder.find_nvidia_header_directory("cudart")]
    options = core.ProgramOptions(
        arch=ARCH, std="c++17", include_path=include, ptxas_options=["-v"]
    )
    log = _Log()
    code = core.Program(source, "c++", options).compile(
        "cubin", name_expressions=(build.name_expression,), logs=log
    )
    return bytes(code.code), log.text


def name_of(kernel: KernelKey) -> str:
    return re.sub(r"[ ,>-]+", "-", str(kernel))


@pytest.mark.parametrize("kernel", KEYS, ids=name_of)
def test_kernels_stay_in_registers(kernel: KernelKey) -> None:
    code, log = compile_kernel(kernel)
    assert code.startswith(b"\x7fELF")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert f"Used {REGISTERS} registers" in log
    # C7508: setmaxnreg is ignored; C7510 to C7513: products wait for each other.
    assert not re.findall(r"\(C75(?:08|1\d)\)", log), log


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", [PLAIN, SPLIT], ids=lambda path: path.value)
def test_the_end_of_a_split_tile_has_a_place_beside_it(path: KernelPath, head_dim: int) -> None:
    """The warps that wait for the next tile must not wait for this one's place.

    Its place is free after the cluster has merged it, and the cluster's barrier waits for every
    warp that has not ended: with one place for both, no split step of 256 columns ever ended.
    """
    build = prefill_sm90_build(key(path, BF16, head_dim, 4))
    layout = build.name_expression.replace("prefill_sm90<", "PrefillLayout<")
    places = 2 if path is SPLIT or head_dim <= 128 else 1
    source = (
        f'#include "prefill_sm90_layout.cuh"\nusing Layout = {layout};\n'
        f'static_assert(Layout::kQueryStages == {places}, "places");\n'
    )
    options = core.ProgramOptions(
        arch=ARCH,
        std="c++17",
        include_path=[str(KERNEL_DIRECTORY), pathfinder.find_nvidia_header_directory("cudart")],
    )
    code = core.Program(source, "c++", options).compile("cubin")
    assert bytes(code.code).startswith(b"\x7fELF")


def test_the_products_and_copies_are_hoppers(tmp_path: Path) -> None:
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("nvdisasm is not installed; `pip install nvidia-cuda-nvdisasm`")
    code, _ = compile_kernel(KEYS[0])
    path = tmp_path / "kernel.cubin"
    path.write_bytes(code)
    listing = subprocess.run(
        [disassembler, "-c", str(path)], check=True, capture_output=True, text=True
    ).stdout
    # Scores and outputs of 128 keys are 8 products each: a first step of 64 and one of 128, then
    # steps of both kinds for a masked, two full and a last full tile, and the last outputs.
    assert len(re.findall(r"HGMMA\.64x128x16", listing)) >= 8 * (1 + 2 * 4 + 1)
    assert len(re.findall(r"HGMMA\.64x64x16", listing)) == 8
    assert "UTMALDG.4D" in listing
    assert "USETMAXREG" in listing
    assert not re.findall(r"\b(?:LDL|STL)\b", listing)


def test_pools_of_8_bits_share_a_kernel() -> None:
    """What was gathered has one type, whichever pool it came from."""
    float8, int8 = (
        prefill_sm90_build(key(PLAIN, BF16, 128, 4, kv)) for kv in (DType.FLOAT8, DType.INT8)
    )
    assert float8 == int8 != prefill_sm90_build(KEYS[0])


def find_disassembler() -> str | None:
    wheels = Path(pathfinder.find_nvidia_header_directory("cudart")).parent / "bin"
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=str(wheels))


def test_blocks_fit_a_multiprocessor() -> None:
    for head_dim in HEAD_DIMS:
        assert shared_bytes(head_dim) <= BLOCK_SHARED_LIMIT


@pytest.mark.parametrize(
    "kernel",
    [
        dataclasses.replace(KEYS[0], path=KernelPath.PREFILL),
        dataclasses.replace(KEYS[0], head_dim=96, value_head_dim=96),
        dataclasses.replace(KEYS[0], value_head_dim=64),
        dataclasses.replace(KEYS[0], kv_cache_dtype=FP16),
        dataclasses.replace(KEYS[0], group_size=129),
    ],
    ids=["path", "head_dim", "value_head_dim", "types", "group"],
)
def test_keys_without_a_kernel_are_refused(kernel: KernelKey) -> None:
    with pytest.raises(UnsupportedError, match=r"prefill"):
        prefill_sm90_build(kernel)
