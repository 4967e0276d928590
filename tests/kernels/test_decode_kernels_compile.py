"""Append, decode and merge kernels compile for every architecture without spills."""

from __future__ import annotations

import dataclasses
import re

import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_decode import KernelBuild, kernel_build
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

MAIN_ARCH = "sm_90a"
OTHER_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
# A static limit of CUDA; two blocks of it fit every multiprocessor from sm_80 on.
SHARED_LIMIT = 48 * 1024


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas says about one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def key(
    path: KernelPath,
    activation: DType,
    kv: DType,
    head_dim: int,
    group_size: int = 1,
    value_head_dim: int | None = None,
) -> KernelKey:
    return KernelKey(
        path=path,
        arch=None,
        activation_dtype=activation,
        kv_cache_dtype=kv,
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        group_size=group_size,
    )


def compile_resources(build: KernelBuild, arch: str) -> Resources:
    include = [str(KERNEL_DIRECTORY), pathfinder.find_nvidia_header_directory("cudart")]
    options = core.ProgramOptions(
        arch=arch, std="c++17", include_path=include, ptxas_options=["-v"]
    )
    program = core.Program(f'#include "{build.source}"\n', "c++", options)
    log = _Log()
    code = program.compile("cubin", name_expressions=(build.name_expression,), logs=log)
    assert bytes(code.code).startswith(b"\x7fELF")
    return parse_resources(log.text)


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def parse_resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    assert "Used" in log, log
    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


# Keys of models in use, with a generous limit of registers: a jump means that arrays have left
# the registers or that the depth rule no longer holds.
BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
DIRECT, SPLIT = KernelPath.DECODE_DIRECT, KernelPath.DECODE_SPLIT
MAIN_KEYS = [
    (key(KernelPath.APPEND, BF16, BF16, 128), 64),
    (key(KernelPath.APPEND, BF16, FP8, 128), 64),
    (key(KernelPath.APPEND, FP16, INT8, 128), 64),
    (key(KernelPath.MERGE, BF16, BF16, 128), 64),
    (key(DIRECT, BF16, BF16, 128, 4), 255),
    (key(DIRECT, BF16, BF16, 128, 8), 255),
    (key(DIRECT, FP16, FP16, 128, 1), 255),
    (key(DIRECT, BF16, FP8, 128, 4), 255),
    (key(DIRECT, FP16, INT8, 128, 7), 255),
    (key(DIRECT, BF16, BF16, 64, 4), 255),
    (key(DIRECT, BF16, FP8, 64, 8), 255),
    (key(DIRECT, BF16, BF16, 80, 1), 255),
    (key(DIRECT, BF16, INT8, 80, 5), 255),
    (key(DIRECT, BF16, BF16, 96, 3), 255),
    (key(DIRECT, BF16, BF16, 256, 8), 255),
    (key(DIRECT, BF16, FP8, 256, 16), 255),
    (key(DIRECT, BF16, BF16, 128, 16), 240),
    (key(DIRECT, BF16, INT8, 128, 16), 255),
    (key(DIRECT, BF16, BF16, 192, 4, 128), 220),
    (key(DIRECT, FP16, BF16, 128, 4), 255),
    (key(DIRECT, BF16, FP16, 64, 4, 128), 255),
    (key(SPLIT, BF16, BF16, 128, 4), 200),
    (key(SPLIT, BF16, FP8, 128, 8), 210),
    (key(SPLIT, FP16, INT8, 128, 4), 210),
    (key(SPLIT, FP16, FP16, 64, 1), 200),
    (key(SPLIT, BF16, BF16, 256, 4), 255),
    (key(SPLIT, BF16, BF16, 128, 16), 240),
]
OTHER_KEYS = [
    key(KernelPath.APPEND, FP16, FP8, 96),
    key(KernelPath.MERGE, FP16, FP16, 80),
    key(DIRECT, BF16, BF16, 128, 8),
    key(DIRECT, BF16, FP8, 128, 4),
    key(DIRECT, FP16, INT8, 64, 16),
    key(SPLIT, FP16, FP16, 256, 8),
]


def name_of(value: object) -> str | None:
    return re.sub(r"[ ,>-]+", "-", str(value)) if isinstance(value, KernelKey) else None


@pytest.mark.parametrize(("kernel", "register_limit"), MAIN_KEYS, ids=name_of)
def test_main_keys_stay_in_registers(kernel: KernelKey, register_limit: int) -> None:
    check(compile_resources(kernel_build(kernel), MAIN_ARCH), register_limit)


@pytest.mark.parametrize("arch", OTHER_ARCHITECTURES)
@pytest.mark.parametrize("kernel", OTHER_KEYS, ids=name_of)
def test_every_architecture_compiles(kernel: KernelKey, arch: str) -> None:
    check(compile_resources(kernel_build(kernel), arch), 255)


def check(resources: Resources, register_limit: int) -> None:
    assert resources.spill_bytes == 0
    assert resources.stack_bytes == 0
    assert resources.shared_bytes <= SHARED_LIMIT
    assert resources.registers <= register_limit


ODD_DIMS = [key(DIRECT, BF16, BF16, dim, 2, 256 - dim) for dim in (16, 48, 112, 144, 208, 240)]


@pytest.mark.parametrize("kernel", ODD_DIMS, ids=name_of)
def test_any_multiple_of_16_compiles(kernel: KernelKey) -> None:
    check(compile_resources(kernel_build(kernel), MAIN_ARCH), 255)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (key(DIRECT, BF16, BF16, 72), "head_dim=72"),
        (key(DIRECT, BF16, BF16, 64, 1, 512), "value_head_dim=512"),
        (key(DIRECT, DType.FLOAT32, BF16, 64), "float32"),
        (key(KernelPath.PREFILL, BF16, BF16, 64), "prefill"),
    ],
)
def test_keys_without_a_kernel_are_refused_by_name(kernel: KernelKey, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        kernel_build(kernel)
