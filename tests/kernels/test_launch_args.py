"""The argument structs of Python and CUDA are one layout, proved by the compiler."""

import ctypes

import pytest

from paged_trt.plugins import cuda
from paged_trt.plugins.errors import ConfigError, KernelCompileError, UnsupportedError
from paged_trt.plugins.launch import args
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY, kernel_source_sha256

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


def compile_proof(source: str, arch: str) -> cuda.Cubin:
    return cuda.compile_cubin(source, arch=arch, include_directories=[KERNEL_DIRECTORY])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layouts_agree(arch: str) -> None:
    source = args.layout_proof() + "__global__ void use(paged_trt::PrefillArgs args) {}\n"
    cubin = compile_proof(source, arch)
    assert cubin.code.startswith(b"\x7fELF")
    assert cubin.arch == arch


@pytest.mark.parametrize("struct", args.ARGUMENT_STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_mirrored(struct: type[ctypes.Structure]) -> None:
    """A rotation moves every field at once: the first one is named."""
    fields = list(struct._fields_)
    moved = type(struct.__name__, (ctypes.Structure,), {"_fields_": [*fields[1:], fields[0]]})
    with pytest.raises(KernelCompileError, match=rf"{struct.__name__}\.{fields[0][0]}"):
        compile_proof(args.layout_proof((moved,)), "sm_80")


@pytest.mark.parametrize("struct", args.ARGUMENT_STRUCTS, ids=lambda struct: struct.__name__)
def test_a_wider_field_is_refused(struct: type[ctypes.Structure]) -> None:
    fields = [(name, ctypes.c_int64 if name == "num_seqs" else t) for name, t in struct._fields_]
    wider = type(struct.__name__, (ctypes.Structure,), {"_fields_": fields})
    with pytest.raises(KernelCompileError, match=rf"{struct.__name__}\.num_seqs"):
        compile_proof(args.layout_proof((wider,)), "sm_80")


def test_name_expressions_are_mangled() -> None:
    cubin = cuda.compile_cubin(
        "template <int N> __global__ void fill(int* out) { out[threadIdx.x] = N; }",
        arch="sm_80",
        name_expressions=["fill<3>", "fill<4>"],
    )
    assert sorted(cubin.names) == ["fill<3>", "fill<4>"]
    assert all(name.encode() in cubin.code for name in cubin.names.values())


def test_a_bad_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match="`hopper` is no architecture"):
        cuda.compile_cubin("", arch="hopper")


def test_without_a_driver_the_device_is_refused_by_name() -> None:
    if cuda.driver_available():
        assert cuda.device_arch().startswith("sm_")
        return
    with pytest.raises(UnsupportedError, match="no CUDA device can be used"):
        cuda.device_arch()


def test_the_source_hash_follows_names_and_contents(tmp_path) -> None:
    (tmp_path / "a.cuh").write_text("1")
    first = kernel_source_sha256(tmp_path)
    (tmp_path / "note.txt").write_text("not a kernel")
    assert kernel_source_sha256(tmp_path) == first
    (tmp_path / "a.cuh").write_text("2")
    second = kernel_source_sha256(tmp_path)
    (tmp_path / "a.cuh").rename(tmp_path / "b.cuh")
    assert len({first, second, kernel_source_sha256(tmp_path)}) == 3
