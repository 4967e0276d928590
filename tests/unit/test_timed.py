"""An executor whose steps are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_trt.runtime.executor import StepInputs
from paged_trt.scripts import timed
from paged_trt.scripts.timed import TimedExecutor


class Device:
    """Takes 2 s for a step, of which the host waits 1.5 s."""

    name = "device"

    def __init__(self, clock: list[float]) -> None:
        self._clock, self._waited, self.num_reads = clock, 0.0, 0

    def step(self, inputs: StepInputs, *rest: Any, **options: Any) -> str:
        self._clock[0] += 2.0
        self._waited += 1.5
        return "logits"

    step_tokens = step_sampled = step

    def stats(self) -> SimpleNamespace:
        self.num_reads += 1
        return SimpleNamespace(wait_seconds=self._waited)


def inputs(num_tokens: int, num_seqs: int) -> StepInputs:
    return StepInputs(
        input_ids=np.zeros(num_tokens, np.int64),
        position_ids=np.zeros(num_tokens, np.int64),
        page_table=np.zeros((num_seqs, 1), np.int32),
        query_start_offsets=np.zeros(num_seqs + 1, np.int32),
        past_lens=np.zeros(num_seqs, np.int32),
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_every_way_to_run_a_step_is_timed(clock: list[float]) -> None:
    device: Any = Device(clock)
    executor = TimedExecutor(device)
    assert executor.step(inputs(9, 2)) == "logits"
    executor.step(inputs(2, 2))
    executor.step_tokens(inputs(3, 3))
    executor.step_sampled(inputs(3, 3), [0], with_logprobs=True)
    assert executor.prefill_seconds == [2.0]
    assert executor.decode_seconds == [2.0, 2.0, 2.0]
    # To ask costs microseconds: no step does.
    assert device.num_reads == 0
    assert executor.waited() == 4 * 1.5
    assert executor.name == "device"
