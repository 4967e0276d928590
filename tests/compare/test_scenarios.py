from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from engine_dirs import small_spec

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, SequenceError
from paged_trt.plugins.kv import TOKENS_PER_PAGE, KvPoolSpec
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.polygraphy_runners import feed_dict, scenario_of
from paged_trt.runtime.scenarios import (
    Scenario,
    default_prompt_lens,
    make_scenarios,
    random_prompts,
)


def spec(*, capacity: int, max_input_len: int, max_num_tokens: int) -> EngineSpec:
    return dataclasses.replace(
        small_spec(DType.FLOAT16, DType.FLOAT16),
        pool=KvPoolSpec.plan(max_batch_size=2, max_kv_cache_capacity=capacity),
        max_input_len=max_input_len,
        max_num_tokens=max_num_tokens,
    )


@pytest.mark.parametrize(
    ("capacity", "max_input_len", "lengths"),
    [
        (1024, 512, (1, 127, 128, 129, 255, 256, 257)),
        (256, 256, (1, 127, 128, 129, 240)),
        (128, 128, (1, 112)),
        (17, 17, (1,)),
        (16, 16, ()),
    ],
)
def test_default_lengths_stay_within_the_engine(
    capacity: int, max_input_len: int, lengths: tuple[int, ...]
) -> None:
    limits = spec(capacity=capacity, max_input_len=max_input_len, max_num_tokens=64)
    assert default_prompt_lens(limits, 16) == lengths


def scenarios_of_lens(
    limits: EngineSpec, lengths: Sequence[int], num_new_tokens: int, *, seed: int
) -> list[Scenario]:
    prompts = random_prompts(limits, lengths, seed=seed)
    return make_scenarios(limits, prompts, num_new_tokens=num_new_tokens)


@pytest.mark.parametrize(
    ("max_num_tokens", "chunks"),
    [(512, [None, 77]), (300, [None, 77]), (128, [77]), (64, [63]), (3, [3])],
)
def test_chunks_divide_no_page(max_num_tokens: int, chunks: list[int | None]) -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=max_num_tokens)
    scenarios = scenarios_of_lens(limits, (1, 300), 4, seed=0)
    assert [each.prefill_chunk for each in scenarios] == chunks
    assert all(TOKENS_PER_PAGE % each for each in chunks if each)


def test_short_prompts_have_short_chunks() -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=512)
    for lengths, chunks in (((1, 77), [None, 38]), ((1, 2), [None, 1]), ((1, 1), [None])):
        scenarios = scenarios_of_lens(limits, lengths, 4, seed=0)
        assert [each.prefill_chunk for each in scenarios] == chunks


def test_given_prompts_are_run_as_they_are() -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=512)
    whole, chunked = make_scenarios(limits, [(1, 2, 3), (0,)], num_new_tokens=4)
    assert [list(prompt) for prompt in whole.prompts] == [[1, 2, 3], [0]]
    assert chunked.prefill_chunk == 1


def test_prompts_depend_on_the_seed_only() -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=512)
    one, same, other = (scenarios_of_lens(limits, (9, 5), 4, seed=seed)[0] for seed in (1, 1, 2))
    assert all(map(np.array_equal, one.prompts, same.prompts))
    assert not all(map(np.array_equal, one.prompts, other.prompts))
    assert [len(prompt) for prompt in one.prompts] == [9, 5]
    assert all(prompt.max() < limits.vocab_size for prompt in one.prompts)


def test_scenario_survives_the_feed() -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=512)
    for scenario in scenarios_of_lens(limits, (1, 130, 7), 4, seed=0):
        back = scenario_of(feed_dict(scenario))
        assert all(map(np.array_equal, back.prompts, scenario.prompts))
        assert back.num_new_tokens == scenario.num_new_tokens
        assert back.prefill_chunk == scenario.prefill_chunk


@pytest.mark.parametrize("length", [0, 513])
def test_prompt_that_does_not_fit_names_the_limits(length: int) -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=512)
    with pytest.raises(SequenceError, match=rf"prompt of {length} tokens.*max_input_len=512"):
        make_scenarios(limits, [[1] * 4, [1] * length], num_new_tokens=4)


@pytest.mark.parametrize("length", [0, -1])
def test_a_random_prompt_needs_a_token(length: int) -> None:
    limits = spec(capacity=1024, max_input_len=512, max_num_tokens=512)
    with pytest.raises(SequenceError, match=f"got lengths.*{length}"):
        random_prompts(limits, (4, length), seed=0)


def test_no_prompt_and_no_token_are_refused() -> None:
    limits = spec(capacity=16, max_input_len=16, max_num_tokens=16)
    with pytest.raises(ConfigError, match="no prompt fits 16 new tokens"):
        scenarios_of_lens(limits, default_prompt_lens(limits, 16), 16, seed=0)
    with pytest.raises(ConfigError, match="--new-tokens"):
        scenarios_of_lens(limits, (1,), 0, seed=0)
