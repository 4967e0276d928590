"""The reference function against NumPy: one test per promise of the contract."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy_attention
import pytest
from golden.reference_cases import (
    KV_CACHE_DTYPES,
    PAGE,
    RAGGED,
    Case,
    assert_same_bytes,
    check,
    make_inputs,
    run_reference,
)

from paged_trt.plugins.dtypes import DType

PAGE_EDGES = (0, 1, 127, 128, 129, 255, 256)

STEPS = {
    "decode at page edges": Case(lengths=[1] * len(PAGE_EDGES), pasts=PAGE_EDGES),
    "prefill": Case(lengths=[1, 127, 128, 129, 256], pasts=[0] * 5),
    "append over page edges": Case(lengths=[2, 127, 129, 3], pasts=[127, 128, 1, 255]),
    "padding": Case(lengths=[2, 5, 0, 0], pasts=[128, 0, 0, 0], padding_tokens=3),
    "padded decode": Case(lengths=[1, 1, 0], pasts=[5, 130, 0], padding_tokens=1),
    "exact table": Case(lengths=[128, 1], pasts=[128, 255], table_padding=0),
    "wide table": Case(lengths=[1, 2], pasts=[7, 128], table_padding=6),
    "window of one": Case(**RAGGED, window=1),
    "window in a page": Case(**RAGGED, window=5),
    "window of a page": Case(**RAGGED, window=PAGE),
    "window over pages": Case(**RAGGED, window=PAGE + 1),
    "window over all": Case(**RAGGED, window=1000),
    "softcap": Case(**RAGGED, softcap=0.7),
    "sinks": Case(**RAGGED, has_sinks=True),
    "softcap and sinks": Case(**RAGGED, softcap=0.7, has_sinks=True, window=100),
    "rope half-split": Case(**RAGGED, rope=1),
    "rope interleaved": Case(**RAGGED, rope=2),
    "partial rope half-split": Case(**RAGGED, rope=1, rotary_dim=6),
    "partial rope interleaved": Case(**RAGGED, rope=2, rotary_dim=6),
    "narrow values": Case(**RAGGED, value_head_dim=8),
    "wide values": Case(**RAGGED, value_head_dim=24, group=3),
    "no groups": Case(**RAGGED, num_kv_heads=3, group=1),
    "one KV head": Case(**RAGGED, num_kv_heads=1, group=4),
}


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("step", STEPS)
def test_agrees_with_numpy(step: str, kv: DType) -> None:
    check(dataclasses.replace(STEPS[step], kv=kv))


@pytest.mark.parametrize("activation", [DType.BFLOAT16, DType.FLOAT32], ids=lambda d: d.value)
@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_agrees_with_numpy_for_other_activations(kv: DType, activation: DType) -> None:
    check(Case(**RAGGED, kv=kv, activation=activation, rope=1, window=100, has_sinks=True))


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_page_ids_do_not_matter(kv: DType) -> None:
    case = Case(lengths=[3, 1, 130], pasts=[126, 256, 0], kv=kv, rope=1)
    scrambled = make_inputs(case)
    table = scrambled["page_table"]
    used = table[table >= 0]
    order = np.concatenate([used, np.setdiff1d(np.arange(len(scrambled["key_pool"])), used)])
    identity = {**scrambled, "page_table": table.copy()}
    identity["page_table"][table >= 0] = np.arange(used.size)
    for pool in ("key_pool", "value_pool"):
        identity[pool] = scrambled[pool][order]
    results = run_reference(case, scrambled), run_reference(case, identity)
    assert_same_bytes(results[0][0], results[1][0])
    assert_same_bytes(results[0][1][order], results[1][1])
    assert_same_bytes(results[0][2][order], results[1][2])


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_padding_is_zero_and_writes_nothing(kv: DType) -> None:
    case = Case(lengths=[2, 0, 0], pasts=[127, 0, 0], padding_tokens=4, kv=kv, rope=1)
    inputs = make_inputs(case)
    for name in ("query", "key", "value"):
        inputs[name][2:] = np.nan
    output = check(case, inputs)
    assert_same_bytes(output[2:], np.zeros_like(output[2:]))


def test_a_step_of_padding_changes_nothing() -> None:
    case = Case(lengths=[0, 0], pasts=[0, 0], padding_tokens=3)
    inputs = make_inputs(case)
    output, key_pool, value_pool = run_reference(case, inputs)
    assert_same_bytes(output, np.zeros_like(output))
    assert_same_bytes(key_pool, inputs["key_pool"])
    assert_same_bytes(value_pool, inputs["value_pool"])


INVALID_IDS = ("-1", "num_pages", "int32 maximum", "int32 minimum")


def _invalid_id(name: str, num_pages: int) -> int:
    info = np.iinfo(np.int32)
    return dict(zip(INVALID_IDS, (-1, num_pages, info.max, info.min), strict=True))[name]


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("invalid", INVALID_IDS)
@pytest.mark.parametrize("page_index", [0, 1])
def test_an_invalid_page_is_masked_and_not_written(
    invalid: str, page_index: int, kv: DType
) -> None:
    case = Case(lengths=[4, 3], pasts=[126, 200], kv=kv)
    inputs = make_inputs(case)
    inputs["page_table"][0, page_index] = _invalid_id(invalid, len(inputs["key_pool"]))
    check(case, inputs)


@pytest.mark.parametrize("invalid", INVALID_IDS)
def test_a_row_that_sees_nothing_is_zero(invalid: str) -> None:
    case = Case(lengths=[2, 3], pasts=[130, 126])
    inputs = make_inputs(case)
    inputs["page_table"][0] = _invalid_id(invalid, len(inputs["key_pool"]))
    output = check(case, inputs)
    assert_same_bytes(output[:2], np.zeros_like(output[:2]))


def test_a_position_past_the_table_is_not_written() -> None:
    case = Case(lengths=[4], pasts=[126], table_padding=0)
    inputs = make_inputs(case)
    inputs["page_table"] = inputs["page_table"][:, :1].copy()
    check(case, inputs)


def test_nan_outside_the_window_is_not_seen() -> None:
    case = Case(lengths=[2], pasts=[300], window=100)
    inputs = make_inputs(case)
    for pool in ("key_pool", "value_pool"):
        inputs[pool][inputs["page_table"][0, 0]] = np.nan
        inputs[pool][inputs["page_table"][0, 1], :, : 300 - 100 + 1 - PAGE] = np.nan
    check(case, inputs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_non_finite_numbers_stay_in_their_sequence(name: str, value: float) -> None:
    case = Case(lengths=[3, 2, 1], pasts=[126, 3, 0])
    inputs = make_inputs(case)
    clean = run_reference(case, inputs)[0]
    inputs[name][3] = value
    output = run_reference(case, inputs)[0]
    assert not np.isfinite(output[3]).all()
    assert_same_bytes(output[[0, 1, 2, 5]], clean[[0, 1, 2, 5]])


def test_a_key_of_minus_infinity_has_no_weight() -> None:
    case = Case(lengths=[1], pasts=[3])
    inputs = make_inputs(case)
    inputs["query"][:] = np.abs(inputs["query"]) + 1
    inputs["key"][:] = -np.inf
    check(case, inputs)


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_chunked_prefill_equals_one_piece(kv: DType) -> None:
    whole = Case(lengths=[300], pasts=[0], kv=kv, rope=1, window=150, has_sinks=True)
    inputs = make_inputs(whole)
    expected = run_reference(whole, inputs)
    chunks, start = [], 0
    pools = {name: inputs[name] for name in ("key_pool", "value_pool")}
    for length in (1, 127, 130, 42):
        stop = start + length
        step = {name: inputs[name][start:stop] for name in ("query", "key", "value")}
        step["query_start_offsets"] = np.array([0, length], np.int32)
        step["past_lens"] = np.array([start], np.int32)
        output, *after = run_reference(whole, {**inputs, **pools, **step})
        pools = dict(zip(pools, after, strict=True))
        chunks.append(output)
        start = stop
    assert_same_bytes(pools["key_pool"], expected[1])
    assert_same_bytes(pools["value_pool"], expected[2])
    # Two float32 orders of summation may round to neighbouring float16 numbers.
    np.testing.assert_allclose(np.concatenate(chunks), expected[0], rtol=2.0**-10, atol=2.0**-17)


def test_sequences_may_share_a_prefix_page() -> None:
    case = Case(lengths=[1, 2], pasts=[130, 140])
    inputs = make_inputs(case)
    inputs["page_table"][1, 0] = inputs["page_table"][0, 0]
    check(case, inputs)


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_bytes_that_are_not_written_survive(kv: DType) -> None:
    """Every bit pattern, NaN with either sign among them, passes through unchanged."""
    case = Case(lengths=[1], pasts=[0], kv=kv)
    inputs = make_inputs(case)
    for pool in ("key_pool", "value_pool"):
        raw = inputs[pool].view(np.uint8)
        raw[:] = np.arange(raw.size).reshape(raw.shape)
    check(case, inputs)


FLOAT8_STORES = {
    # A tie goes to the even neighbour, 464 is one between 448 and the 480 that does not exist.
    1.0625: 1.0,
    1.1875: 1.25,
    -1.0625: -1.0,
    440.0: 448.0,
    449.0: 448.0,
    464.0: 448.0,
    480.0: 448.0,
    60000.0: 448.0,
    -60000.0: -448.0,
    np.inf: 448.0,
    -np.inf: -448.0,
    2.0**-10: 0.0,
    1.5 * 2.0**-9: 2.0**-8,
    np.nan: np.nan,
}
INT8_STORES = {
    0.5: 0,
    1.5: 2,
    2.5: 2,
    -0.5: 0,
    -1.5: -2,
    126.5: 126,
    127.5: 127,
    -127.5: -127,
    -128.0: -127,
    -500.0: -127,
    500.0: 127,
    np.inf: 127,
    -np.inf: -127,
    np.nan: 0,
}


@pytest.mark.parametrize(
    ("kv", "stores"), [(DType.FLOAT8, FLOAT8_STORES), (DType.INT8, INT8_STORES)]
)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_quantised_stores(kv: DType, stores: dict[float, float], scale: float) -> None:
    dim = len(stores)
    case = Case(lengths=[1], pasts=[0], kv=kv, head_dim=dim, value_head_dim=dim)
    inputs = make_inputs(case)
    inputs["kv_scales"][:] = scale
    for name in ("key", "value"):
        inputs[name][:] = np.array(list(stores)) * scale
    expected = numpy_attention.paged_attention(inputs, case.settings)
    actual = run_reference(case, inputs)
    page = inputs["page_table"][0, 0]
    for pool in (1, 2):
        assert_same_bytes(actual[pool], expected[pool])
        stored = actual[pool][page, 0, 0].astype(np.float32)
        np.testing.assert_array_equal(stored, np.array(list(stores.values()), np.float32))


def test_a_float16_pool_ignores_scales() -> None:
    case = Case(lengths=[2], pasts=[5])
    inputs = make_inputs(case)
    expected = run_reference(case, inputs)
    inputs["kv_scales"][:] = np.nan
    for left, right in zip(run_reference(case, inputs), expected, strict=True):
        assert_same_bytes(left, right)
