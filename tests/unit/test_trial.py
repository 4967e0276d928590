"""Trials of kernels on a stand-in device: operands, page tables, turns, and the tuner's times."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, Function, Launched

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.device import Device, KernelLaunch, Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.launch.loaded import ARGUMENT_STRUCTS, LoadedKernel, build_of
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import Direct, SplitKv
from paged_trt.plugins.launch.registry import KernelKey
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.step_sizes import StepSizes, page_tables
from paged_trt.plugins.launch.trial import Trial, is_append, is_attention, prepare_trial
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.launch.tuner import tune_request
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.timing import DriverGraphs, measure
from paged_trt.scripts.tune_device import timing_source

ATTENTION = AttentionSpec(
    num_q_heads=4, num_kv_heads=2, head_dim=64, value_head_dim=64, softmax_scale=0.125
)
POOL_BYTES = 1 << 22
PAGE_BYTES = 2 * 128 * 64 * 2


class Kernels:
    """Every kernel is there, and its name is its path."""

    def find(self, key: KernelKey) -> LoadedKernel:
        function = Function(key.path.value, ARGUMENT_STRUCTS[key.path])
        return LoadedKernel(key=key, build=build_of(key), function=function)

    def warm(self, keys: Iterable[KernelKey]) -> None:
        self.warmed = list(keys)


def request_of(sizes: StepSizes, kv: DType = DType.BFLOAT16) -> AttentionPlanRequest:
    return AttentionPlanRequest(
        arch="sm_89",
        attention=ATTENTION,
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=kv,
        step=sizes.shape,
        num_multiprocessors=132,
    )


def prepare(driver: FakeDriver, sizes: StepSizes, plan: Any, **options: Any) -> Any:
    device = Device(driver=driver)
    memory = TrialMemory(device, Stream(driver), pool_bytes=POOL_BYTES)
    trial = prepare_trial(
        memory,
        request_of(sizes, options.pop("kv", DType.BFLOAT16)),
        sizes,
        planner=PolicyPlanner(explicit=plan),
        registry=Kernels(),
        make_launch=functools.partial(KernelLaunch, driver=driver),
        **options,
    )
    return trial, memory


def at(address: int, count: int, kind: Any) -> Any:
    return np.ctypeslib.as_array((kind * count).from_address(address))


def launched(driver: FakeDriver, trial: Trial, only: Any) -> list[Launched]:
    driver.launches.clear()
    for call in trial.calls(5, only=only):
        call()
    return driver.launches


RAGGED = StepSizes(query_lens=(1, 1, 1), kv_lens=(1, 129, 700))
PREFILL = StepSizes(query_lens=(5, 300), kv_lens=(5, 700))


def test_tables_name_no_page_twice_and_pad_behind_a_sequence() -> None:
    pool = KvPoolSpec.fitting(POOL_BYTES, token_bytes=PAGE_BYTES // 128)
    tables = page_tables(RAGGED, pool, num_sets=4)
    assert tables.shape == (4, 3, 6)
    assert [(row >= 0).sum() for row in tables[0]] == [1, 2, 6]
    used = tables[tables >= 0]
    assert len(set(used)) == len(used) == 4 * 9
    assert (tables[:, 0, 1:] == -1).all()
    with pytest.raises(ConfigError, match="pages"):
        page_tables(RAGGED, pool, num_sets=pool.num_pages)


@pytest.mark.parametrize("query_lens", [(), (0,), (3,)])
def test_impossible_steps_are_refused(query_lens: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        StepSizes(query_lens=query_lens, kv_lens=(2,) * len(query_lens))


def test_kernels_get_the_lengths_the_pages_and_the_pools() -> None:
    driver = FakeDriver()
    trial, memory = prepare(driver, RAGGED, Direct(), num_sets=2)
    launches = launched(driver, trial, is_attention)
    assert len(launches) == 2
    assert all(each.name.startswith("decode_") for each in launches)
    for each, table in zip(launches, trial.tables, strict=True):
        args = each.args
        assert (args["key_pool"], args["value_pool"]) == tuple(memory.pools)
        assert list(at(args["past_lens"], 3, ctypes.c_int32)) == [0, 128, 699]
        assert list(at(args["query_start_offsets"], 4, ctypes.c_int32)) == [0, 1, 2, 3]
        assert list(at(args["page_table"], table.size, ctypes.c_int32)) == list(table.reshape(-1))
        assert args["output"] == trial.output
    assert launches[0].args["page_table"] != launches[1].args["page_table"]


def test_append_and_attention_are_timed_apart() -> None:
    driver = FakeDriver()
    plan = SplitKv(partition_tokens=128, threshold_tokens=0)
    trial, _ = prepare(driver, RAGGED, plan, num_sets=1)
    assert [each.name for each in launched(driver, trial, is_append)] == ["append"]
    names = [each.name for each in launched(driver, trial, is_attention)]
    assert names == ["decode_split", "merge"]
    prefill, _ = prepare(driver, PREFILL, None, num_sets=1)
    assert [each.name for each in launched(driver, prefill, is_attention)] == ["prefill"]


@pytest.mark.parametrize("kv", [DType.BFLOAT16, DType.FLOAT8, DType.INT8])
def test_pools_hold_random_finite_numbers(kv: DType) -> None:
    driver = FakeDriver()
    _, memory = prepare(driver, RAGGED, Direct(), kv=kv)
    for pool in memory.pools:
        numbers = at(pool, POOL_BYTES, ctypes.c_uint8).view(kv.numpy).astype(np.float32)
        assert np.isfinite(numbers).all()
        assert numbers[-1000:].std() > 0.5


def test_memory_is_given_back() -> None:
    driver = FakeDriver()
    _, memory = prepare(driver, RAGGED, Direct())
    memory.release()
    assert len(driver.blocks) == 3  # two pools and the pattern of activations
    memory.close()
    assert driver.blocks == driver.pinned == {}


def test_a_request_of_other_sizes_is_refused() -> None:
    driver = FakeDriver()
    memory = TrialMemory(Device(driver=driver), Stream(driver), pool_bytes=POOL_BYTES)
    with pytest.raises(ConfigError, match="3 sequences"):
        prepare_trial(
            memory, request_of(PREFILL), RAGGED, planner=PolicyPlanner(explicit=None), num_sets=1
        )


def test_times_are_of_one_call_and_every_call_takes_part() -> None:
    driver = FakeDriver()
    seen = []

    def call(name: str, microseconds: float) -> Any:
        def work() -> None:
            seen.append(name)
            driver.clock_us += microseconds

        return lambda: driver.perform(work)

    graphs = DriverGraphs(Stream(driver), driver=driver)
    times = measure(graphs, [call("a", 10.0), call("b", 30.0)], replays=3, graph_microseconds=100.0)
    assert times.median == times.minimum == times.maximum == 20.0
    assert (times.calls, times.replays) == (4, 3)
    # Once to warm up, then two of each in every replay; the last also to guess how many.
    assert (seen.count("a"), seen.count("b")) == (1 + 2 * 4, 2 + 2 * 4)
    graphs.close()
    assert driver.calls["cuEventDestroy"] == 2
    assert driver.graphs == 0


def test_the_tuner_takes_what_the_device_says() -> None:
    """The whole way from launches to a choice: the stand-in's split is faster than its direct."""
    driver = FakeDriver(memory_bytes=1 << 26)
    # Whichever kernels a plan takes: as many blocks as share the keys, so much faster.
    driver.launch_us = lambda launch: (
        2.0
        if launch.name == "merge"
        else 40.0 / max(launch.args.get(name, 1) for name in ("num_partitions", "num_blocks"))
    )
    request = AttentionPlanRequest(
        arch="sm_89",
        attention=ATTENTION,
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=DType.BFLOAT16,
        step=StepShape(num_tokens=2, num_seqs=2, table_width=16),
        num_multiprocessors=8,
    )
    with timing_source(
        0,
        [request],
        device=Device(driver=driver),
        kernels=Kernels(),  # type: ignore[arg-type]
        make_launch=functools.partial(KernelLaunch, driver=driver),
    ) as time_plan:
        tuning = tune_request(request, time_plan)
    assert tuning.microseconds[Direct()] == 40.0
    assert len(tuning.microseconds) > 2
    assert tuning.chosen != Direct()
    assert tuning.microseconds[tuning.chosen] == min(tuning.microseconds.values()) < 10.0
    assert driver.blocks == driver.pinned == {}


def test_a_device_that_fails_every_call_is_not_usable() -> None:
    driver = FakeDriver(memory_bytes=1 << 26)
    request = request_of(PREFILL)
    with timing_source(
        0,
        [request],
        device=Device(driver=driver),
        kernels=Kernels(),  # type: ignore[arg-type]
    ) as timer:
        assert timer.is_usable()
        driver.failing["cuStreamSynchronize"] = 1
        assert not timer.is_usable()
        driver.failing["cuMemGetInfo"] = 1
        assert not timer.is_usable()
