"""Append, decode and merge kernels compile for every architecture without spills, and the machine
code of the main ones has the loads and the products that it should.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.launch.kernels_decode import KernelBuild, kernel_build
from paged_trt.plugins.launch.registry import Feature, KernelKey, KernelPath, KernelVariant
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
    features: Feature = Feature.NONE,
) -> KernelKey:
    return KernelKey(
        path=path,
        arch=None,
        activation_dtype=activation,
        kv_cache_dtype=kv,
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        group_size=group_size,
        features=features,
    )


def compile_resources(build: KernelBuild, arch: str) -> Resources:
    return compile_kernel(build, arch)[1]


def compile_kernel(build: KernelBuild, arch: str) -> tuple[bytes, Resources]:
    include = [str(KERNEL_DIRECTORY), pathfinder.find_nvidia_header_directory("cudart")]
    options = core.ProgramOptions(
        arch=arch, std="c++17", include_path=include, ptxas_options=["-v"]
    )
    program = core.Program(f'#include "{build.source}"\n', "c++", options)
    log = _Log()
    code = program.compile("cubin", name_expressions=(build.name_expression,), logs=log)
    assert bytes(code.code).startswith(b"\x7fELF")
    return bytes(code.code), parse_resources(log.text)


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
# the registers or that the depth rule no longer holds. Two blocks of 128 threads fit up to 255.
BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
APPEND, MERGE = KernelPath.APPEND, KernelPath.MERGE
DIRECT, SPLIT = KernelPath.DECODE_DIRECT, KernelPath.DECODE_SPLIT
CLUSTER, COUNTER = KernelPath.DECODE_CLUSTER, KernelPath.DECODE_COUNTER
BALANCED = KernelPath.DECODE_BALANCED
ROPE, ALL = Feature.ROPE, Feature.WINDOW | Feature.SOFTCAP | Feature.ROPE
MAIN_KEYS = [
    (key(APPEND, BF16, BF16, 128), 64),
    (key(APPEND, BF16, FP8, 128, features=ROPE), 102),
    (key(APPEND, FP16, INT8, 96, features=ROPE), 102),
    (key(MERGE, BF16, BF16, 128), 64),
    (key(DIRECT, BF16, BF16, 128, 8), 255),
    (key(DIRECT, FP16, FP16, 128, 1), 255),
    (key(DIRECT, FP16, INT8, 128, 7), 255),
    (key(DIRECT, BF16, BF16, 96, 3, features=ALL), 255),
    (key(DIRECT, BF16, BF16, 256, 8), 255),
    (key(DIRECT, BF16, INT8, 128, 16), 255),
    (key(DIRECT, BF16, BF16, 192, 4, 128), 255),
    (key(DIRECT, FP16, BF16, 128, 4), 255),
    (key(DIRECT, BF16, FP16, 64, 4, 128), 255),
    (key(BALANCED, BF16, BF16, 128, 4, features=ALL), 255),
    (key(BALANCED, BF16, BF16, 64, 4), 255),
    (key(BALANCED, BF16, FP8, 64, 8), 255),
    (key(BALANCED, BF16, FP8, 256, 16), 255),
    (key(BALANCED, BF16, BF16, 128, 16), 255),
    (key(BALANCED, BF16, INT8, 80, 5, features=ALL), 255),
    (key(CLUSTER, BF16, FP8, 128, 8), 200),
    (key(CLUSTER, BF16, BF16, 128, 16, features=ROPE), 255),
    (key(CLUSTER, BF16, BF16, 256, 16, features=ROPE), 255),
    (key(CLUSTER, FP16, INT8, 96, 3, features=ALL), 200),
    (key(COUNTER, BF16, FP8, 128, 4), 200),
    (key(COUNTER, FP16, FP16, 64, 1), 200),
    (key(COUNTER, BF16, BF16, 256, 4, features=ALL), 255),
    (key(COUNTER, BF16, FP8, 64, 12, features=ALL), 255),
    (key(SPLIT, BF16, BF16, 128, 4), 200),
    (key(SPLIT, FP16, INT8, 128, 4), 210),
    (key(SPLIT, BF16, BF16, 128, 16), 240),
]
OTHER_KEYS = [
    key(APPEND, FP16, FP8, 96, features=ROPE),
    key(MERGE, FP16, FP16, 80),
    key(DIRECT, BF16, FP8, 128, 4),
    key(BALANCED, FP16, INT8, 64, 16),
    key(COUNTER, FP16, FP16, 256, 8, features=ALL),
    key(SPLIT, BF16, BF16, 128, 8),
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


@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
def test_clusters_compile_where_they_exist(arch: str) -> None:
    check(compile_resources(kernel_build(key(CLUSTER, BF16, BF16, 128, 4)), arch), 255)


# What `paged-trt bench plans` times and no engine runs.
VARIANTS = [
    (key(COUNTER, BF16, FP8, 128, 4), KernelVariant(warps=4, other_depth=True)),
    (key(CLUSTER, BF16, BF16, 128, 8), KernelVariant(warps=4)),
]


@pytest.mark.parametrize(("kernel", "variant"), VARIANTS, ids=name_of)
def test_variants_stay_in_registers(kernel: KernelKey, variant: KernelVariant) -> None:
    build = kernel_build(kernel, variant)
    assert build.name_expression != kernel_build(kernel).name_expression
    check(compile_resources(build, MAIN_ARCH), 255)


def test_an_append_loads_all_before_it_stores_16_bytes_at_once(tmp_path: Path) -> None:
    build = kernel_build(key(APPEND, BF16, BF16, 128))
    listing = disassembled(compile_kernel(build, MAIN_ARCH)[0], tmp_path)
    moves = re.findall(r"\b(LDG|STG)\.E\.128 ", listing)
    assert moves == ["LDG"] * 8 + ["STG"] * 8
    # The counters of the decode behind, by warps with a token and by those without one.
    assert len(re.findall(r"STG\.E ", listing)) == 2
    # Nothing is read before the kernel ahead has ended, but then it is at once.
    waiting = listing.rindex("ACQBULK")
    assert waiting < listing.index("LDG.E")
    assert listing[waiting : listing.index("LDG.E.128 ")].count(";\n") < 20


def test_an_append_divides_only_where_it_has_to(tmp_path: Path) -> None:
    """The quotients of four rounds are products; one loop behind them divides a chunk."""
    build = kernel_build(key(APPEND, BF16, FP8, 128))
    listing = disassembled(compile_kernel(build, MAIN_ARCH)[0], tmp_path)
    assert len(re.findall(r"STG\.E\.64 ", listing)) == 2 * 4 + 1
    assert len(re.findall(r"\bFCHK\b", listing)) == 8
    assert not re.findall(r"\b(?:LDL|STL|BAR)\b", listing)


def check(resources: Resources, register_limit: int) -> None:
    assert resources.spill_bytes == 0
    assert resources.stack_bytes == 0
    assert resources.shared_bytes <= SHARED_LIMIT
    assert resources.registers <= register_limit


ODD_DIMS = [key(BALANCED, BF16, BF16, dim, 2, 256 - dim) for dim in (16, 48, 112, 144, 208, 240)]


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


# What only one kind of kernel has: stores into another block's shared memory, and a counter.
MARKS = {CLUSTER: r"STAS\.128", COUNTER: r"ATOMG\S*\.INC", BALANCED: r"ATOMG\S*\.INC"}
PRODUCTS = {BF16: r"HMMA\.16816\.F32\.BF16 ", FP8: r"HMMA\.16816\.F32 "}
# Instructions of a step of a warp, 8 KB of keys and values, in its rare branches too. Addresses
# that are computed for each load, or a feature that is off and not gone, pass them.
STEP_LIMITS = {BF16: 400, FP8: 540}


@pytest.mark.parametrize("kv", [BF16, FP8], ids=lambda kv: kv.value)
@pytest.mark.parametrize("path", [DIRECT, CLUSTER, COUNTER, BALANCED], ids=lambda path: path.value)
def test_the_machine_code_loads_16_bytes_and_multiplies(
    path: KernelPath, kv: DType, tmp_path: Path
) -> None:
    code, resources = compile_kernel(kernel_build(key(path, BF16, kv, 128, 4)), MAIN_ARCH)
    check(resources, 250 if path in {DIRECT, BALANCED} else 200)
    listing = disassembled(code, tmp_path)
    assert not re.findall(r"\b(?:LDL|STL)\b", listing)
    assert "ACQBULK" in listing  # waits for the kernel before
    loop = loop_of(listing)
    text = "\n".join(loop)
    steps = 2 if path in {DIRECT, BALANCED} else 1  # in flight, and so in a round of the loop
    # Keys and values of a step, each once without a mask and once with one.
    assert len(re.findall(r"LDG\.E\.128 ", text)) == steps * 2 * 16
    assert len(re.findall(PRODUCTS[kv], text)) == steps * (16 if kv is BF16 else 32)
    assert len(re.findall(r"F2FP\.F16\.E4M3", text)) == steps * (0 if kv is BF16 else 128)
    assert len(loop) <= steps * STEP_LIMITS[kv]
    for other, mark in MARKS.items():
        assert bool(re.search(mark, listing)) == (MARKS.get(path) == MARKS[other])


def disassembled(code: bytes, folder: Path) -> str:
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("nvdisasm is not installed; `pip install nvidia-cuda-nvdisasm`")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(code)
    command = [disassembler, "-c", str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def find_disassembler() -> str | None:
    wheels = Path(pathfinder.find_nvidia_header_directory("cudart")).parent / "bin"
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=str(wheels))


def loop_of(listing: str) -> list[str]:
    """Instructions of the first loop with products: from its label to the branch back."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*);", line):
            instructions.append(found[1])
            back = re.search(r"\bBRA\S* .*`\((\.L_x_\d+)\)", found[1])
            loop = instructions[labels[back[1]] :] if back and back[1] in labels else []
            if any("HMMA" in text for text in loop):
                return loop
    raise AssertionError("no loop has products")
