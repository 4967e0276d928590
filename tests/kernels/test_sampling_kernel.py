"""The sampling kernel: it compiles everywhere, and on a CPU it draws what its NumPy twin draws."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from host_kernels import load_on_host
from kernels.test_decode_kernels_compile import compile_resources
from kernels.test_launch_args import ARCHITECTURES, compile_proof
from sampling_cases import Spec, make_case

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import KernelCompileError, UnsupportedError
from paged_trt.plugins.launch.args import SampleArgs, layout_proof
from paged_trt.plugins.launch.sampling import MAX_SAMPLED_VOCAB, SampleRow, sample_build
from paged_trt.runtime.sampler import sample_rows

LOGITS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_it_compiles_without_spills(arch: str) -> None:
    builds = [sample_build(dtype, DType.INT64, vocab_size=1000) for dtype in LOGITS]
    for build in builds if arch == "sm_90a" else builds[:1]:
        found = compile_resources(build, arch)
        # 1,024 threads share 65,536 registers.
        assert found.registers <= 64
        assert found.spill_bytes == 0
        assert found.shared_bytes < 4096


def test_ids_of_either_width() -> None:
    build = sample_build(DType.FLOAT16, DType.INT32, vocab_size=MAX_SAMPLED_VOCAB)
    assert build.name_expression == "paged_trt::sample<__half, int, 1024>"
    assert compile_resources(build, "sm_80").spill_bytes == 0


@pytest.mark.parametrize(
    ("logits", "tokens", "vocab", "reason"),
    [
        (DType.FLOAT8, DType.INT64, 9, "no sampling kernel reads float8 logits"),
        (DType.FLOAT16, DType.INT8, 9, "and writes int8 tokens"),
        (DType.FLOAT16, DType.INT64, MAX_SAMPLED_VOCAB + 1, "takes 1048576 tokens"),
    ],
)
def test_what_it_does_not_cover(logits: DType, tokens: DType, vocab: int, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        sample_build(logits, tokens, vocab_size=vocab)


def test_rows_of_parameters_are_one_layout() -> None:
    compile_proof(layout_proof((SampleRow,)), "sm_80")
    fields = list(SampleRow._fields_)
    moved = type("SampleRow", (ctypes.Structure,), {"_fields_": [*fields[1:], fields[0]]})
    with pytest.raises(KernelCompileError, match=r"SampleRow\.seed"):
        compile_proof(layout_proof((moved,)), "sm_80")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_on_host("sample", tmp_path_factory.mktemp("host"))


def run(
    library: ctypes.CDLL, name: str, logits: Any, specs: Sequence[Spec], steps: Sequence[int]
) -> tuple[Any, Any]:
    rows = (SampleRow * len(specs))(*sample_rows(specs, steps))
    tokens = np.full(len(specs), -7, np.int32 if name == "sample_bfloat16" else np.int64)
    logprobs = np.zeros(len(specs), np.float32)
    args = SampleArgs(
        logits=logits.ctypes.data,
        rows=ctypes.addressof(rows),
        tokens=tokens.ctypes.data,
        logprobs=logprobs.ctypes.data,
        row_stride=logits.shape[1],
        num_seqs=len(specs),
        vocab_size=logits.shape[1],
    )
    getattr(library, name)(ctypes.byref(args))
    return tokens, logprobs


@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 97, 1013])
@pytest.mark.parametrize("dtype", LOGITS, ids=lambda each: each.value)
def test_on_a_cpu_it_draws_what_its_twin_draws(
    library: ctypes.CDLL, dtype: DType, vocab: int
) -> None:
    case = make_case(dtype, 20, vocab)
    tokens, logprobs = run(library, f"sample_{dtype.value}", case.logits, case.specs, case.steps)
    np.testing.assert_array_equal(tokens, case.tokens)
    np.testing.assert_allclose(logprobs, case.logprobs, rtol=0, atol=2e-5)


def test_a_block_of_full_size(library: ctypes.CDLL) -> None:
    case = make_case(DType.FLOAT32, 8, 2500)
    tokens, _ = run(library, "sample_whole_block", case.logits, case.specs, case.steps)
    np.testing.assert_array_equal(tokens, case.tokens)


def test_rows_without_a_largest_logit(library: ctypes.CDLL) -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[0, 99] = np.nan
    logits[1] = -np.inf
    for temperature in (0.0, 1.0):
        specs = [Spec(temperature, 5, 0.9, 1)] * 3
        tokens, _ = run(library, "sample_float32", logits, specs, [0, 1, 2])
        assert tokens[:2].tolist() == [-1, 100]
        assert 0 <= tokens[2] < 100
