"""The TensorRT executor without a GPU: real steps, on a driver and an engine that stand in."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from fake_engine import FakeEngine, read_memory
from session.paged_toy import VOCAB, make_scales, make_spec, open_toy, prompt_of

from paged_trt.plugins.callback_errors import CALLBACK_ERRORS
from paged_trt.plugins.device import Device, Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import (
    ExecutionError,
    KernelError,
    ManifestError,
    UnsupportedError,
)
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensors import EngineSpec, LogitsMode, kv_scales_name
from paged_trt.runtime.bindings import StepBuffers
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.pool import DeviceArena, layer_pools
from paged_trt.runtime.session import Session
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor
from paged_trt.runtime.warm_steps import padding_step

Open = Callable[..., tuple[TensorRtExecutor, FakeEngine]]
PROMPTS = [prompt_of(20), prompt_of(130), prompt_of(3)]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def open_fake(tmp_path: Path, driver: FakeDriver) -> Open:
    def open_(spec: EngineSpec | None = None, **options: Any) -> Any:
        spec = spec or make_spec()
        engine = FakeEngine(driver, open_toy(spec, tmp_path))
        scales = make_scales(spec)
        device = Device(driver=driver)
        return TensorRtExecutor(engine, spec, device, kv_scales=scales, **options), engine

    return open_


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(),
        make_spec(kv=DType.INT8),
        make_spec(activation=DType.BFLOAT16),
        make_spec(logits_mode=LogitsMode.ALL),
    ],
    ids=["float16", "int8", "bfloat16", "all-logits"],
)
def test_tokens_are_those_of_the_reference(
    spec: EngineSpec, open_fake: Open, tmp_path: Path
) -> None:
    (tmp_path / "reference").mkdir()
    with Session(open_toy(spec, tmp_path / "reference")) as session:
        expected = session.generate(PROMPTS, 8)
    executor, _ = open_fake(spec)
    with Session(executor) as session:
        found = session.generate(PROMPTS, 8, keep_logits=True)
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    stats = executor.stats()
    assert stats.graph_replays > 3
    assert stats.graph_fallbacks == 0


def test_a_steady_decode_step_costs_two_copies_and_one_graph(
    open_fake: Open, driver: FakeDriver
) -> None:
    executor, engine = open_fake()
    with Session(executor) as session:
        session.add(prompt_of(20), 10)
        for _ in range(4):
            session.step()
        driver.calls.clear()
        before, executions = executor.stats(), engine.contexts[1].executions
        set_calls = engine.contexts[1].set_calls
        session.step()
        assert driver.calls == {
            "cuCtxPushCurrent": 1,
            "cuMemcpyHtoDAsync": 1,
            "cuGraphLaunch": 1,
            "cuMemcpyDtoHAsync": 1,
            "cuStreamSynchronize": 1,
            "cuCtxPopCurrent": 1,
        }
        after = executor.stats()
        assert engine.contexts[1].executions == executions
        assert engine.contexts[1].set_calls == set_calls
    assert after.graph_replays == before.graph_replays + 1
    assert after.table_copies == before.table_copies
    assert after.allocations == before.allocations
    assert after.input_copies == after.output_copies == after.steps


def test_a_greedy_engine_sends_back_ids_only(
    open_fake: Open, driver: FakeDriver, tmp_path: Path
) -> None:
    spec = make_spec(greedy_in_engine=True)
    (tmp_path / "reference").mkdir()
    with Session(open_toy(spec, tmp_path / "reference")) as session:
        expected = session.generate(PROMPTS, 8, keep_logits=True)
    executor, _ = open_fake(spec)
    with Session(executor) as session:
        driver.copied.clear()
        found = session.generate(PROMPTS, 8)
        # Eight steps of three sequences, and neither a logit nor a second copy of any step.
        assert driver.copied["cuMemcpyDtoHAsync"] == [8 * 3] * 8
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        driver.copied.clear()
        kept = session.generate(PROMPTS, 8, keep_logits=True)
        assert driver.copied["cuMemcpyDtoHAsync"] == [2 * VOCAB * 3] * 8
    for mine, theirs in zip(kept, expected, strict=True):
        assert mine.tokens == theirs.tokens
        np.testing.assert_array_equal(mine.logits, theirs.logits)
    assert executor.stats().graph_fallbacks == 0


def test_next_tokens_of_an_engine_without_them(open_fake: Open) -> None:
    executor, _ = open_fake()
    inputs = StepInputs(
        input_ids=np.arange(3),
        position_ids=np.arange(3),
        page_table=np.zeros((1, 1), np.int32),
        query_start_offsets=np.asarray([0, 3], np.int32),
        past_lens=np.zeros(1, np.int32),
    )
    with pytest.raises(UnsupportedError, match="rebuild it with `paged-trt build --greedy-in-eng"):
        executor.step_tokens(inputs)
    assert executor.step(inputs).shape == (1, VOCAB)


def test_the_table_travels_when_a_page_is_added(open_fake: Open) -> None:
    executor, _ = open_fake()
    with Session(executor) as session:
        session.add(prompt_of(126), 10)
        copies = []
        for _ in range(6):
            session.step()
            copies.append(executor.stats().table_copies)
    # Lengths 126 to 128 are on one page; token 129 takes the second.
    assert copies == [1, 1, 1, 2, 2, 2]


def test_each_bucket_is_captured_once(open_fake: Open, driver: FakeDriver) -> None:
    executor, engine = open_fake()
    with Session(executor) as session:
        for _ in range(3):
            session.generate(PROMPTS, 6)
        stats = executor.stats()
        # N = 3 is a bucket of this engine, M = 2 holds the longest prompt.
        assert stats.graph_captures == 1
        assert stats.graph_replays == 3 * 5 - 1
        assert engine.contexts[1].executions == 1
        assert driver.graphs == 1
    assert driver.graphs == 0


def test_without_graphs_every_step_is_eager(open_fake: Open, driver: FakeDriver) -> None:
    executor, _ = open_fake(uses_graphs=False)
    with Session(executor) as session:
        session.generate(PROMPTS, 6)
    assert driver.calls["cuStreamBeginCapture"] == 0
    assert executor.stats().graph_fallbacks == 0


def test_a_graph_that_cannot_be_captured_falls_back_and_is_counted(
    open_fake: Open, caplog: pytest.LogCaptureFixture
) -> None:
    executor, engine = open_fake()
    engine.uncapturable = True
    with Session(executor) as session:
        tokens = session.generate(PROMPTS, 6)[0].tokens
    assert len(tokens) == 6
    assert executor.stats().graph_fallbacks == 4
    assert [record.message[:50] for record in caplog.records] == [
        "decode steps of 3 sequences and 2 pages run withou"
    ]


def test_a_failed_step_leaves_a_usable_executor(open_fake: Open) -> None:
    executor, engine = open_fake()
    with Session(executor) as session:
        expected = session.generate([PROMPTS[0]], 4)
        engine.failing = 1
        with pytest.raises(ExecutionError, match=r"TensorRT failed in a step of .*num_tokens=20"):
            session.generate([PROMPTS[0]], 4)
        assert session.generate([PROMPTS[0]], 4) == expected


def test_a_lost_device_ends_the_executor_by_name(open_fake: Open, driver: FakeDriver) -> None:
    executor, _ = open_fake()
    session = Session(executor)
    driver.failing = {"cuStreamSynchronize": 2}
    with pytest.raises(ExecutionError, match="cuStreamSynchronize failed"):
        session.generate([PROMPTS[0]], 4)
    with pytest.raises(ExecutionError, match=r"the device was lost in a step .*load the engine"):
        session.generate([PROMPTS[0]], 4)
    session.close()
    assert driver.blocks == {}


def test_closing_on_a_lost_device_hides_no_error(open_fake: Open, driver: FakeDriver) -> None:
    executor, engine = open_fake()
    session = Session(executor)
    session.generate(PROMPTS, 3)
    freeing = ("cuGraphExecDestroy", "cuStreamDestroy", "cuMemFree", "cuMemFreeHost")
    lost = ("cuMemcpyDtoHAsync", "cuStreamSynchronize", *freeing)
    driver.failing = dict.fromkeys(lost, 1000)
    with pytest.raises(ExecutionError, match="cuMemcpyDtoHAsync failed"), session:
        session.generate(PROMPTS, 3)
    assert driver.pushed == 0
    assert engine not in vars(executor).values()


def test_a_close_that_fails_still_frees_the_rest(open_fake: Open, driver: FakeDriver) -> None:
    executor, engine = open_fake()
    Session(executor).generate(PROMPTS, 3)
    driver.failing = {"cuGraphExecDestroy": 1}
    with pytest.raises(ExecutionError, match="cuGraphExecDestroy failed"):
        executor.close()
    assert (driver.blocks, driver.pinned, driver.streams, driver.pushed) == ({}, {}, 0, 0)
    assert engine not in vars(executor).values()


def test_close_frees_everything_and_twice_is_fine(open_fake: Open, driver: FakeDriver) -> None:
    executor, _ = open_fake(make_spec(kv=DType.FLOAT8))
    assert driver.blocks
    with Session(executor) as session:
        session.generate(PROMPTS, 3)
    executor.close()
    assert (driver.blocks, driver.pinned, driver.streams, driver.pushed) == ({}, {}, 0, 0)
    with pytest.raises(ExecutionError, match="the TensorRT executor is closed; load the engine"):
        executor.step(None)  # type: ignore[arg-type]


def test_too_little_memory_is_named_and_nothing_is_left(tmp_path: Path, driver: FakeDriver) -> None:
    spec = make_spec()
    driver.memory_bytes = spec.pool_bytes() - 1
    engine = FakeEngine(driver, open_toy(spec, tmp_path))
    with pytest.raises(ExecutionError, match=r"no [\d,]+ bytes for the KV pools of layer 1"):
        TensorRtExecutor(engine, spec, Device(driver=driver))
    assert (driver.blocks, driver.pinned, driver.streams) == ({}, {}, 0)


def test_a_context_that_is_not_made_leaves_nothing(tmp_path: Path, driver: FakeDriver) -> None:
    spec = make_spec()
    engine = FakeEngine(driver, open_toy(spec, tmp_path))
    engine.max_contexts = 0
    with pytest.raises(ExecutionError, match="TensorRT made no execution context"):
        TensorRtExecutor(engine, spec, Device(driver=driver))
    assert (driver.blocks, driver.pinned, driver.streams) == ({}, {}, 0)


def test_a_plugin_that_is_not_ready_is_the_cause(tmp_path: Path, driver: FakeDriver) -> None:
    """A plugin that is attached must not raise, so TensorRT makes the context all the same."""
    spec = make_spec()
    problem = KernelError("the kernel does not load")

    def make_context(engine: Any, profile: int) -> Any:
        CALLBACK_ERRORS.keep(problem)
        return engine.create_execution_context()

    engine = FakeEngine(driver, open_toy(spec, tmp_path))
    with pytest.raises(ExecutionError, match="is not ready: the kernel does not load") as caught:
        TensorRtExecutor(engine, spec, Device(driver=driver), make_context=make_context)
    assert caught.value.__cause__ is problem
    assert CALLBACK_ERRORS.first is None
    assert (driver.blocks, driver.pinned, driver.streams) == ({}, {}, 0)


def test_two_threads_never_share_the_buffers_of_a_step(open_fake: Open) -> None:
    executor, engine = open_fake(uses_graphs=False)
    session = Session(executor)
    expected = session.generate([PROMPTS[0]], 3)
    refused: list[str] = []

    def second_step() -> None:
        for use in (
            lambda: executor.step(None),  # type: ignore[arg-type]
            lambda: executor.read_pages("key_pool.0", [0]),
            lambda: executor.fill_pools(0),
        ):
            with pytest.raises(ExecutionError, match="another thread runs a step") as caught:
                use()
            refused.append(str(caught.value))

    def meanwhile() -> None:
        thread = threading.Thread(target=second_step)
        thread.start()
        thread.join()

    engine.contexts[0].on_execute = meanwhile
    assert session.generate([PROMPTS[0]], 3) == expected
    assert len(refused) == 3
    session.close()


def test_a_callback_that_fails_silently_fails_the_step(open_fake: Open) -> None:
    """`enqueue` raises nothing where a step watches, and TensorRT then reports success."""
    executor, engine = open_fake(uses_graphs=False)
    problem = KernelError("no launch")
    with Session(executor) as session:
        engine.contexts[0].on_execute = lambda: CALLBACK_ERRORS.keep(problem)
        with pytest.raises(ExecutionError, match=r"failed in a step .*: no launch") as caught:
            session.generate(PROMPTS, 2)
    assert caught.value.__cause__ is problem


def test_each_bucket_has_a_context_that_nothing_changes(open_fake: Open) -> None:
    """A graph is undefined once its context was changed."""
    executor, engine = open_fake()
    with Session(executor) as session:
        session.generate(PROMPTS, 3)
        session.generate(PROMPTS[:1], 3)
        decode = engine.contexts[1:]
        assert executor.stats().contexts == 3 == len(engine.contexts)
        changes = [each.set_calls for each in decode]
        session.generate(PROMPTS, 5)
        session.generate(PROMPTS[:1], 5)
        assert [each.set_calls for each in decode] == changes
        assert [each.executions for each in decode] == [1, 1]
        engine.max_contexts = 0
        with pytest.raises(ExecutionError, match="made no execution context"):
            session.generate(PROMPTS[:2], 3)
        assert session.generate(PROMPTS, 3)


def test_a_refused_shape_is_named(open_fake: Open) -> None:
    executor, engine = open_fake()
    engine.unbindable = {"page_table"}
    with pytest.raises(ExecutionError, match="TensorRT refused `page_table` with dims"):
        Session(executor).generate(PROMPTS, 2)


def test_missing_scales_are_refused_before_anything_is_allocated(
    tmp_path: Path, driver: FakeDriver
) -> None:
    spec = make_spec(kv=DType.INT8)
    engine = FakeEngine(driver, open_toy(spec, tmp_path))
    with pytest.raises(ManifestError, match="scales"):
        TensorRtExecutor(engine, spec, Device(driver=driver))
    assert driver.calls["cuMemAlloc"] == 0


def test_scales_are_on_the_device(open_fake: Open) -> None:
    spec = make_spec(kv=DType.INT8)
    executor, engine = open_fake(spec)
    name = kv_scales_name(1)
    address = engine.contexts[0].addresses[name]
    found = read_memory(address, (2, 2), np.dtype(np.float32))
    assert np.array_equal(found, make_scales(spec)[name])
    executor.close()


def test_pools_are_zero_and_values_follow_keys(open_fake: Open, driver: FakeDriver) -> None:
    spec = make_spec()
    executor, engine = open_fake(spec)
    (dims,) = {tensor.dims for tensor in spec.pools()}
    size = int(np.prod([int(dim) for dim in dims])) * spec.kv_cache_dtype.itemsize
    for index, layer in enumerate(layer_pools(spec)):
        addresses = engine.contexts[0].addresses
        key, value = addresses[f"key_pool.{index}"], addresses[f"value_pool.{index}"]
        assert value - key == size == layer.value_offset
        assert not read_memory(key, (2 * size,), np.dtype(np.uint8)).any()
        assert driver.blocks[key]
    executor.close()


def test_the_host_works_while_the_device_runs_a_step(open_fake: Open, driver: FakeDriver) -> None:
    executor, engine = open_fake()
    core = EngineCore(executor)
    session = Session(core)
    session.add(PROMPTS[0], 6)
    seen: list[tuple[int, int]] = []

    def work() -> None:
        seen.append((engine.contexts[0].executions, driver.calls["cuStreamSynchronize"]))

    before = driver.calls["cuStreamSynchronize"]
    core.step(meanwhile=work)
    # The step was handed over, and nobody has waited for it.
    assert seen == [(1, before)]
    assert driver.calls["cuStreamSynchronize"] == before + 1
    core.step()
    assert len(seen) == 1
    engine.failing = 1
    session.add(PROMPTS[1], 6)
    core.step(meanwhile=work)
    session.add(PROMPTS[0], 6)
    core.step()
    # Of a step that failed before it was handed over nothing is left to do.
    assert len(seen) == 1
    session.close()
    core.close()


def test_only_the_rows_of_the_table_that_changed_travel(
    driver: FakeDriver,
) -> None:
    buffers = StepBuffers(DeviceArena(Device(driver=driver)), make_spec(max_batch_size=6), driver)
    stream = Stream(driver)
    table = np.arange(18, dtype=np.int32).reshape(6, 3)
    inputs = StepInputs(
        input_ids=np.zeros(6, np.int64),
        position_ids=np.zeros(6, np.int64),
        page_table=table,
        query_start_offsets=np.arange(7, dtype=np.int32),
        past_lens=np.zeros(6, np.int32),
    )
    address, dims = buffers.bindings(StepShape(num_tokens=6, num_seqs=6, table_width=3))[
        "page_table"
    ]
    assert dims is not None
    sent = []
    for rows in ((), (), (2,), (1, 4), (0, 5)):
        table[list(rows)] += 1
        driver.copied.clear()
        buffers.upload(inputs, stream)
        sent.append([int(size) // 12 for size in driver.copied["cuMemcpyHtoDAsync"][1:]])
        np.testing.assert_array_equal(read_memory(address, dims, np.dtype(np.int32)), table)
    # Nothing, or one copy from the first row that changed to the last one.
    assert sent == [[6], [], [1], [4], [6]]


@pytest.mark.parametrize("kv", [DType.FLOAT16, DType.INT8], ids=lambda kv: kv.value)
def test_pages_are_copied_and_poisoned_in_every_layer(open_fake: Open, kv: DType) -> None:
    spec = make_spec(kv=kv)
    executor, engine = open_fake(spec)
    addresses = engine.contexts[0].addresses
    kind = np.dtype(spec.kv_cache_dtype.numpy)
    shapes = {pool.name: tuple(int(dim) for dim in pool.dims) for pool in spec.pools()}
    rng = np.random.default_rng(0)
    before = {}
    for name, shape in shapes.items():
        before[name] = rng.integers(0, 100, shape).astype(kind)
        ctypes.memmove(addresses[name], before[name].ctypes.data, before[name].nbytes)
    executor.copy_pages([(3, 5), (0, 10)])
    executor.poison_pages([2, 7])
    for name, shape in shapes.items():
        expected = before[name].copy()
        expected[[5, 10]] = expected[[3, 0]]
        expected.view(np.uint8)[[2, 7]] = 0xFF
        found = read_memory(addresses[name], shape, kind)
        assert found.tobytes() == expected.tobytes()
    executor.close()
    with pytest.raises(ExecutionError, match="the TensorRT executor is closed"):
        executor.copy_pages([(0, 1)])


@pytest.mark.parametrize("tokens", [3, 33, 40])
def test_every_input_of_a_step_comes_with_one_copy(tokens: int, driver: FakeDriver) -> None:
    spec = dataclasses.replace(make_spec(), reads_position_ids=True)
    buffers = StepBuffers(DeviceArena(Device(driver=driver)), spec, driver)
    rng = np.random.default_rng(tokens)
    inputs = StepInputs(
        input_ids=rng.integers(0, 90, tokens),
        position_ids=rng.integers(0, 90, tokens),
        page_table=rng.integers(-1, 9, (3, 2)).astype(np.int32),
        query_start_offsets=np.asarray([0, 1, 2, tokens], np.int32),
        past_lens=rng.integers(0, 90, 3).astype(np.int32),
    )
    stream = Stream(driver)
    for _ in range(2):
        buffers.upload(inputs, stream)
    assert driver.calls["cuMemcpyHtoDAsync"] == 3  # the table once
    bindings = buffers.bindings(StepShape(num_tokens=tokens, num_seqs=3, table_width=2))
    for name, (address, dims) in bindings.items():
        assert address % 256 == 0
        if dims is not None:
            array = getattr(inputs, name)
            found = read_memory(address, dims, array.dtype)
            assert np.array_equal(found.reshape(array.shape), array), name
    assert bindings["position_ids"][1] == bindings["input_ids"][1] == (1, tokens)


def test_a_warm_executor_makes_nothing_more_in_its_steps(open_fake: Open) -> None:
    kept: list[int] = []
    executor, _ = open_fake(keep_compiled=lambda: kept.append(executor.stats().contexts))
    executor.warm_up()
    warm = executor.stats()
    assert warm.graph_captures == warm.contexts - 1 > 3
    # A graph takes device memory when it is launched first.
    assert warm.graph_replays == warm.graph_captures
    # Once for all contexts, and not before they ran: then there is something to keep.
    assert kept == [warm.contexts]
    with Session(executor) as session:
        session.generate(PROMPTS, 8)
        stats = executor.stats()
    assert stats.graph_replays > 3
    assert (stats.contexts, stats.graph_captures) == (warm.contexts, warm.graph_captures)
    assert kept == [warm.contexts]


class Noted:
    """Notes whether a device is current when it goes."""

    def __init__(self, driver: FakeDriver, seen: list[bool]) -> None:
        weakref.finalize(self, lambda: seen.append(driver.pushed > 0))

    def __call__(self, *given: Any) -> Any:
        return given[0].create_execution_context() if given else None


def test_nothing_of_tensorrt_is_left_for_a_thread_without_a_context(
    open_fake: Open, driver: FakeDriver
) -> None:
    """Destructors of TensorRT call CUDA's runtime, which makes a context current."""
    seen: list[bool] = []
    executor, _ = open_fake(
        **{name: Noted(driver, seen) for name in ("keep", "make_context", "keep_compiled")}
    )
    executor.step(padding_step(num_tokens=1, num_seqs=1, width=1))
    assert seen == []
    executor.close()
    assert seen == [True] * 3
    assert driver.pushed == 0


def test_what_an_error_leaves_goes_while_the_device_is_current(driver: FakeDriver) -> None:
    seen: list[bool] = []

    def fail() -> None:
        noted = Noted(driver, seen)
        raise ExecutionError(f"made to fail with {noted}")

    device = Device(driver=driver)
    with (
        pytest.raises(ExecutionError, match="made to fail") as raised,
        device.current_to_the_end(),
    ):
        fail()
    assert seen == [True]
    assert raised.value.__traceback__ is not None
    assert driver.pushed == 0


def test_kernels_are_kept_after_the_first_step_of_each_context(open_fake: Open) -> None:
    kept: list[int] = []
    executor, _ = open_fake(keep_compiled=lambda: kept.append(executor.stats().contexts))
    with Session(executor) as session:
        session.generate(PROMPTS, 8)
        assert kept == list(range(1, executor.stats().contexts + 1))


def test_a_warm_up_that_fails_leaves_its_kernels_to_the_next_step(
    open_fake: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    executor, _ = open_fake(keep_compiled=lambda: kept.append(executor.stats().contexts))
    original, left = executor._create_context, [2]

    def create(profile: int) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise ExecutionError("out of memory")
        return original(profile)

    monkeypatch.setattr(executor, "_create_context", create)
    with pytest.raises(ExecutionError, match="out of memory"):
        executor.warm_up()
    assert kept == []
    made = executor.stats().contexts
    monkeypatch.undo()
    with Session(executor) as session:
        session.generate(PROMPTS[:1], 1)
    assert kept == [made]


def test_a_warm_up_changes_no_token(open_fake: Open) -> None:
    executor, _ = open_fake()
    with Session(executor) as session:
        expected = session.generate(PROMPTS, 8)
    warm, _ = open_fake()
    warm.warm_up()
    with Session(warm) as session:
        assert session.generate(PROMPTS, 8) == expected
