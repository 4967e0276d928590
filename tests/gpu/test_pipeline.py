"""Decode steps that are handed over while the one before runs, on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from gpu.engines import ToyEngine, prompts

from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.engine import open_plan
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.requests import GREEDY, SamplingSpec
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor

pytestmark = pytest.mark.gpu

SPECS = [SamplingSpec(temperature=1.0, seed=3), SamplingSpec(num_logprobs=0), GREEDY]


@pytest.fixture(scope="module", params=[False, True], ids=["kernel", "engine"])
def executor(request: pytest.FixtureRequest) -> Iterator[TensorRtExecutor]:
    opened = open_plan(ToyEngine(greedy=request.param).folder, pipelines=True)
    opened.warm_up()
    yield opened
    opened.close()


def run_all(
    executor: TensorRtExecutor, *, pipelines: bool, count: int = 40, stops: Sequence[int] = ()
) -> list[list[StepResult]]:
    """All prompts at once, so that both ways run the same rows in the same steps."""
    core = EngineCore(executor, pipelines=pipelines, reuses_prefixes=False, poisons_freed=True)
    got: list[list[StepResult]] = []
    for index, prompt in enumerate(prompts((17, 127, 130, 255))):
        got.append([])
        core.submit(
            np.asarray(prompt),
            count,
            sampling=GREEDY if executor.spec.greedy_in_engine else SPECS[index % 3],
            stop_token_ids=frozenset(stops),
            deliver=got[-1].append,
        )
    while core.has_work:
        core.step()
    core.batch.registry.check()
    assert core.stats().pages_in_use == 0
    assert core.stats().failed == 0
    return got


def test_tokens_are_those_of_steps_one_after_the_other(executor: TensorRtExecutor) -> None:
    plain = run_all(executor, pipelines=False)
    for _ in range(3):
        before = executor.stats()
        assert run_all(executor, pipelines=True) == plain
        after = executor.stats()
        assert after.graph_fallbacks == before.graph_fallbacks
        assert after.allocations == before.allocations
    assert after.graph_replays > 30


def test_end_tokens_come_one_step_late_and_change_no_text(executor: TensorRtExecutor) -> None:
    plain = run_all(executor, pipelines=False)
    # Tokens that stand in the middle of some of the texts.
    stops = sorted({plain[0][11].token, plain[2][17].token})
    expected = run_all(executor, pipelines=False, stops=stops)
    assert {len(each) for each in expected} != {40}
    found = run_all(executor, pipelines=True, stops=stops)
    for mine, theirs in zip(found, expected, strict=True):
        # Another batch size may round otherwise, but for rows that stay in their batch.
        length = min(len(each) for each in expected)
        assert [each.token for each in mine][:length] == [each.token for each in theirs][:length]
        assert mine[-1].finished is not None


def step_of(ids: list[int], past: int) -> StepInputs:
    """A step of one sequence on page 0."""
    return StepInputs(
        input_ids=np.asarray(ids),
        position_ids=np.arange(past, past + len(ids)),
        page_table=np.zeros((1, 1), np.int32),
        query_start_offsets=np.asarray([0, len(ids)], np.int32),
        past_lens=np.asarray([past], np.int32),
    )


def test_the_kernel_takes_tokens_over(executor: TensorRtExecutor) -> None:
    """By hand, against the same steps with ids that the host knows."""
    if not executor.spec.greedy_in_engine:
        pytest.skip("the engine's own choices tell all that this test looks at")
    ids, known = [5, 6, 7], []
    for past in (0, 3, 4, 5):
        known.append(int(executor.step_tokens(step_of(ids, past))[0]))
        ids = [known[-1]]
    launched: list[Any] = [executor.launch(step_of([5, 6, 7], 0), None)]
    found = []
    for past in (3, 4, 5):
        launched.append(executor.launch(step_of([-1], past), None))
        found.append(int(executor.collect(launched.pop(0))[0][0]))
    found.append(int(executor.collect(launched.pop())[0][0]))
    assert found == known


def test_steps_are_collected_once(executor: TensorRtExecutor) -> None:
    if not executor.spec.greedy_in_engine:
        pytest.skip("the engine's own choices tell all that this test looks at")
    step = executor.launch(step_of([1, 2], 0), None)
    executor.collect(step)
    with pytest.raises(ExecutionError, match="a step is collected once"):
        executor.collect(step)
