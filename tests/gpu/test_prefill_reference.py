"""The vectorised reference of the prefill tests is the one that was written from the contract."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.decode_cases import Case, make_inputs, truth_of
from gpu.prefill_reference import allowed_error, attend

from paged_trt.plugins.dtypes import DType

LAYOUT = {"lengths": (3, 130, 140, 300), "new_tokens": (3, 130, 9, 1), "padding_tokens": 2}
CASES = [
    Case(**LAYOUT, head_dim=16, value_head_dim=32, kv=DType.FLOAT8, rope=1, window=40),
    Case(**LAYOUT, head_dim=32, activation=DType.FLOAT16, kv=DType.FLOAT16, group=3, rope=2),
    Case(**LAYOUT, head_dim=16, kv=DType.INT8, softcap=3.0, has_sinks=True, rope=1, rotary_dim=6),
    Case(**LAYOUT, head_dim=16, activation=DType.FLOAT16, kv=DType.BFLOAT16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kv.value)
@pytest.mark.parametrize("bad_pages", [False, True])
def test_the_reference_agrees_with_the_slow_one(case: Case, bad_pages: bool) -> None:
    inputs = make_inputs(case)
    if bad_pages:
        inputs["page_table"][0, 0] = -1  # nothing visible
        inputs["page_table"][1, 1] = len(inputs["key_pool"])
        inputs["page_table"][3, 0] = -7
    expected, key_pool, value_pool = truth_of(case, inputs)
    actual = attend(case, inputs, key_pool, value_pool, rounded=False)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
    rounded = attend(case, inputs, key_pool, value_pool, rounded=True)
    assert np.abs(rounded - expected).max() < 0.05 * np.abs(expected).max()
    allowed = allowed_error(case, rounded, expected)
    assert (allowed.squeeze() > 0).tolist() == expected.any(axis=(1, 2)).tolist()
