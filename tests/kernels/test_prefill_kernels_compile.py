"""Prefill kernels compile for every architecture without spills, and fit its shared memory."""

from __future__ import annotations

import dataclasses
import re

import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_prefill import (
    STATIC_SHARED_BYTES,
    PrefillTile,
    prefill_build,
    prefill_grid,
    prefill_tile,
)
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY
from paged_trt.plugins.operands import StepShape

core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
# What CUDA grants a block, static and dynamic together.
BLOCK_SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}


def key(
    arch: str,
    activation: DType,
    kv: DType,
    head_dim: int,
    group_size: int = 1,
    value_head_dim: int | None = None,
) -> KernelKey:
    return KernelKey(
        path=KernelPath.PREFILL,
        arch=arch,
        activation_dtype=activation,
        kv_cache_dtype=kv,
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        group_size=group_size,
    )


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def check(kernel: KernelKey, register_limit: int) -> None:
    """Compile, with a proof that Python and CUDA agree on the shared memory."""
    build = prefill_build(kernel)
    block = build.name_expression.replace("prefill<", "Prefill<")
    source = f'#include "prefill.cu"\nstatic_assert({block}::kSharedBytes == {build.shared_bytes});'
    options = core.ProgramOptions(
        arch=kernel.arch,
        std="c++17",
        include_path=[
            str(KERNEL_DIRECTORY),
            pathfinder.find_nvidia_header_directory("cudart"),
        ],
        ptxas_options=["-v"],
    )
    log = _Log()
    core.Program(source, "c++", options).compile(
        "cubin", name_expressions=(build.name_expression,), logs=log
    )
    assert _number(r"(\d+) bytes spill stores", log.text) == 0
    assert _number(r"(\d+) bytes spill loads", log.text) == 0
    assert _number(r"(\d+) bytes stack frame", log.text) == 0
    assert _number(r"Used (\d+) registers", log.text) <= register_limit
    static = _number(r"(\d+) bytes smem", log.text)
    assert static <= STATIC_SHARED_BYTES
    assert build.shared_bytes + static <= BLOCK_SHARED_LIMITS[str(kernel.arch)]


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found, log
    return int(found[1])


# Register limits are those that allow the blocks of a multiprocessor that the tile counts on:
# two of 128 threads, or one of 256, at 255; below, a jump means that arrays left the registers.
MAIN_KEYS = [
    (key("sm_90a", BF16, BF16, 128, 4), 255),
    (key("sm_90a", BF16, BF16, 128, 1), 255),
    (key("sm_90a", BF16, BF16, 128, 7), 255),
    (key("sm_90a", FP16, FP16, 128, 8), 255),
    (key("sm_90a", BF16, FP8, 128, 4), 255),
    (key("sm_90a", FP16, INT8, 128, 4), 255),
    (key("sm_90a", FP16, BF16, 128, 2), 255),
    (key("sm_90a", BF16, FP16, 128, 2), 255),
    (key("sm_90a", BF16, BF16, 64, 8), 232),
    (key("sm_90a", FP16, FP8, 64, 16), 232),
    (key("sm_90a", BF16, BF16, 80, 1), 255),
    (key("sm_90a", BF16, FP8, 80, 5), 255),
    (key("sm_90a", BF16, BF16, 96, 3), 255),
    (key("sm_90a", BF16, BF16, 256, 8), 255),
    (key("sm_90a", BF16, FP8, 256, 16), 255),
    (key("sm_90a", BF16, BF16, 192, 16, 128), 255),
    (key("sm_90a", BF16, INT8, 192, 1, 128), 255),
]
OTHER_KEYS = [
    (BF16, BF16, 128, 4, 128),
    (BF16, FP8, 128, 4, 128),
    (FP16, INT8, 128, 1, 128),
    (FP16, FP16, 64, 16, 64),
    (BF16, BF16, 256, 8, 256),
    (FP16, BF16, 96, 3, 80),
]
ODD_DIMS = [key("sm_90a", BF16, BF16, dim, 2, 256 - dim) for dim in (16, 48, 112, 144, 208, 240)]


def name_of(value: object) -> str | None:
    if isinstance(value, KernelKey):
        return re.sub(r"[ ,>-]+", "-", str(value))
    return (
        "-".join(str(getattr(part, "value", part)) for part in value)
        if isinstance(value, tuple)
        else None
    )


@pytest.mark.parametrize(("kernel", "register_limit"), MAIN_KEYS, ids=name_of)
def test_main_keys_stay_in_registers(kernel: KernelKey, register_limit: int) -> None:
    check(kernel, register_limit)


@pytest.mark.parametrize("arch", [arch for arch in BLOCK_SHARED_LIMITS if arch != "sm_90a"])
@pytest.mark.parametrize("kernel", OTHER_KEYS, ids=name_of)
def test_every_architecture_compiles(kernel: tuple[DType, DType, int, int, int], arch: str) -> None:
    check(key(arch, *kernel), 255)


@pytest.mark.parametrize("kernel", ODD_DIMS, ids=name_of)
def test_any_multiple_of_16_compiles(kernel: KernelKey) -> None:
    check(kernel, 255)


def test_every_tile_fits_a_block() -> None:
    dims = range(16, 257, 16)
    for arch, limit in BLOCK_SHARED_LIMITS.items():
        for kv in (BF16, FP8):
            for head_dim in dims:
                for value_head_dim in dims:
                    kernel = key(arch, BF16, kv, head_dim, 1, value_head_dim)
                    shared = prefill_build(kernel).shared_bytes + STATIC_SHARED_BYTES
                    assert shared <= limit, kernel


def test_an_unknown_device_gets_the_smallest_tile() -> None:
    known = key("sm_86", BF16, BF16, 128)
    for arch in ("sm_999", None):
        assert prefill_tile(dataclasses.replace(known, arch=arch)) == prefill_tile(known)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_the_grid_holds_every_split_of_the_tokens(group: int) -> None:
    kernel = key("sm_90a", BF16, BF16, 128, group)
    rows = prefill_tile(kernel).rows
    for lengths in ([1] * 9, [1000], [129, 0, 1, 65, 64], [1, 2, 3] * 40, [0, 0, 500]):
        for padding in (0, 1, 200):
            counts = [*lengths, padding]
            needed = sum(-(-count * group // rows) for count in counts)
            step = StepShape(num_tokens=sum(counts), num_seqs=len(lengths), table_width=8)
            blocks, *_ = prefill_grid(kernel, step, num_kv_heads=2)
            assert needed * 2 <= blocks <= (needed + len(counts)) * 2


def test_a_tile_for_measurements_is_kept() -> None:
    kernel = key("sm_90a", BF16, BF16, 128)
    tile = PrefillTile(rows=64, tokens=32, warps=4, stages=3)
    build = prefill_build(kernel, tile)
    assert build.name_expression.endswith("64, 32, 4, 3>")
    assert build.threads == 128
    assert build.shared_bytes == 64 * 256 + 3 * 32 * 512


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (key("sm_90a", BF16, BF16, 72), "head_dim=72"),
        (key("sm_90a", BF16, BF16, 64, 1, 512), "value_head_dim=512"),
        (key("sm_90a", DType.FLOAT32, BF16, 64), "float32"),
        (dataclasses.replace(key("sm_90a", BF16, BF16, 64), path=KernelPath.APPEND), "append"),
    ],
)
def test_keys_without_a_kernel_are_refused_by_name(kernel: KernelKey, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        prefill_build(kernel)
