"""The benchmark that `FEWEST_ROWS` is set by, on a stand-in device."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, Function
from gpu import bench_gather
from gpu.bench_gather import CELLS, RestingGraphs, fewest_rows, request_of, works
from unit.test_trial import Kernels

from paged_trt.plugins.device import Device, KernelLaunch, Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.launch import tensor_maps
from paged_trt.plugins.launch.loaded import ARGUMENT_STRUCTS, LoadedKernel
from paged_trt.plugins.launch.registry import KernelKey, KernelPath
from paged_trt.plugins.launch.step_sizes import BYTES_IN_TURN
from paged_trt.plugins.launch.trial import prepare_trial
from paged_trt.plugins.launch.trial_memory import TrialMemory


def test_every_cell_gathers_and_fits_the_pools() -> None:
    found = list(works("sm_90", 132))
    assert len(found) == 4 * len(CELLS)
    for name, request in found:
        plan = bench_gather.PLANNERS["gather"].plan(request).plan
        assert getattr(plan, "gathers", False), name
        sizes = bench_gather.sizes_of(name)
        assert sizes.kv_bytes(request.attention, request.kv_cache_dtype) <= BYTES_IN_TURN


@pytest.mark.parametrize(
    ("ratios", "wanted"),
    [
        ({64: [1.2], 512: [0.9], 4096: [0.5]}, 512),
        ({64: [1.2], 512: [0.9, 1.1], 4096: [0.5]}, 4096),
        ({64: [0.9], 512: [0.8]}, 64),
        ({64: [0.9], 512: [1.0]}, None),
    ],
)
def test_rows_from_which_on_every_cell_is_faster(
    ratios: dict[int, list[float]], wanted: int | None
) -> None:
    rows = [
        {"query_rows": count, "ratio": ratio} for count, many in ratios.items() for ratio in many
    ]
    assert fewest_rows(rows) == wanted


class Computing(Kernels):
    """Both prefills give ones, but for what Hopper's is off by."""

    def __init__(self, error: float) -> None:
        self.error = error

    def find(self, key: KernelKey) -> LoadedKernel:
        found = super().find(key)
        if key.path in (KernelPath.APPEND, KernelPath.GATHER):
            return found
        run = functools.partial(self.run, 1.0 + self.error * (key.path is KernelPath.PREFILL_SM90))
        function = Function(key.path.value, ARGUMENT_STRUCTS[key.path], run)
        return dataclasses.replace(found, function=function)

    @staticmethod
    def run(value: float, args: dict[str, Any]) -> None:
        numbers = (ctypes.c_uint16 * (140 * 32 * 64)).from_address(args["output"])
        np.ctypeslib.as_array(numbers).view(DType.BFLOAT16.numpy)[:] = value


@pytest.mark.parametrize(("error", "is_right"), [(0.01, True), (0.05, False)])
def test_both_ways_of_a_step_are_launched_whole(
    monkeypatch: pytest.MonkeyPatch, error: float, is_right: bool
) -> None:
    driver, kernels = FakeDriver(), Computing(error)
    driver.launch_us = lambda launched: 50.0 if launched.name == "prefill" else 10.0
    monkeypatch.setattr(bench_gather, "GAP_SECONDS", 0.0)
    monkeypatch.setattr(bench_gather, "KERNELS", kernels)
    monkeypatch.setattr(tensor_maps, "encode_pool_map", lambda *_: bytes(128))
    options: dict[str, Any] = {
        "registry": kernels,
        "make_launch": functools.partial(KernelLaunch, driver=driver),
    }
    monkeypatch.setattr(
        bench_gather, "prepare_trial", functools.partial(prepare_trial, num_sets=2, **options)
    )
    stream = Stream(driver)
    memory = TrialMemory(Device(driver=driver), stream, pool_bytes=1 << 20)
    monkeypatch.setitem(CELLS, "tiny", (2, 70, 30))
    request = request_of("tiny", DType.INT8, 64, arch="sm_90", units=132)
    row = bench_gather.time_step(memory, RestingGraphs(stream, driver=driver), "tiny", request)
    memory.close()
    names = [launched.name for launched in driver.launches]
    assert names[:2] == ["append", "prefill"]
    assert names[2:5] == ["append", "gather", "prefill_sm90"]
    assert (row["portable_us"][0], row["gather_us"][0]) == (60.0, 30.0)
    assert (row["ratio"], row["query_rows"]) == (0.5, 280)
    assert row["is_right"] is is_right
