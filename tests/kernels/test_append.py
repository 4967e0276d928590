"""The append kernel on a CPU, thread by thread: the bytes of the specification and no others; and
its quotients, which are those of a division.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from gpu.decode_cases import Case, Inputs, make_inputs, truth_of
from host_kernels import load_on_host

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.args import AppendArgs
from paged_trt.plugins.launch.kernels_decode import (
    APPEND_THREADS,
    LANE_ELEMENTS,
    MOST_APPEND_ROUNDS,
    append_rounds,
)
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY

BF16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT8, DType.INT8
COUNTERS = 300


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_on_host("append", tmp_path_factory.mktemp("host"))


def run(library: ctypes.CDLL, case: Case, inputs: Inputs, rounds_per_warp: int) -> list[Any]:
    """Both pools after the kernel; its counters are zero."""
    attention = case.attention
    dims = (attention.head_dim, attention.value_head_dim)
    tensors = {name: np.ascontiguousarray(array).copy() for name, array in inputs.items()}
    counters = np.full(COUNTERS + 1, 7, np.int32)
    tokens, num_seqs = len(inputs["key"]), len(inputs["past_lens"])
    args = AppendArgs(
        **{name: tensors[name].ctypes.data for name, *_ in AppendArgs._fields_ if name in tensors},
        counters=counters.ctypes.data,
        key_token_stride=attention.num_kv_heads * dims[0],
        value_token_stride=attention.num_kv_heads * dims[1],
        num_tokens=tokens,
        num_seqs=num_seqs,
        table_width=inputs["page_table"].shape[1],
        num_pages=len(inputs["key_pool"]),
        num_kv_heads=attention.num_kv_heads,
        rope=case.rope,
        rotary_dim=attention.rotary_dim,
        num_counters=COUNTERS,
        rounds_per_warp=rounds_per_warp,
    )
    rounds = append_rounds(
        num_kv_heads=attention.num_kv_heads, head_dim=dims[0], value_head_dim=dims[1]
    )
    blocks = -(-tokens * 32 // APPEND_THREADS)
    grid = (ctypes.c_uint * 2)(blocks, -(-rounds // rounds_per_warp))
    features = 4 if case.rope else 0
    function = library[f"append_{case.kv.value}_{dims[0]}_{dims[1]}_{features}"]
    function(ctypes.byref(args), ctypes.byref(grid))
    assert counters.tolist() == [0] * COUNTERS + [7]
    for name in inputs:
        if not name.endswith("_pool"):
            assert tensors[name].tobytes() == np.ascontiguousarray(inputs[name]).tobytes()
    return [tensors["key_pool"], tensors["value_pool"]]


def assert_same(found: Any, expected: Any) -> None:
    """The same bytes; the sign and payload of a NaN are not specified."""
    numbers, wanted = found.astype(np.float32), expected.astype(np.float32)
    assert np.array_equal(np.isnan(numbers), np.isnan(wanted))
    kept = ~np.isnan(wanted)
    assert found[kept].tobytes() == expected[kept].tobytes()


SHORT = {"lengths": (1, 128, 129, 300)}
RAGGED = {"lengths": (129, 1, 140, 400), "new_tokens": (3, 1, 140, 5), "padding_tokens": 7}
CASES = {
    "copy": Case(num_kv_heads=5),
    "copy-ragged": Case(num_kv_heads=9, **RAGGED),
    "half-split": Case(rope=1, num_kv_heads=3, **SHORT),
    "interleaved": Case(rope=2, num_kv_heads=9, **RAGGED),
    "part-turns": Case(rope=1, rotary_dim=48, num_kv_heads=4, **RAGGED),
    "part-interleaved": Case(rope=2, rotary_dim=96, num_kv_heads=1, **SHORT),
    "odd-part-turns": Case(rope=1, rotary_dim=40, head_dim=80, value_head_dim=64, **RAGGED),
    "odd-interleaved": Case(rope=2, rotary_dim=36, head_dim=80, value_head_dim=64, **SHORT),
    "float8": Case(kv=FP8, rope=1, num_kv_heads=8, **RAGGED),
    "float8-interleaved": Case(kv=FP8, rope=2, rotary_dim=64, num_kv_heads=2, **SHORT),
    "float8-dims": Case(kv=FP8, head_dim=96, value_head_dim=256, num_kv_heads=7, **SHORT),
    "int8": Case(kv=INT8, rope=1, head_dim=80, value_head_dim=64, num_kv_heads=7, **RAGGED),
    "int8-odd": Case(kv=INT8, rope=1, rotary_dim=24, head_dim=80, value_head_dim=64, **SHORT),
}


@pytest.mark.parametrize("rounds_per_warp", [1, 3, MOST_APPEND_ROUNDS])
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_the_specification(
    library: ctypes.CDLL, name: str, rounds_per_warp: int
) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    with np.errstate(invalid="ignore"):
        truth = truth_of(case, inputs)
    for found, expected in zip(run(library, case, inputs, rounds_per_warp), truth[1:], strict=True):
        assert_same(found, expected)


# Nothing to divide by, scales beyond those whose quotients are corrected, and ordinary ones.
SCALES = (0.0, np.nan, np.inf, -0.5, 1e-40, 2.0**-61, 2.0**-60, 0.3, 448.0, 2.0**60, 3e30)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kv", [FP8, INT8], ids=lambda kv: kv.value)
def test_numbers_at_the_edge_are_quantised_as_specified(
    library: ctypes.CDLL, kv: DType, scale: float
) -> None:
    head_dim, value_head_dim = (128, 128) if kv is FP8 else (80, 64)
    case = Case(
        kv=kv, rope=1, head_dim=head_dim, value_head_dim=value_head_dim, lengths=(1, 129, 600)
    )
    inputs = make_inputs(case)
    edge = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-39, -1e-39, 1e-36, 447, 465, -0.001]
    for name in ("key", "value"):
        numbers = inputs[name].reshape(-1)
        numbers[::3][: 8 * len(edge)] = (edge * 8)[: len(numbers[::3])]
    inputs["kv_scales"][:, 1] = scale
    with np.errstate(all="ignore"):
        truth = truth_of(case, inputs)
        for found, expected in zip(run(library, case, inputs, 2), truth[1:], strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("bad", [-1, -7, 10_000, 2**31 - 1])
def test_pages_that_do_not_exist_are_not_written(library: ctypes.CDLL, bad: int) -> None:
    case = Case(rope=1, **RAGGED)
    inputs = make_inputs(case)
    inputs["page_table"][2, 0] = bad
    inputs["page_table"][3, 3] = bad
    truth = truth_of(case, inputs)
    for found, expected in zip(run(library, case, inputs, 4), truth[1:], strict=True):
        assert_same(found, expected)


def test_positions_beyond_the_table_are_not_written(library: ctypes.CDLL) -> None:
    case = Case(lengths=(100, 5000), new_tokens=(100, 3))
    inputs = make_inputs(case)
    for width in (1, 39):
        narrow = {**inputs, "page_table": inputs["page_table"][:, :width]}
        truth = truth_of(case, narrow)
        for found, expected in zip(run(library, case, narrow, 4), truth[1:], strict=True):
            assert_same(found, expected)


def quotients(library: ctypes.CDLL, values: Any, scales: Any) -> Any:
    found = np.empty(len(values), np.float32)
    library.quotients(
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_void_p(scales.ctypes.data),
        ctypes.c_void_p(found.ctypes.data),
        ctypes.c_long(len(values)),
    )
    return found


def test_a_corrected_product_is_the_quotient(library: ctypes.CDLL) -> None:
    """Numbers at random, and those whose quotient is as near as can be to halfway between two."""
    numbers = np.random.default_rng(0)
    count = 200_000
    scales = numbers.integers(2**23, 2**24, count)
    scales[:1000] = np.arange(2**24 - 1000, 2**24)
    scales |= 1  # odd: it has an inverse
    inverse = scales.copy()
    for _ in range(5):  # Newton's method modulo 2^25
        inverse = inverse * (2 - scales * inverse) % 2**25
    for sign in (-1, 1):
        # A midpoint m has 25 bits and is odd; m * scale is `sign` off a multiple of 2^24 or 2^25.
        for bits in (24, 25):
            middle = sign * inverse % 2**bits
            middle = np.where(middle < 2**24, middle + 2**24, middle)
            product = middle * scales - sign
            values = product >> bits
            is_exact = (product == values << bits) & (values < 2**24) & (values >= 2**23)
            check_quotients(library, values[is_exact], scales[is_exact])
    check_quotients(library, numbers.integers(2**23, 2**24, count), scales)


def check_quotients(library: ctypes.CDLL, values: Any, scales: Any) -> None:
    assert len(values) > 1000
    for exponent in (-60, -24, -23, 37):
        left = np.ldexp(values.astype(np.float32), np.int32(-22))
        right = np.ldexp(scales.astype(np.float32), np.int32(exponent))
        assert np.array_equal(quotients(library, left, right), left / right)


def test_the_host_knows_what_the_kernel_is_made_of() -> None:
    source = (KERNEL_DIRECTORY / "append.cu").read_text(encoding="utf-8")
    assert f"kAppendThreads = {APPEND_THREADS};" in source
    assert f"kMostRounds = {MOST_APPEND_ROUNDS};" in source
    assert f"kChunk = {LANE_ELEMENTS // 2};" in source
