"""Many requests at once on a device: the tokens that each gets alone, and what a step costs.

`--serving-engine DIR` serves an engine directory, such as SmolLM2 built with
`--max-batch-size 64`; without it a toy is built.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gpu.engines import ToyEngine, check_agrees, logits_of

from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.async_session import AsyncSession
from paged_trt.runtime.comparison import tolerance_for
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.requests import GenerationRequest, SamplingSpec, TokenEvent
from paged_trt.runtime.results import Generation
from paged_trt.runtime.session import Session
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor

pytestmark = pytest.mark.gpu

REQUESTS = 64
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def executor(request: pytest.FixtureRequest) -> Iterator[TensorRtExecutor]:
    folder: Path | None = request.config.getoption("--serving-engine")
    opened = open_plan(folder or ToyEngine(max_batch_size=REQUESTS).folder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def prompts(executor: TensorRtExecutor) -> list[list[int]]:
    """Ragged, in four families with beginnings of one and two pages."""
    spec = executor.spec
    rng = np.random.default_rng(7)
    longest = min(spec.max_input_len, spec.pool.max_kv_cache_capacity - NEW_TOKENS)
    families = [
        rng.integers(0, spec.vocab_size, min(length, longest - 1)).tolist()
        for length in (0, TOKENS_PER_PAGE, 2 * TOKENS_PER_PAGE, TOKENS_PER_PAGE + 50)
    ]
    given = []
    for index in range(REQUESTS):
        shared = families[index % len(families)]
        length = int(rng.integers(1, min(200, longest - len(shared) + 1)))
        given.append([*shared, *rng.integers(0, spec.vocab_size, length).tolist()])
    return given


@pytest.fixture(scope="module")
def alone(executor: TensorRtExecutor, prompts: list[list[int]]) -> list[Generation]:
    session = Session(EngineCore(executor, reuses_prefixes=False))
    return [session.generate([each], NEW_TOKENS, keep_logits=True)[0] for each in prompts]


def assert_same_text(spec: EngineSpec, want: Generation, tokens: tuple[int, ...]) -> None:
    """Equal up to a near tie in the logits of the run alone."""
    for step, (mine, theirs) in enumerate(zip(want.tokens, tokens, strict=True)):
        if mine != theirs:
            row = logits_of(want)[step]
            bound = tolerance_for(spec).tie_rtol * float(np.abs(row).max())
            assert float(row[mine] - row[theirs]) < bound, f"step {step}"
            return


def test_a_full_batch_gives_the_tokens_of_each_alone(
    executor: TensorRtExecutor, prompts: list[list[int]], alone: list[Generation]
) -> None:
    """With prefixes that are found, mixed steps, scrambled and poisoned pages."""
    order = np.random.default_rng(1).permutation(executor.spec.pool.num_pages).tolist()
    core = EngineCore(executor, page_order=order, poisons_freed=True)
    session = Session(core)
    for _ in range(2):
        found = session.generate(prompts, NEW_TOKENS, keep_logits=True)
        check_agrees(executor.spec, alone, found)
    stats = core.stats()
    assert stats.cached_tokens >= REQUESTS // 2 * TOKENS_PER_PAGE
    assert stats.mixed_steps > 0
    assert stats.pages_in_use == 0
    core.batch.registry.check()


def test_a_prefix_hit_gives_the_tokens_of_the_cold_run(
    executor: TensorRtExecutor, prompts: list[list[int]], alone: list[Generation]
) -> None:
    session = Session(EngineCore(executor))
    for index in (1, 2, 3):
        cold, hit = (
            session.generate([prompts[index]], NEW_TOKENS, keep_logits=True) for _ in range(2)
        )
        assert hit[0].num_cached_tokens >= TOKENS_PER_PAGE
        check_agrees(executor.spec, [alone[index]], cold)
        check_agrees(executor.spec, cold, hit)


def test_streams_that_come_and_go(
    executor: TensorRtExecutor, prompts: list[list[int]], alone: list[Generation]
) -> None:
    async def read(session: AsyncSession, index: int) -> list[TokenEvent]:
        await asyncio.sleep(0.002 * index)
        request = GenerationRequest(
            request_id=str(index), prompt_tokens=tuple(prompts[index]), max_new_tokens=NEW_TOKENS
        )
        events = []
        async for event in session.stream(request):
            events.append(event)
            if index % 8 == 5 and len(events) == 3:
                session.cancel(request.request_id)
        return events

    async def main() -> list[list[TokenEvent]]:
        session = AsyncSession(core)
        try:
            return await asyncio.gather(*(read(session, index) for index in range(REQUESTS)))
        finally:
            await session.aclose()

    core = EngineCore(executor)
    for index, events in enumerate(asyncio.run(main())):
        tokens = tuple(event.token for event in events if event.token is not None)
        if index % 8 == 5:
            assert events[-1].finish_reason in ("cancelled", "length")
        else:
            assert events[-1].finish_reason == "length"
            assert len(tokens) == NEW_TOKENS
            assert_same_text(executor.spec, alone[index], tokens)
    assert core.stats().pages_in_use == 0


def test_the_youngest_gives_way_and_is_run_again(
    executor: TensorRtExecutor, prompts: list[list[int]], alone: list[Generation]
) -> None:
    core = EngineCore(executor, poisons_freed=True)
    session = Session(core)
    # Each is near the end of its page when its prompt is done.
    near = [[*prompt, *prompts[0] * 200][: TOKENS_PER_PAGE - 2] for prompt in prompts[:3]]
    expected = session.generate(near, NEW_TOKENS, keep_logits=True)
    held = core.batch.registry.allocate(core.batch.registry.num_free - 3)
    found = session.generate(near, NEW_TOKENS, keep_logits=True)
    assert core.stats().preemptions > 0
    core.batch.registry.release(held)
    check_agrees(executor.spec, expected, found)


@pytest.mark.parametrize("window", [1, 130, 300])
def test_pages_below_the_window_are_poisoned_and_never_read(window: int) -> None:
    toy = ToyEngine(window=window)
    rng = np.random.default_rng(window)
    given = [rng.integers(0, toy.spec.vocab_size, length).tolist() for length in (500, 20, 257)]
    reference = load_engine(toy.folder, "reference")
    expected = Session(reference).generate(given, 40, keep_logits=True, prefill_chunk=100)
    device = open_plan(toy.folder)
    try:
        core = EngineCore(device, poisons_freed=True, reuses_prefixes=False)
        in_use: list[int] = []
        found = Session(core).generate(
            given,
            40,
            keep_logits=True,
            prefill_chunk=100,
            on_token=lambda *_: in_use.append(core.stats().pages_in_use),
        )
        check_agrees(toy.spec, expected, found)
        # All pages of 540, 60 and 297 tokens would be nine.
        assert max(in_use[-30:]) < 9
    finally:
        device.close()


def test_a_fork_goes_on_from_a_copy_of_the_page(
    executor: TensorRtExecutor, prompts: list[list[int]], alone: list[Generation]
) -> None:
    session = Session(EngineCore(executor, poisons_freed=True))
    first = session.add(prompts[0], NEW_TOKENS)
    got = {first: [session.step()[0].token]}
    spec = SamplingSpec(temperature=1.5, seed=3)
    fork = session.fork(first, sampling=spec)
    got[fork] = []
    while session.stats().sequences:
        for result in session.step():
            got[result.sequence_id].append(result.token)
    assert_same_text(executor.spec, alone[0], tuple(got[first]))
    assert len(got[fork]) == NEW_TOKENS - 1
    assert got[fork] != got[first][1:]


def test_a_steady_batch_replays_graphs_and_allocates_nothing(
    executor: TensorRtExecutor, prompts: list[list[int]]
) -> None:
    core = EngineCore(executor)
    session = Session(core)
    for prompt in prompts:
        # All in one bucket of table widths, and none that comes to the end of a page soon.
        session.add(prompt[:60], 60)
    while core.stats().decode_steps < 4:
        session.step()
    before, steps = executor.stats(), core.stats().decode_steps
    for _ in range(20):
        session.step()
    after = executor.stats()
    assert core.stats().decode_steps == steps + 20
    assert after.graph_replays == before.graph_replays + 20
    assert after.graph_fallbacks == before.graph_fallbacks
    assert after.allocations == before.allocations
    assert after.table_copies == before.table_copies
    assert after.input_copies == before.input_copies + 20
    session.close()
