"""Draws: their numbers, their sets, their distribution, and what they do not depend on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.launch.sampling import MAX_SAMPLED_VOCAB, exponent_scale, top_p_share
from paged_trt.plugins.tensors import NO_NEXT_TOKEN
from paged_trt.runtime import sampler
from paged_trt.runtime.philox import philox, random_bits
from paged_trt.runtime.sampler import (
    draw_seed,
    greedy,
    kept,
    logprob_of,
    sample,
    sample_rows,
    token_weights,
    top_logprobs,
    with_seed,
)

LOG2E = np.float32(1.44269502)


@dataclasses.dataclass(frozen=True)
class Spec:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = 0


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Any:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_are_those_of_the_published_vectors(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    assert philox(np.array([counter]), np.array([key])).tolist() == [words]


def test_bits_depend_on_seed_and_step_alone() -> None:
    seeds = np.array([5, 5, 6, 2**63 - 1, 5], np.uint64)
    bits = random_bits(seeds, np.array([0, 1, 0, 0, 0]))
    assert bits[0] == bits[4]
    assert len(set(bits.tolist())) == 4
    words = philox(np.array([[1, 0, 0, 0]]), np.array([[5, 0]]))[0]
    assert int(bits[1]) == int(words[1]) << 32 | int(words[0])


def test_weights_are_powers_of_e() -> None:
    values = -np.linspace(0, 27, 100_001, dtype=np.float32)
    weights = token_weights(values, LOG2E).astype(np.float64) / 2.0**40
    np.testing.assert_allclose(weights, np.exp(values.astype(np.float64)), rtol=4e-6, atol=2**-39)
    assert weights[0] == 1.0
    assert (np.diff(weights) <= 0).all()


def test_weights_far_below_the_largest_are_nothing() -> None:
    values = np.array([0, -1e4, -np.inf, -3e38], np.float32)
    assert token_weights(values, LOG2E).tolist() == [1 << 40, 0, 0, 0]
    # The smallest temperatures: only what equals the largest one is left.
    scale = np.float32(exponent_scale(1e-300))
    assert token_weights(np.array([2, 2, 1.999], np.float32), scale).tolist() == [1 << 40] * 2 + [0]


def test_an_infinite_logit_takes_everything() -> None:
    logits = np.array([[1, np.inf, 0, np.inf, 9]], np.float32)
    drawn = {int(sample(logits, [Spec(seed=seed)], [0])[0][0]) for seed in range(40)}
    assert drawn == {1, 3}
    np.testing.assert_allclose(sample(logits, [Spec()], [0])[1], math.log(0.5), rtol=1e-6)


def chi_square(counts: Any, probabilities: Any) -> tuple[float, float]:
    """The statistic, and what it passes once in 10,000 times (Wilson and Hilferty)."""
    expected = counts.sum() * probabilities
    degrees = len(counts) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 7, 1.0), (1.0, 0, 0.8), (1.5, 12, 0.9)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    values = logits_of(1, 37, seed=4, spread=1.5)[0]
    probabilities = np.exp(values.astype(np.float64) / temperature)
    order = np.argsort(-probabilities)
    allowed = np.ones(37, bool)
    if top_k:
        allowed[order[top_k:]] = False
    probabilities = np.where(allowed, probabilities, 0) / probabilities[allowed].sum()
    if top_p < 1:
        last = int(np.searchsorted(np.cumsum(probabilities[order]), top_p))
        allowed[order[last + 1 :]] = False
        probabilities = np.where(allowed, probabilities, 0) / probabilities[allowed].sum()
    draws = 4_000
    # Half of the draws by seed, half by step.
    specs = [Spec(temperature, top_k, top_p, seed=max(0, i - draws // 2)) for i in range(draws)]
    steps = [min(i, draws // 2) for i in range(draws)]
    tokens, _ = sample(np.broadcast_to(values, (draws, 37)), specs, steps)
    counts = np.bincount(tokens, minlength=37)
    assert counts[~allowed].sum() == 0
    statistic, limit = chi_square(counts[allowed], probabilities[allowed])
    assert statistic < limit


@pytest.mark.parametrize("seed", range(20))
def test_sets_are_those_of_a_plain_sort(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(0, 2, 301).astype(np.float32)
    if seed % 2:
        values = np.round(values)  # many ties
    top_k, top_p = int(random.integers(1, 320)), float(random.uniform(0.01, 0.999))
    (row,) = sample_rows([Spec(0.7, top_k, top_p)], [0])
    found = kept(values, row)
    descending = np.sort(values)[::-1]
    expected = values >= descending[min(top_k, len(values)) - 1]
    weights = np.where(expected, np.exp((values.astype(np.float64) - values.max()) / 0.7), 0)
    shares = {v: weights[values >= v].sum() / weights.sum() for v in set(values[expected].tolist())}
    # The bound of the set: the largest logit from which on the share is reached.
    bound = max(v for v, share in shares.items() if share >= top_p)
    gap = min(abs(share - top_p) for share in shares.values())
    assert gap > 1e-6, "choose another seed: this one is decided by rounding"
    np.testing.assert_array_equal(found, expected & (values >= bound))


def test_equal_logits_are_all_in_or_all_out() -> None:
    values = np.array([1, 2, 2, 2, 0], np.float32)
    for top_k, expected in ((1, 3), (2, 3), (3, 3), (4, 4), (5, 5)):
        (row,) = sample_rows([Spec(1.0, top_k)], [0])
        assert kept(values, row).sum() == expected
    (row,) = sample_rows([Spec(1.0, 0, 1e-9)], [0])
    assert kept(values, row).tolist() == [False, True, True, True, False]


def test_zero_logits_are_equal_whatever_their_sign() -> None:
    logits = np.array([[0.0, -0.0, -1.0, -5.0]], np.float32)
    drawn = {int(sample(logits, [Spec(1.0, 1, seed=s)], [0])[0][0]) for s in range(40)}
    assert drawn == {0, 1}


@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 1000, 4099])
def test_a_temperature_of_0_is_greedy(vocab: int) -> None:
    logits = np.round(logits_of(50, vocab, seed=vocab))
    specs = [Spec(0.0, seed=None)] * 50
    assert sample(logits, specs, [0] * 50)[0].tolist() == greedy(logits)
    # As is a top-k of 1 where nothing ties.
    untied = logits_of(50, vocab, seed=vocab)
    assert sample(untied, [Spec(1.0, 1)] * 50, range(50))[0].tolist() == greedy(untied)


def test_a_draw_does_not_depend_on_its_batch() -> None:
    logits = logits_of(9, 501)
    random = np.random.default_rng(2)
    specs = [Spec(1.0, int(k), 0.9, seed=int(s)) for k, s in random.integers(0, 99, (9, 2))]
    steps = random.integers(0, 1000, 9).tolist()
    tokens, logprobs = sample(logits, specs, steps)
    order = random.permutation(9)
    moved = sample(logits[order], [specs[i] for i in order], [steps[i] for i in order])
    np.testing.assert_array_equal(moved[0], tokens[order])
    np.testing.assert_array_equal(moved[1], logprobs[order])
    for index in range(9):
        alone = sample(logits[index : index + 1], [specs[index]], [steps[index]])
        assert alone[0].tolist() == [tokens[index]]


def test_types_of_logits_that_agree_draw_the_same() -> None:
    narrow = logits_of(40, 501).astype(ml_dtypes.bfloat16)
    specs = [Spec(0.8, 50, 0.95, seed=i) for i in range(40)]
    wide = sample(narrow.astype(np.float32), specs, [3] * 40)[0]
    half = narrow.astype(np.float32).astype(np.float16)
    assert (half.astype(np.float32) == narrow.astype(np.float32)).all()
    np.testing.assert_array_equal(sample(half, specs, [3] * 40)[0], wide)


def test_logprobs_are_those_of_the_model() -> None:
    logits = logits_of(30, 777)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    specs = [Spec(t, k, p, seed=7) for t in (0, 0.5, 2.0) for k in (0, 5) for p in (1.0, 0.5)] * 2
    tokens, logprobs = sample(logits[: len(specs)], specs, range(len(specs)))
    np.testing.assert_allclose(logprobs, exact[np.arange(len(tokens)), tokens], rtol=0, atol=2e-5)
    alone, nothing = sample(logits[: len(specs)], specs, range(len(specs)), with_logprobs=False)
    np.testing.assert_array_equal(alone, tokens)
    assert not nothing.any()
    best = top_logprobs(logits[0], 5)
    assert [token for token, _ in best] == np.argsort(-exact[0])[:5].tolist()
    np.testing.assert_allclose([p for _, p in best], np.sort(exact[0])[::-1][:5], atol=2e-5)
    assert logprob_of(logits[0], best[0][0]) == best[0][1]


@pytest.mark.parametrize("spec", [Spec(0.0), Spec(1.0), Spec(1.0, 5, 0.5)])
def test_rows_without_a_largest_logit_are_named(spec: Spec) -> None:
    logits = logits_of(3, 50)
    logits[1, 7] = np.nan
    assert sample(logits, [spec] * 3, [0] * 3)[0][1] == NO_NEXT_TOKEN
    logits[1] = -np.inf
    assert sample(logits, [spec] * 3, [0] * 3)[0][1] == 50
    logits[1, 3] = -1e30
    assert sample(logits, [spec] * 3, [0] * 3)[0][1] == 3


def test_a_row_that_draws_needs_a_seed() -> None:
    with pytest.raises(ConfigError, match="needs a seed"):
        sample(logits_of(1, 5), [Spec(1.0, seed=None)], [0])
    seeded = with_seed(Spec(1.0, seed=None))
    assert 0 <= seeded.seed < 2**63
    assert with_seed(Spec(seed=3)).seed == 3
    assert draw_seed() != draw_seed()


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="1048576 tokens and the vocabulary has 1048577"):
        sample(np.zeros((1, MAX_SAMPLED_VOCAB + 1), np.float16), [Spec()], [0])
    logits = logits_of(1, MAX_SAMPLED_VOCAB)
    token = int(sample(logits, [Spec(1.0, 1)], [0])[0][0])
    assert token == int(logits.argmax())


def test_the_largest_sums_do_not_wrap() -> None:
    """Equal logits have the largest sum that there is: a draw is uniform over all of them."""
    logits = np.zeros((1, MAX_SAMPLED_VOCAB), np.float16)
    seeds = range(8)
    drawn = [int(sample(logits, [Spec(1.0, 0, 1 - 1e-9, s)], [0])[0][0]) for s in seeds]
    bits = random_bits(np.array(seeds, np.uint64), np.zeros(8))
    assert drawn == [int(each) * MAX_SAMPLED_VOCAB >> 64 for each in bits]


def test_parameters_of_a_row() -> None:
    assert [top_p_share(p) for p in (1.0, 0.5, 1e-12, 1 - 1e-12)] == [0, 1 << 31, 1, 0]
    assert exponent_scale(0) == 0
    assert exponent_scale(1.0) == pytest.approx(1.442695)
    (row,) = sample_rows([Spec(0.5, 9, 0.25, seed=2**63 - 1)], [2**32 - 1])
    assert (row.seed, row.step, row.top_k, row.top_p) == (2**63 - 1, 2**32 - 1, 9, 1 << 30)
    assert sampler.WEIGHT_BITS == 40
