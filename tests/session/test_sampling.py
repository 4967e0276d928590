"""Drawn tokens and logprobs of whole sessions: alone and in any company the same."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from session.history_executor import HistoryExecutor
from session.paged_toy import VOCAB, make_spec, prompt_of

from paged_trt.plugins.errors import UnsupportedError
from paged_trt.runtime import core as core_module
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.requests import GREEDY, GenerationRequest, SamplingSpec
from paged_trt.runtime.session import Session

PROMPT = prompt_of(130)
SPECS = [
    SamplingSpec(temperature=1.0, seed=5),
    SamplingSpec(temperature=0.7, top_k=5, seed=6, num_logprobs=3),
    SamplingSpec(temperature=2.0, top_p=0.8, seed=7),
    GREEDY,
    SamplingSpec(num_logprobs=0),
]


class Spread(HistoryExecutor):
    """Logits that depend on the whole history, and are spread over the vocabulary."""

    def step(self, inputs: StepInputs) -> Any:
        tops = super().step(inputs).argmax(axis=1)
        return np.stack(
            [np.random.default_rng(top).standard_normal(VOCAB).astype(np.float32) for top in tops]
        )


def alone(spec: SamplingSpec, prompt: list[int] = PROMPT, count: int = 8) -> tuple[int, ...]:
    session = Session(Spread(make_spec()))
    return session.generate([prompt], count, sampling=spec)[0].tokens


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    """In chunks, with a prefix that is found, and after a preemption."""
    core = EngineCore(Spread(make_spec(max_batch_size=6)))
    session = Session(core)
    expected = [alone(spec) for spec in SPECS]
    assert len(set(expected)) == 4
    for hogged in (0, core.batch.registry.num_free - 7):
        held = core.batch.registry.allocate(hogged)
        got: dict[int, list[int]] = {
            session.add(PROMPT, 8, sampling=spec, prefill_chunk=50): [] for spec in SPECS
        }
        session.add(prompt_of(127), 60, sampling=SPECS[0])
        while session.stats().sequences:
            for result in session.step():
                got.setdefault(result.sequence_id, []).append(result.token)
        assert [tuple(tokens) for tokens in got.values()][:5] == expected
        core.batch.registry.release(held)
    assert session.stats().cached_tokens > 0


def test_without_a_seed_two_draws_differ() -> None:
    spec = SamplingSpec(temperature=1.5)
    assert alone(spec, count=30) != alone(spec, count=30)


def test_logprobs_are_those_of_the_model() -> None:
    session = Session(Spread(make_spec(max_batch_size=4)))
    ids = [session.add(PROMPT, 3, sampling=spec, keep_logits=True) for spec in SPECS[1:]]
    results = []
    while session.stats().sequences:
        results += session.step()
    assert len(results) == 4 * 3
    for result in results:
        spec = SPECS[1 + ids.index(result.sequence_id)]
        if spec.num_logprobs is None:
            assert result.logprob is result.top_logprobs is None
            continue
        logits = result.logits.astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert result.logprob == pytest.approx(expected[result.token], abs=1e-4)
        best = np.argsort(-logits)[: spec.num_logprobs]
        assert [token for token, _ in result.top_logprobs] == best.tolist()
        found = [logprob for _, logprob in result.top_logprobs]
        np.testing.assert_allclose(found, expected[best], rtol=0, atol=1e-4)


def test_events_carry_logprobs() -> None:
    async def main() -> None:
        session = AsyncSession(Spread(make_spec()))
        request = GenerationRequest(
            request_id="a", prompt_tokens=tuple(PROMPT), max_new_tokens=8, sampling=SPECS[1]
        )
        events = [event async for event in session.stream(request)]
        await session.aclose()
        assert tuple(event.token for event in events) == alone(SPECS[1])
        assert all(event.logprob is not None and event.logprob < 0 for event in events)
        assert [len(event.top_logprobs or ()) for event in events] == [3] * 8

    asyncio.run(main())


def test_a_fork_draws_other_tokens() -> None:
    session = Session(Spread(make_spec()))
    first = session.add(PROMPT, 40, sampling=SPECS[0])
    tokens = [session.step()[0].token]
    fork = session.fork(first)
    twin = session.fork(first, sampling=SPECS[0])
    got: dict[int, list[int]] = {first: [], fork: [], twin: []}
    while session.stats().sequences:
        for result in session.step():
            got[result.sequence_id].append(result.token)
    assert (tokens[0], *got[first]) == alone(SPECS[0], count=40)
    assert got[twin] == got[first]
    assert got[fork] != got[first]
    assert session.stats().pages_in_use == 0


def test_a_vocabulary_that_is_too_large_to_draw_from_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_module, "MAX_SAMPLED_VOCAB", VOCAB - 1)
    session = Session(Spread(make_spec()))
    with pytest.raises(UnsupportedError, match="takes 95 tokens and the vocabulary has 96"):
        session.add([1], 1, sampling=SPECS[0])
    assert session.generate([[1]], 1)
