"""The rule itself, on numbers chosen by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_dirs import small_spec

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.runtime.comparison import (
    SequenceResult,
    Tolerance,
    compare_sequence,
    tolerance_for,
    top2_gap_bound,
)

Array = npt.NDArray[Any]
TOLERANCE = Tolerance(atol=0.0, rtol=16 / 2048, tie_rtol=4 / 2048, reason="test")
MAGNITUDE = 64.0
BOUND = 4 * 2.0**-11 * MAGNITUDE


def rows(*tops: tuple[int, float]) -> Array:
    """Logits `[steps, 4]`: -64 fixes the magnitude, then one (token, logit) per step."""
    logits = np.zeros((len(tops), 4), np.float32)
    logits[:, 0] = -MAGNITUDE
    for step, (token, value) in enumerate(tops):
        logits[step, token] = value
    return logits


def compare(reference: Array, engine: Array, **changes: Any) -> SequenceResult:
    return compare_sequence(
        (reference.argmax(-1), reference),
        (engine.argmax(-1), engine),
        prompt_len=5,
        tolerance=dataclasses.replace(TOLERANCE, **changes),
    )


def tied(gap: float) -> tuple[Array, Array]:
    """Three steps; at the second the reference prefers token 1 to 2 by `gap`, the engine not."""
    reference = rows((1, 32.0), (1, 32.0), (3, 32.0))
    reference[1, 2] = 32.0 - gap
    engine = reference.copy()
    engine[1, 1], engine[1, 2] = 32.0 - gap, 32.0
    engine[2] = -engine[2]  # after a different token anything may follow
    return reference, engine


def test_equal_pair_passes() -> None:
    logits = rows((1, 32.0), (2, 16.0))
    result = compare(logits, logits)
    assert result.passed
    assert result.tokens_equal
    assert (result.steps_compared, result.max_difference) == (2, 0.0)


def test_bound_is_four_roundings_of_the_largest_magnitude() -> None:
    assert top2_gap_bound(rows((1, 32.0))[0], TOLERANCE) == BOUND
    float16 = tolerance_for(small_spec(DType.FLOAT16, DType.FLOAT16))
    bfloat16 = tolerance_for(small_spec(DType.BFLOAT16, DType.BFLOAT16))
    assert top2_gap_bound(rows((1, 32.0))[0], float16) == 4 * 2.0**-11 * MAGNITUDE
    assert top2_gap_bound(rows((1, 32.0))[0], bfloat16) == 4 * 2.0**-8 * MAGNITUDE


def test_tie_just_below_the_bound_is_excused_and_ends_the_comparison() -> None:
    result = compare(*tied(BOUND - 2.0**-10))
    assert result.passed
    assert result.excused
    assert not result.tokens_equal
    assert (result.steps_compared, result.num_steps) == (2, 3)
    assert result.token_difference is not None
    assert result.token_difference.step == 1
    assert result.token_difference.bound == BOUND
    assert "step 1: token 2 instead of 1, gap 0.124 < bound 0.125" in str(result.token_difference)


@pytest.mark.parametrize("gap", [BOUND, BOUND + 2.0**-10])
def test_tie_at_or_above_the_bound_is_a_difference(gap: float) -> None:
    # A wide logit tolerance: the token alone must fail the sequence.
    result = compare(*tied(gap), rtol=1.0)
    assert result.max_difference <= result.limit
    assert not result.passed
    assert not result.excused
    assert ">= bound" in str(result.token_difference)


def test_tie_of_two_excuses_no_third_token() -> None:
    reference, engine = tied(0.0)
    engine[1] = [-MAGNITUDE, 31.9, 31.9, 32.0]
    assert not compare(reference, engine, rtol=1.0).passed


@pytest.mark.parametrize(("difference", "passes"), [(0.49, True), (0.51, False)])
def test_logits_are_held_to_the_tolerance_of_the_largest(difference: float, passes: bool) -> None:
    reference = rows((1, 32.0), (1, 32.0))
    engine = reference.copy()
    engine[1, 3] += difference
    result = compare(reference, engine)
    assert result.tokens_equal
    assert result.limit == 16 / 2048 * MAGNITUDE
    assert result.worst_step == 1
    assert result.passed is passes


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_no_number_is_a_difference(poison: float) -> None:
    reference = rows((1, 32.0), (1, 32.0))
    engine = reference.copy()
    engine[1, 3] = poison
    result = compare_sequence(
        (reference.argmax(-1), reference),
        (reference.argmax(-1), engine),
        prompt_len=5,
        tolerance=TOLERANCE,
    )
    assert not result.passed
    assert result.to_json()["max_difference"] is None


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_reference_that_is_no_number_allows_nothing(poison: float) -> None:
    reference = rows((1, 32.0), (1, 32.0))
    reference[1, 3] = poison
    result = compare(reference, reference.copy())
    assert not result.passed
    assert json.dumps(result.to_json(), allow_nan=False)


def test_missing_step_is_a_difference_that_no_gap_excuses() -> None:
    reference = rows((1, 32.0), (1, 32.0))
    engine = reference.copy()
    engine[1] = np.nan
    result = compare_sequence(
        (reference.argmax(-1), reference),
        (np.array([1, -1]), engine),
        prompt_len=5,
        tolerance=dataclasses.replace(TOLERANCE, tie_rtol=100.0),
    )
    assert not result.passed
    assert not result.excused


def test_quantised_pools_have_wider_tolerances_that_say_so() -> None:
    plain = tolerance_for(small_spec(DType.FLOAT16, DType.FLOAT16))
    for dtype in (DType.INT8, DType.FLOAT8):
        wide = tolerance_for(small_spec(DType.FLOAT16, dtype))
        assert wide.rtol > plain.rtol
        assert f"{dtype.value} pools cannot meet the float16 tolerance" in wide.reason


def test_bfloat16_pool_rounds_as_bfloat16() -> None:
    mixed = tolerance_for(small_spec(DType.FLOAT16, DType.BFLOAT16))
    assert mixed.rtol == tolerance_for(small_spec(DType.BFLOAT16, DType.BFLOAT16)).rtol


def test_users_tolerance_replaces_the_projects_and_says_so() -> None:
    spec = small_spec(DType.FLOAT16, DType.FLOAT16)
    given = tolerance_for(spec, atol=0.5)
    assert (given.atol, given.rtol) == (0.5, 0.0)
    assert given.tie_rtol == tolerance_for(spec).tie_rtol
    assert "--atol" in given.reason


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_tolerance_that_is_no_tolerance_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="--rtol"):
        tolerance_for(small_spec(DType.FLOAT16, DType.FLOAT16), rtol=value)
