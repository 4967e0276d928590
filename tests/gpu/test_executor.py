"""The TensorRT executor on a device: choice, batches that change, memory, failures."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu.engines import NEW_TOKENS, ToyEngine, check_agrees, generate, prompts, same_bits

from paged_trt.plugins import cuda
from paged_trt.plugins.cuda import check
from paged_trt.plugins.device import Stream, context_id, kept_device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError, UnsupportedError
from paged_trt.plugins.launch.compiler import CACHE_VARIABLE
from paged_trt.plugins.launch.layer import LayerLauncher
from paged_trt.runtime import tensorrt_loader
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.session import Session
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor
from paged_trt.runtime.tensorrt_loader import HOPPER_NOTE

pytestmark = pytest.mark.gpu

TOY = ToyEngine()
MIB = 1 << 20


def free_bytes() -> int:
    device = kept_device(0)
    with device.current():
        return device.free_bytes()


def test_auto_takes_tensorrt() -> None:
    executor = load_engine(TOY.folder)
    assert executor.name == "tensorrt"
    assert executor.bucketed_shapes
    assert (HOPPER_NOTE in executor.notes) == (cuda.device_arch(0) == "sm_90")
    executor.close()


def test_another_device_is_refused_by_number() -> None:
    with pytest.raises(UnsupportedError, match="there is no CUDA device 99, this machine has"):
        load_engine(TOY.folder, "tensorrt", device=99)


def test_batches_that_change_agree_with_the_reference() -> None:
    """Sequences come and go, so that steps of every bucket and mixed lengths are run."""
    lengths = random.Random(3).choices(range(1, 400), k=14)  # noqa: S311 - no secret
    given = prompts(tuple(lengths), seed=9)
    expected = generate(load_engine(TOY.folder, "reference"), given, new_tokens=9)
    executor = open_plan(TOY.folder)
    try:
        found = generate(executor, given, new_tokens=9)
        stats = executor.stats()
    finally:
        executor.close()
    check_agrees(TOY.spec, expected, found)
    assert stats.graph_fallbacks == 0
    assert stats.graph_replays > stats.graph_captures > 0


def test_each_bucket_is_captured_once() -> None:
    executor = open_plan(TOY.folder)
    try:
        first = generate(executor, prompts())
        generate(executor, prompts())
        captures = executor.stats().graph_captures
        assert same_bits(first, generate(executor, prompts()))
        assert executor.stats().graph_captures == captures
    finally:
        executor.close()


@pytest.mark.alone
def test_close_gives_the_memory_back() -> None:
    free = []
    for _ in range(5):
        executor = open_plan(TOY.folder)
        generate(executor, prompts())
        executor.close()
        executor.close()
        free.append(free_bytes())
    # TensorRT and the driver keep some of the first use.
    assert free[1] - free[-1] < 16 * MIB


@pytest.mark.alone
def test_a_pool_that_does_not_fit_is_named_and_leaves_nothing() -> None:
    toy = ToyEngine(pool_pages=3_000_000)  # 393 GB
    before = free_bytes()
    with pytest.raises(ExecutionError, match=r"the KV pools need 393,216,000,000 bytes"):
        load_engine(toy.folder)
    assert before - free_bytes() < MIB


def contexts_seen(folder: Path, *, has_own: bool) -> dict[str, int]:
    """The current context of this thread around all that an executor does."""
    driver = cuda.driver()
    ordinal = check(driver.cuDeviceGet(0), "cuDeviceGet")
    own = check(driver.cuCtxCreate(None, 0, ordinal), "cuCtxCreate") if has_own else None
    seen = {"before": context_id()}
    executor = open_plan(folder)
    seen["open"] = context_id()
    executor.warm_up()
    seen["warm_up"] = context_id()
    generate(executor, prompts())
    seen["step"] = context_id()
    Session(EngineCore(executor, pipelines=True)).generate(prompts(), NEW_TOKENS)
    seen["launch"] = context_id()
    executor.close()
    seen["close"] = context_id()
    del executor
    gc.collect()
    seen["gone"] = context_id()
    with pytest.raises(ExecutionError, match="made to fail"):
        open_plan(folder)
    gc.collect()
    seen["refused"] = context_id()
    if own is not None:
        check(driver.cuCtxDestroy(own), "cuCtxDestroy")
    return seen


@pytest.mark.parametrize("has_own", [False, True], ids=["none", "own"])
def test_the_callers_context_is_as_before(has_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own, where no context is current, or one that is not the device's."""
    # TensorRT's builder makes a context current in the thread that builds.
    folder = TOY.folder
    results = itertools.chain([None], itertools.repeat(ExecutionError("made to fail")))

    def check_table(*_: object) -> None:
        error = next(results)
        if error is not None:
            raise error

    monkeypatch.setattr(tensorrt_loader, "check_engine_table", check_table)
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(contexts_seen, folder, has_own=has_own).result()
    assert bool(seen["before"]) == has_own
    assert seen == dict.fromkeys(seen, seen["before"])


def test_two_executors_run_side_by_side() -> None:
    executors = [open_plan(TOY.folder) for _ in range(2)]
    sessions = [Session(executor) for executor in executors]
    expected = generate(executors[0], prompts()[:4])
    for session in sessions:
        for prompt in prompts()[:4]:
            session.add(prompt, 12)
    tokens: list[dict[int, list[int]]] = [{}, {}]
    for _ in range(20):
        for session, found in zip(sessions, tokens, strict=True):
            for result in session.step():
                found.setdefault(result.sequence_id, []).append(result.token)
    for executor in executors:
        executor.close()
    wanted = [list(each.tokens) for each in expected]
    assert [list(found.values()) for found in tokens] == [wanted, wanted]


def test_a_failed_step_is_named_and_the_executor_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    executor: TensorRtExecutor = open_plan(TOY.folder)
    try:
        expected = generate(executor, prompts())

        def fail(self: object, *arguments: object, **options: object) -> None:
            raise RuntimeError("made to fail")

        with monkeypatch.context() as patch:
            patch.setattr(LayerLauncher, "enqueue", fail)
            with pytest.raises(ExecutionError, match=r"TensorRT failed in a step .*made to fail"):
                generate(executor, prompts())
        assert same_bits(expected, generate(executor, prompts()))
    finally:
        executor.close()


class FailsIn:
    """`LayerLauncher.enqueue` that fails in one thread and works in every other."""

    def __init__(self, ident: int | None = None) -> None:
        self.original = LayerLauncher.enqueue
        self.ident = ident

    def replacement(self) -> object:
        def enqueue(launcher: LayerLauncher, *arguments: object, **options: object) -> None:
            if threading.get_ident() == self.ident:
                raise RuntimeError("made to fail")
            self.original(launcher, *arguments, **options)  # type: ignore[arg-type]

        return enqueue


def test_a_failing_executor_does_not_touch_one_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One executor fails in every step while another decodes: neither hides the other's result."""
    working, failing = open_plan(TOY.folder), open_plan(TOY.folder, uses_graphs=False)
    fails = FailsIn()
    found, problems = [], []

    def fail_all_the_time() -> None:
        fails.ident = threading.get_ident()
        started.set()
        while not stop.is_set():
            try:
                generate(failing, prompts()[:1], new_tokens=1)
            except ExecutionError as error:
                problems.append(str(error))

    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=fail_all_the_time)
    try:
        expected = generate(working, prompts())
        monkeypatch.setattr(LayerLauncher, "enqueue", fails.replacement())
        thread.start()
        assert started.wait(30)
        found = [generate(working, prompts()) for _ in range(5)]
    finally:
        stop.set()
        thread.join(30)
        working.close()
        failing.close()
    assert all(same_bits(expected, each) for each in found)
    assert problems
    assert all("made to fail" in problem for problem in problems)


def test_a_failure_inside_a_capture_falls_back_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The eager step of a bucket works and its capture fails: the tokens are those of graphs."""
    expected_executor = open_plan(TOY.folder)
    expected = generate(expected_executor, prompts())
    expected_executor.close()
    executor = open_plan(TOY.folder)
    original = Stream.capture

    def capture(stream: Stream, work: Callable[[], None]) -> object:
        def failing_work() -> None:
            work()
            with monkeypatch.context() as patch:
                patch.setattr(
                    LayerLauncher, "enqueue", FailsIn(threading.get_ident()).replacement()
                )
                work()

        return original(stream, failing_work)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "capture", capture)
            found = generate(executor, prompts())
        stats = executor.stats()
        assert same_bits(expected, found)
        assert stats.graph_captures == 0
        assert stats.graph_fallbacks > 0
        assert same_bits(expected, generate(executor, prompts()))
    finally:
        executor.close()


@pytest.mark.alone
def test_a_warm_executor_makes_nothing_in_service_and_the_next_one_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    executor = open_plan(TOY.folder)
    try:
        executor.warm_up()
        warm, free = executor.stats(), free_bytes()
        expected = generate(executor, prompts())
        # Tokens that the device draws, in steps that overlap.
        Session(executor).generate(prompts(), NEW_TOKENS)
        after = executor.stats()
        assert (after.contexts, after.graph_captures) == (warm.contexts, warm.graph_captures)
        assert free - free_bytes() < MIB
    finally:
        executor.close()
    (file,) = tmp_path.glob("*.rtx")
    kept = file.read_bytes()
    again = open_plan(TOY.folder)
    try:
        assert same_bits(expected, generate(again, prompts()))
    finally:
        again.close()
    # What the second executor needed was there: it wrote nothing new.
    assert len(file.read_bytes()) == len(kept)


@pytest.mark.parametrize("activation", [DType.FLOAT16, DType.BFLOAT16], ids=lambda each: each.value)
def test_a_greedy_engine_chooses_what_the_runtime_chooses(activation: DType) -> None:
    # The same rows in the same steps: another batch size may round otherwise.
    executor = open_plan(ToyEngine(activation=activation, greedy=True).folder, pipelines=False)
    try:
        with_logits = generate(executor, prompts())
        # Without `keep_logits` only the ids come back.
        found = Session(executor).generate(prompts(), NEW_TOKENS)
        assert executor.stats().graph_fallbacks == 0
    finally:
        executor.close()
    assert [each.tokens for each in found] == [each.tokens for each in with_logits]
