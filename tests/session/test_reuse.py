"""Prefixes, forks, windows and preemption on real keys and values: the reference executor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session.paged_toy import dense_greedy, make_spec, open_toy, prompt_of

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import SequenceError
from paged_trt.plugins.tensors import LogitsMode
from paged_trt.runtime.batch import Batch
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.scheduler import StepPolicy
from paged_trt.runtime.session import Session

NEW_TOKENS = 4
MARGIN = 0.2
"""Between the two best logits of every step of a prompt: other roundings choose no other token."""


@functools.cache
def clear_prompt(prefix_length: int, length: int) -> tuple[int, ...]:
    """A prompt that begins with a common prefix and has no near tie in its continuation."""
    prefix = prompt_of(300, seed=1)[:prefix_length]
    for seed in range(500):
        prompt = (*prefix, *prompt_of(length - prefix_length, seed=seed))
        best = np.sort(dense_greedy(prompt, NEW_TOKENS)[1], axis=1)
        if (best[:, -1] - best[:, -2]).min() > MARGIN:
            return prompt
    raise AssertionError("no such prompt")


def expected(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return dense_greedy(prompt, NEW_TOKENS)[0]


SHARED = [
    (0, 127),
    (128, 200),
    (0, 3),
    (128, 129),
    (256, 257),
    (256, 300),
    (100, 130),
    (256, 290),
    (0, 250),
]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceExecutor]:
    opened = open_toy(make_spec(retained_pages=0), tmp_path_factory.mktemp("toy"))
    yield opened
    opened.close()


@pytest.fixture
def prompts() -> list[tuple[int, ...]]:
    return [clear_prompt(*lengths) for lengths in SHARED]


def run_all(core: EngineCore, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [each.tokens for each in Session(core).generate(prompts, NEW_TOKENS)]


@pytest.mark.parametrize(
    "policy", [StepPolicy(), StepPolicy(mixes=False), StepPolicy(step_tokens=40)]
)
@pytest.mark.parametrize("reuses", [True, False])
def test_every_request_gets_the_tokens_that_it_gets_alone(
    executor: ReferenceExecutor, prompts: list[tuple[int, ...]], policy: StepPolicy, reuses: bool
) -> None:
    """On exactly the minimum of pages, freed ones poisoned."""
    assert executor.spec.pool.retained_pages == 0
    core = EngineCore(executor, policy=policy, reuses_prefixes=reuses, poisons_freed=True)
    alone = [Session(executor).generate([prompt], NEW_TOKENS)[0].tokens for prompt in prompts]
    assert alone == [expected(prompt) for prompt in prompts]
    assert run_all(core, prompts) == alone
    assert run_all(core, prompts[::-1]) == alone[::-1]
    stats = core.stats()
    assert (stats.cached_tokens > 0) is reuses
    assert (stats.mixed_steps > 0) is policy.mixes
    assert stats.pages_in_use == 0
    core.batch.registry.check()


def test_preempted_and_cancelled_requests_disturb_nobody(
    executor: ReferenceExecutor, prompts: list[tuple[int, ...]]
) -> None:
    core = EngineCore(executor, poisons_freed=True)
    session = Session(core)
    hogged = core.batch.registry.allocate(core.batch.registry.num_free - 3)
    ids = {session.add(prompt, NEW_TOKENS): prompt for prompt in prompts}
    cancelled = [*ids][5]
    got: dict[int, list[int]] = {sequence_id: [] for sequence_id in ids}
    for _ in range(200):
        for result in session.step():
            got[result.sequence_id].append(result.token)
        if got[cancelled]:
            session.release(cancelled)
            break
    while session.stats().sequences:
        for result in session.step():
            got[result.sequence_id].append(result.token)
    for sequence_id, prompt in ids.items():
        tokens = tuple(got[sequence_id])
        assert tokens == expected(prompt)[: len(tokens)]
        assert len(tokens) == NEW_TOKENS or sequence_id == cancelled
    assert session.stats().preemptions > 0
    assert session.stats().cancelled == 1
    core.batch.registry.release(hogged)
    assert session.stats().pages_in_use == 0


KINDS = {
    (DType.FLOAT16, DType.FLOAT16),
    (DType.BFLOAT16, DType.BFLOAT16),
    (DType.FLOAT16, DType.FLOAT8),
    (DType.FLOAT16, DType.INT8),
}


@pytest.mark.parametrize(("activation", "kv"), sorted(KINDS, key=str), ids=lambda each: each.value)
def test_a_hit_reads_the_very_bytes_that_the_cold_run_wrote(
    activation: DType, kv: DType, tmp_path: Path
) -> None:
    executor = open_toy(make_spec(activation=activation, kv=kv), tmp_path)
    session = Session(executor)
    pages = spy_on_pages(session.core.batch)
    tokens = record_tokens(executor)
    prompt = clear_prompt(256, 300)
    [cold] = session.generate([prompt], NEW_TOKENS, keep_logits=True)
    cold_pages, written = pages[-1], pool_bytes(executor, pages[-1][:2])
    assert cold.num_cached_tokens == 0
    tokens.clear()
    [hit] = session.generate([prompt], NEW_TOKENS, keep_logits=True)
    assert hit.num_cached_tokens == 256
    assert tokens[0] == 300 - 256
    assert pages[-1][:2] == cold_pages[:2]
    assert pool_bytes(executor, pages[-1][:2]) == written
    assert hit.tokens == cold.tokens
    np.testing.assert_allclose(hit.logits, cold.logits, rtol=0, atol=0.05)
    executor.close()


def spy_on_pages(batch: Batch) -> list[list[int]]:
    """Pages of each sequence when it is dropped."""
    seen: list[list[int]] = []
    drop = batch.drop

    def spied(sequence: Any) -> None:
        if sequence.pages:
            seen.append(list(sequence.pages))
        drop(sequence)

    batch.drop = spied  # type: ignore[method-assign]
    return seen


def pool_bytes(executor: ReferenceExecutor, pages: list[int]) -> dict[str, bytes]:
    return {pool.name: executor.pool(pool.name)[pages].tobytes() for pool in executor.spec.pools()}


def record_tokens(executor: ReferenceExecutor) -> list[int]:
    """Token rows of each step."""
    counts: list[int] = []
    step = executor.step

    def recorded(inputs: StepInputs) -> Any:
        counts.append(len(inputs.input_ids))
        return step(inputs)

    executor.step = recorded  # type: ignore[method-assign]
    return counts


def test_a_whole_prompt_that_is_known_runs_its_last_page_again(
    executor: ReferenceExecutor,
) -> None:
    """Nobody writes a shared page, and a token that is not run has no logits."""
    session = Session(EngineCore(executor))
    prompt = clear_prompt(128, 256)
    for cached in (0, 128):
        [generation] = session.generate([prompt], NEW_TOKENS)
        assert generation.tokens == expected(prompt)
        assert generation.num_cached_tokens == cached


def test_prompts_that_arrive_together_share_what_the_first_of_them_runs(
    executor: ReferenceExecutor,
) -> None:
    """Each has its pages already when the first has run its first chunk."""
    core = EngineCore(executor, poisons_freed=True, policy=StepPolicy(step_tokens=256))
    prompts = [clear_prompt(256, length) for length in (300, 257, 290)]
    results = Session(core).generate(prompts, NEW_TOKENS)
    assert [each.tokens for each in results] == [expected(prompt) for prompt in prompts]
    assert [each.num_cached_tokens for each in results] == [0, 256, 256]
    assert core.stats().cached_tokens == 512
    assert core.stats().pages_in_use == 0
    core.batch.registry.check()


def test_generated_tokens_are_reused_by_the_next_turn(executor: ReferenceExecutor) -> None:
    session = Session(EngineCore(executor))
    prompt = clear_prompt(0, 250)
    [first] = session.generate([prompt], 8)
    follow_up = (*prompt, *first.tokens, 5, 6, 7)
    [second] = session.generate([follow_up], 2)
    assert second.num_cached_tokens == 256
    assert second.tokens == dense_greedy(follow_up, 2)[0]


@pytest.mark.parametrize("length", [127, 128, 129, 200])
def test_forks_share_pages_until_one_writes(executor: ReferenceExecutor, length: int) -> None:
    core = EngineCore(executor, poisons_freed=True)
    session = Session(core)
    prompt = clear_prompt(0, length)
    first = session.add(prompt, NEW_TOKENS)
    with pytest.raises(SequenceError, match="cannot be forked now"):
        session.fork(first)
    tokens = [session.step()[0].token]
    in_use = session.stats().pages_in_use
    fork = session.fork(first)
    assert session.stats().pages_in_use == in_use
    # From its newest token on, which no step has run yet, the fork is another text.
    changed = (tokens[0] + 1) % 96
    session._live[fork].tokens[length] = changed
    got: dict[int, list[int]] = {first: [], fork: []}
    while session.stats().sequences:
        for result in session.step():
            got[result.sequence_id].append(result.token)
    assert (tokens[0], *got[first]) == expected(prompt)
    alone = Session(executor).generate([(*prompt, changed)], NEW_TOKENS - 1)[0]
    assert tuple(got[fork]) == alone.tokens
    assert session.stats().pages_in_use == 0


@pytest.mark.parametrize(
    ("windows", "pages"), [((130, 200), 4), ((1, 1), 2), ((128, 129), 3)], ids=str
)
@pytest.mark.parametrize("mode", LogitsMode)
def test_pages_below_every_window_are_free_and_never_missed(
    windows: tuple[int, int],
    pages: int,
    mode: LogitsMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec(windows=windows, capacity=640, logits_mode=mode)
    executor = open_toy(spec, tmp_path)
    prompt = prompt_of(320)
    core = EngineCore(executor, poisons_freed=True, reuses_prefixes=False)
    in_use = []
    freeing = Session(core).generate(
        [prompt, prompt_of(20)],
        80,
        keep_logits=True,
        prefill_chunk=100,
        on_token=lambda *_: in_use.append(core.stats().pages_in_use),
    )
    assert core.stats().pages_in_use == 0
    monkeypatch.setattr(Batch, "free_unseen", lambda *_: None)
    kept_in_use = []
    core = EngineCore(executor, reuses_prefixes=False)
    keeping = Session(core).generate(
        [prompt, prompt_of(20)],
        80,
        keep_logits=True,
        prefill_chunk=100,
        on_token=lambda *_: kept_in_use.append(core.stats().pages_in_use),
    )
    for mine, theirs in zip(freeing, keeping, strict=True):
        assert mine.tokens == theirs.tokens
        np.testing.assert_array_equal(mine.logits, theirs.logits)
    # 400 tokens take four pages, 100 take one; near the end fewer of the four are seen.
    assert max(kept_in_use) == 5
    assert max(in_use[-20:]) == pages
    executor.close()


def test_a_page_below_the_windows_can_be_reused_while_it_is_there(tmp_path: Path) -> None:
    executor = open_toy(make_spec(windows=(64, 128), retained_pages=4), tmp_path)
    core = EngineCore(executor, poisons_freed=True)
    session = Session(core)
    prompt = prompt_of(300)
    [cold] = session.generate([prompt], 20)
    [hit] = session.generate([prompt], 20)
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 256)
    assert hit.tokens == cold.tokens
    # The first page goes, and with it what leads to the others: nothing is found, or wrong.
    held = core.batch.registry.allocate(core.batch.registry.num_free)
    core.batch.registry.release(held)
    [again] = session.generate([prompt], 20)
    assert again.num_cached_tokens == 0
    assert again.tokens == cold.tokens
    executor.close()


def test_one_full_layer_keeps_every_page(tmp_path: Path) -> None:
    executor = open_toy(make_spec(windows=(64, -1)), tmp_path)
    session = Session(executor)
    session.add(prompt_of(300), 20)
    for _ in range(5):
        session.step()
    assert session.stats().pages_in_use == 3
    session.close()
