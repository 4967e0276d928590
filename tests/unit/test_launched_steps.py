"""Steps that overlap on the TensorRT executor: a driver that does its work as late as it may."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, Function
from fake_engine import FakeEngine, read_memory
from session.paged_toy import VOCAB, make_spec, open_toy, prompt_of
from unit.test_step_sampling import run_twin

from paged_trt.plugins.device import Device, Stream
from paged_trt.plugins.errors import ExecutionError, UnsupportedError
from paged_trt.plugins.kv import power_of_two_buckets
from paged_trt.plugins.launch.args import SampleArgs, TakeTokensArgs
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensors import EngineSpec, LogitsMode
from paged_trt.runtime.bindings import StepBuffers
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import Draw, StepInputs
from paged_trt.runtime.pool import DeviceArena
from paged_trt.runtime.requests import GREEDY, SamplingSpec
from paged_trt.runtime.results import StepResult
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor

Open = Callable[..., tuple[TensorRtExecutor, FakeEngine]]
PROMPTS = [prompt_of(20), prompt_of(130), prompt_of(3), prompt_of(126)]
SPECS = [SamplingSpec(temperature=1.0, seed=3), SamplingSpec(num_logprobs=0), GREEDY, GREEDY]


def take_tokens(args: dict[str, Any]) -> None:
    """What the kernel does."""
    ids = read_memory(args["ids"], (args["num_tokens"],), np.dtype(np.int64))
    tokens = read_memory(args["tokens"], (args["num_seqs"],), np.dtype(np.int64))
    for index in np.flatnonzero(ids < 0).tolist():
        token = tokens[-1 - ids[index]]
        ids[index] = token if 0 <= token < args["vocab_size"] else 0
    ctypes.memmove(args["ids"], ids.ctypes.data, ids.nbytes)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def open_fake(tmp_path: Path, driver: FakeDriver) -> Open:
    def open_(spec: EngineSpec | None = None, *, has_sampler: bool = True, **options: Any) -> Any:
        spec = spec or make_spec()
        engine = FakeEngine(driver, open_toy(spec, tmp_path))
        run = run_twin(spec.logits_dtype)
        executor = TensorRtExecutor(
            engine,
            spec,
            Device(driver=driver),
            sampling_kernel=Function("sample", SampleArgs, run) if has_sampler else None,
            token_kernel=Function("take_tokens", TakeTokensArgs, take_tokens),
            **options,
        )
        driver.defers = True
        return executor, engine

    return open_


def run_all(executor: TensorRtExecutor, *, pipelines: bool) -> list[list[StepResult]]:
    """Prompts that arrive over time; some draw, one keeps its logits, one ends early."""
    core = EngineCore(executor, pipelines=pipelines, reuses_prefixes=False)
    got: list[list[StepResult]] = []
    for index, prompt in enumerate([*PROMPTS, PROMPTS[2]]):
        got.append([])
        core.submit(
            np.asarray(prompt),
            10,
            sampling=SPECS[index % 4] if executor.draws else GREEDY,
            stop_token_ids=frozenset(range(0, VOCAB, 13)) if index != 1 else frozenset(),
            keep_logits=index == 4,
            deliver=got[-1].append,
        )
        for _ in range(3):
            core.step()
    while core.has_work:
        core.step()
    core.batch.registry.check()
    assert core.stats().pages_in_use == 0
    return got


def without_logits(results: list[list[StepResult]]) -> list[list[StepResult]]:
    return [[each._replace(logits=None) for each in mine] for mine in results]


@pytest.mark.parametrize(
    ("greedy_in_engine", "uses_graphs", "defers"),
    [(True, True, True), (False, True, True), (False, False, True), (False, True, False)],
)
def test_results_are_those_of_steps_one_after_the_other(
    open_fake: Open, driver: FakeDriver, greedy_in_engine: bool, uses_graphs: bool, defers: bool
) -> None:
    """On a device that is as late as it may be, and on one that is done at once."""
    executor, _ = open_fake(
        make_spec(greedy_in_engine=greedy_in_engine),
        has_sampler=not greedy_in_engine,
        uses_graphs=uses_graphs,
    )
    driver.defers = defers
    plain = run_all(executor, pipelines=False)
    assert "take_tokens" not in {each.name for each in driver.launches}
    assert driver.calls["cuEventSynchronize"] == 0
    found = run_all(executor, pipelines=True)
    assert without_logits(found) == without_logits(plain)
    assert [each.name for each in driver.launches].count("take_tokens") > 5
    assert driver.calls["cuEventSynchronize"] > 5
    executor.close()
    assert (driver.blocks, driver.pinned, driver.streams) == ({}, {}, 0)


@pytest.mark.parametrize(("shared", "defers"), [("inputs", True), ("tokens", False)])
def test_the_driver_sees_memory_that_two_steps_share(
    open_fake: Open,
    driver: FakeDriver,
    shared: str,
    defers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong on purpose: a device that is late reads what the second step sends, and one that is
    early overwrites what the first one gave."""
    executor, _ = open_fake()
    driver.defers = defers
    plain = run_all(executor, pipelines=False)
    one, other = executor._buffers._stagings
    monkeypatch.setattr(other, shared, getattr(one, shared))
    try:
        found = run_all(executor, pipelines=True)
    except (ExecutionError, AssertionError, KeyError):
        return
    assert without_logits(found) != without_logits(plain)


def test_a_steady_step_costs_no_wait_for_its_own_tokens(
    open_fake: Open, driver: FakeDriver
) -> None:
    executor, _ = open_fake()
    core = EngineCore(executor, pipelines=True)
    core.submit(np.asarray(prompt_of(20)), 12, deliver=lambda _: None)
    for _ in range(4):
        core.step()
    before = executor.stats()
    driver.calls.clear()
    core.step()
    assert driver.calls == {
        "cuCtxPushCurrent": 2,
        "cuMemcpyHtoDAsync": 1,
        "cuLaunchKernelEx": 2,
        "cuGraphLaunch": 1,
        "cuMemcpyDtoHAsync": 1,
        "cuEventRecord": 1,
        "cuEventSynchronize": 1,
        "cuCtxPopCurrent": 2,
    }
    # The step that was handed over has not begun: its work waits behind the one that was read.
    assert len(driver.waiting) == 5
    after = executor.stats()
    assert after.allocations == before.allocations
    assert after.steps == before.steps + 1
    core.close()


def test_a_warm_up_runs_every_kernel_and_size(open_fake: Open, driver: FakeDriver) -> None:
    """What is launched for the first time in service may take memory there."""
    spec = make_spec()
    executor, engine = open_fake(spec)
    executor.warm_up()
    assert {each.name for each in driver.launches} == {"sample", "take_tokens"}
    assert engine.contexts[0].executions == len(power_of_two_buckets(spec.max_token_rows)) - 1 > 3
    executor.close()


def step_of(ids: list[int], past: int) -> StepInputs:
    return StepInputs(
        input_ids=np.asarray(ids),
        position_ids=np.arange(past, past + len(ids)),
        page_table=np.zeros((1, 1), np.int32),
        query_start_offsets=np.asarray([0, len(ids)], np.int32),
        past_lens=np.asarray([past], np.int32),
    )


def test_a_row_without_a_token_is_no_id_of_the_next_step(open_fake: Open) -> None:
    """An id outside the vocabulary would be read from outside the embedding."""
    executor, engine = open_fake(make_spec(greedy_in_engine=True), has_sampler=False)
    ids: list[list[int]] = []
    run = engine.reference._run

    def spoilt(inputs: StepInputs) -> Any:
        ids.append(inputs.input_ids.tolist())
        results = run(inputs)
        return results | {"next_tokens": np.asarray([[-1, VOCAB][len(ids) % 2]])}

    engine.reference._run = spoilt  # type: ignore[method-assign]
    first = executor.launch(step_of([5, 6], 0), None)
    second = executor.launch(step_of([-1], 2), None)
    assert executor.collect(first)[0].tolist() == [VOCAB]
    third = executor.launch(step_of([-1], 3), None)
    assert executor.collect(second)[0].tolist() == [-1]
    assert executor.collect(third)[0].tolist() == [VOCAB]
    assert ids[:3] == [[5, 6], [0], [0]]


def test_steps_are_collected_once_and_in_time(open_fake: Open) -> None:
    executor, _ = open_fake(make_spec(greedy_in_engine=True), has_sampler=False)
    steps = [executor.launch(step_of([5 + past], past), None) for past in range(3)]
    # The third one took the memory of the first one.
    with pytest.raises(ExecutionError, match="before the second one behind it is launched"):
        executor.collect(steps[0])
    tokens = executor.collect(steps[1])[0]
    with pytest.raises(ExecutionError, match="a step is collected once"):
        executor.collect(steps[1])
    # A step that runs to its end leaves the running one's tokens where they are.
    executor.step(step_of([1], 3))
    assert executor.collect(steps[2])[0].shape == tokens.shape == (1,)


def test_a_draw_beside_a_launched_step_has_its_own_parameters(open_fake: Open) -> None:
    """A step that nobody collected yet holds page-locked memory that the draw must not share."""
    executor, _ = open_fake()
    prompt = step_of([5, 6, 7], past=0)

    def draw(seed: int) -> int:
        spec = SamplingSpec(temperature=3.0, seed=seed)
        tokens, _ = executor.step_sampled(prompt, [0], [spec], [0])
        return int(tokens[0])

    alone = [draw(seed) for seed in range(8)]
    assert len(set(alone)) > 1
    found = []
    for seed in range(8):
        other = Draw(specs=[GREEDY], steps=[0], with_logprobs=False)
        running = executor.launch(step_of([9], past=3), other)
        found.append(draw(seed))
        executor.collect(running)
    assert found == alone


def test_what_an_engine_cannot_give_is_refused(open_fake: Open) -> None:
    executor, _ = open_fake()
    with pytest.raises(UnsupportedError, match="--greedy-in-engine"):
        executor.launch(step_of([1], 0), None)


def test_logits_of_all_tokens_run_one_after_the_other(open_fake: Open, driver: FakeDriver) -> None:
    executor, _ = open_fake(make_spec(logits_mode=LogitsMode.ALL), has_sampler=False)
    plain = run_all(executor, pipelines=False)
    assert without_logits(run_all(executor, pipelines=True)) == without_logits(plain)
    assert driver.calls["cuEventSynchronize"] == 0


def test_a_step_that_is_not_handed_over_ends_its_sequences_only(open_fake: Open) -> None:
    executor, engine = open_fake(uses_graphs=False)
    core = EngineCore(executor, pipelines=True)
    got: list[StepResult] = []
    core.submit(np.asarray(PROMPTS[0]), 9, deliver=got.append)
    core.step()
    core.step()
    engine.failing = 1
    core.step()
    # The step that ran when the next one failed gave its token first.
    assert [each.error is None for each in got] == [True, True, True, False]
    again: list[StepResult] = []
    core.submit(np.asarray(PROMPTS[0]), 9, deliver=again.append)
    while core.has_work:
        core.step()
    assert [each.token for each in again][:3] == [each.token for each in got][:3]
    assert len(again) == 9
    core.close()


def test_a_lost_device_ends_everybody_by_name(open_fake: Open, driver: FakeDriver) -> None:
    executor, _ = open_fake()
    core = EngineCore(executor, pipelines=True)
    got: list[StepResult] = []
    for prompt in PROMPTS[:3]:
        core.submit(np.asarray(prompt), 9, deliver=got.append)
    core.step()
    driver.failing = {"cuEventSynchronize": 5, "cuStreamSynchronize": 5}
    while core.has_work:
        core.step()
    errors = [str(each.error) for each in got if each.error is not None]
    assert len(errors) == 3
    assert "cuEventSynchronize failed" in errors[0]
    assert core.stats().pages_in_use == 0
    core.close()
    assert driver.blocks == {}


def test_a_table_that_changes_while_its_copy_waits(driver: FakeDriver) -> None:
    """The step that it was sent for reads it as it was; the next one reads what changed."""
    buffers = StepBuffers(DeviceArena(Device(driver=driver)), make_spec(), driver)
    stream = Stream(driver)
    driver.defers = True
    address, _ = buffers.bindings(StepShape(num_tokens=3, num_seqs=3, table_width=2))["page_table"]
    table, stagings, sent = np.arange(6, dtype=np.int32).reshape(3, 2), [], []
    for changed in range(4):
        table[changed % 3] += 10
        sent.append(table.copy())
        stagings.append(buffers.turn())
        inputs = dataclasses.replace(step_of([1, 2, 3], 0), page_table=table)
        buffers.upload(inputs, stream)
        stagings[-1].done.record(stream)
        if changed:
            stagings[changed - 1].done.synchronize()
            found = read_memory(address, (3, 2), np.dtype(np.int32))
            np.testing.assert_array_equal(found, sent[changed - 1])
    assert stagings[0] is stagings[2]
    assert stagings[0].done is not stagings[1].done
    buffers.close()
    buffers.close()
    assert driver.calls["cuEventDestroy"] == 2
