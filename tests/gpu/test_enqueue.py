"""The plugin inside a real engine: numbers, page order, graphs, aliases, and what a step costs."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu.engines import (
    ToyEngine,
    check_agrees,
    generate,
    prompts,
    same_bits,
)

from paged_trt.plugins import cuda
from paged_trt.plugins.device import Device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch.loaded import KERNELS
from paged_trt.runtime import tensorrt_loader
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.session import Session

pytestmark = pytest.mark.gpu

BF16, FP16, FP8, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8, DType.INT8
ENGINES = [
    ToyEngine(),
    ToyEngine(activation=BF16),
    ToyEngine(kv=FP8),
    ToyEngine(activation=BF16, kv=INT8),
    ToyEngine(kv=BF16),
    ToyEngine(plan="direct"),
    ToyEngine(plan="split:128"),
    ToyEngine(plan="split:384:256"),
    ToyEngine(dialect="gqa"),
    ToyEngine(logits="all"),
    ToyEngine(kv=FP8, plan="gather"),
    ToyEngine(activation=BF16, kv=INT8, plan="gather"),
]


@pytest.mark.parametrize("toy", ENGINES, ids=str)
def test_logits_are_those_of_the_reference(toy: ToyEngine) -> None:
    reference = load_engine(toy.folder, "reference")
    executor = open_plan(toy.folder)
    try:
        expected = generate(reference, prompts())
        check_agrees(toy.spec, expected, generate(executor, prompts()))
        # In chunks and on other pages.
        found = generate(executor, prompts(), prefill_chunk=100, page_order=shuffled(toy))
        check_agrees(toy.spec, expected, found)
    finally:
        executor.close()


@pytest.mark.parametrize("toy", ENGINES[:4], ids=str)
def test_a_replay_is_the_eager_step_bit_for_bit(toy: ToyEngine) -> None:
    results = []
    for uses_graphs in (False, True, True):
        executor = open_plan(toy.folder, uses_graphs=uses_graphs)
        results.append(generate(executor, prompts()))
        stats = executor.stats()
        executor.close()
        assert (stats.graph_replays > 0) is uses_graphs
        assert stats.graph_fallbacks == 0
    assert same_bits(results[0], results[1])
    assert same_bits(results[1], results[2])


@pytest.mark.parametrize("toy", ENGINES[:4], ids=str)
def test_scrambled_pages_are_identity_pages_bit_for_bit(toy: ToyEngine) -> None:
    executor = open_plan(toy.folder)
    try:
        identity = generate(executor, prompts())
        assert same_bits(identity, generate(executor, prompts(), page_order=shuffled(toy)))
    finally:
        executor.close()


def shuffled(toy: ToyEngine) -> list[int]:
    order: list[int] = np.random.default_rng(5).permutation(toy.spec.pool.num_pages).tolist()
    return order


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Input and output addresses of every plugin call."""
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    calls: list[tuple[list[int], list[int]]] = []
    original = PagedAttentionPlugin.enqueue

    def enqueue(
        self: Any, inputs: Any, outputs: Any, addresses: Any, targets: Any, *rest: Any
    ) -> Any:
        calls.append((list(addresses), list(targets)))
        return original(self, inputs, outputs, addresses, targets, *rest)

    monkeypatch.setattr(PagedAttentionPlugin, "enqueue", enqueue)
    return calls


@pytest.mark.alone
def test_pools_are_updated_where_they_are(seen: list[tuple[list[int], list[int]]]) -> None:
    """No copy: the plugin's pools, in and out, are the executor's own addresses."""
    toy = ToyEngine()
    executor = open_plan(toy.folder, uses_graphs=False)
    try:
        generate(executor, prompts())
        bound = executor._context_profile._bound
        pools = [
            (bound[f"key_pool.{layer}"][0], bound[f"value_pool.{layer}"][0])
            for layer in range(len(toy.spec.layers))
        ]
    finally:
        executor.close()
    assert len(seen) > 20
    for inputs, outputs in seen:
        assert (inputs[3], inputs[4]) == (outputs[1], outputs[2])
    assert {(inputs[3], inputs[4]) for inputs, _ in seen} == set(pools)


def test_a_replay_runs_no_python_per_layer(seen: list[tuple[list[int], list[int]]]) -> None:
    executor = open_plan(ToyEngine().folder, pipelines=False)
    try:
        generate(executor, prompts())
        calls, replays = len(seen), executor.stats().graph_replays
        session = Session(executor)
        session.add(prompts()[1], 8)
        session.step()
        after_prefill = len(seen)
        for _ in range(4):
            session.step()
        assert executor.stats().graph_replays > replays
        # The bucket of one sequence may be new: one eager step, one capture.
        assert len(seen) - after_prefill <= 2 * len(executor.spec.layers)
        assert after_prefill - calls == len(executor.spec.layers)
    finally:
        executor.close()


class CountingDriver:
    """The driver, and how often each call was made."""

    def __init__(self) -> None:
        self._module = cuda.driver()
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not name.startswith("cu"):
            return value

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return value(*arguments)

        return call


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDriver]:
    driver = CountingDriver()
    monkeypatch.setattr(tensorrt_loader, "kept_device", lambda n: Device(n, driver=driver))
    return driver


PLAIN_STEP = {
    "cuCtxPushCurrent": 1,
    "cuMemcpyHtoDAsync": 1,
    "cuGraphLaunch": 1,
    # The sampling kernel: ids come back, and no logits.
    "cuLaunchKernelEx": 1,
    "cuMemcpyDtoHAsync": 1,
    "cuStreamSynchronize": 1,
    "cuCtxPopCurrent": 1,
}
OVERLAPPING_STEP = {
    "cuCtxPushCurrent": 2,
    "cuMemcpyHtoDAsync": 1,
    "cuGraphLaunch": 1,
    # And the kernel that takes over the tokens of the step before.
    "cuLaunchKernelEx": 2,
    "cuMemcpyDtoHAsync": 1,
    "cuEventRecord": 1,
    "cuEventSynchronize": 1,
    "cuCtxPopCurrent": 2,
}


@pytest.mark.parametrize(
    ("pipelines", "calls"),
    [(False, PLAIN_STEP), (True, OVERLAPPING_STEP)],
    ids=["plain", "overlapping"],
)
@pytest.mark.alone
def test_a_steady_decode_step_is_two_copies_and_one_graph(
    counting: CountingDriver, pipelines: bool, calls: dict[str, int]
) -> None:
    executor = open_plan(ToyEngine().folder, pipelines=pipelines)
    try:
        session = Session(executor)
        session.add(prompts()[1], 60)
        for _ in range(5):
            session.step()
        with executor._device.current():
            free = executor._device.free_bytes()
        counting.calls.clear()
        before = executor.stats()
        for _ in range(20):
            session.step()
        after = executor.stats()
        assert counting.calls == {name: 20 * count for name, count in calls.items()}
        assert after.allocations == before.allocations
        assert after.table_copies == before.table_copies
        with executor._device.current():
            assert executor._device.free_bytes() == free
    finally:
        executor.close()


def test_nothing_is_compiled_after_the_load() -> None:
    executor = open_plan(ToyEngine().folder)
    try:
        made = KERNELS.compiler.num_compiled + KERNELS.compiler.num_cached
        assert made >= 5
        generate(executor, prompts())
        assert KERNELS.compiler.num_compiled + KERNELS.compiler.num_cached == made
    finally:
        executor.close()
