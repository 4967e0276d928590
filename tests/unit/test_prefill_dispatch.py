"""Prefill steps on Hopper: arguments, tensor maps, clusters and the tile counter."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from fake_driver import FakeDriver
from unit.test_launch_dispatch import ADDRESSES, NOWHERE, Registry
from unit.test_prefill_plan import make_request

from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import Direct
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import Operand

POOL = KvPoolSpec.plan(max_batch_size=4, max_kv_cache_capacity=8192, retained_pages=3)


class Maps:
    """Encodes a map as its address, in every byte pair."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, address: int, *what: Any) -> bytes:
        self.calls.append((address, *what))
        return (address >> 20).to_bytes(8, "little") * 16


def prepare(
    driver: FakeDriver, maps: Maps, request: AttentionPlanRequest, explicit: Any = None
) -> PreparedStep:
    return PreparedStep(
        request,
        OperatorSpec(pool=POOL, attention=request.attention),
        NOWHERE,
        planner=PolicyPlanner(explicit=explicit),
        registry=Registry(),
        make_launch=functools.partial(KernelLaunch, driver=driver),
        encode_map=maps,
    )


def test_every_argument_is_exact() -> None:
    driver, maps = FakeDriver(), Maps()
    request = make_request(window=2000, softcap=30.0)
    step = prepare(driver, maps, request)
    step.bind(ADDRESSES)
    step.launch(9)
    append, prefill = driver.launches
    assert [append.name, prefill.name] == ["append", "prefill_sm90"]
    assert (prefill.grid, prefill.threads, prefill.cluster) == ((132, 1, 1), 384, (1, 1, 1))
    assert not prefill.overlaps
    args = dict(prefill.args)
    key, value = (ADDRESSES.operands[op] for op in (Operand.KEY_POOL, Operand.VALUE_POOL))
    assert list(args.pop("key_map")) == [key >> 20] * 16
    assert list(args.pop("value_map")) == [value >> 20] * 16
    names = ("query", "page_table", "query_start_offsets", "past_lens", "rope_cos_sin", "sinks",
             "kv_scales")  # fmt: skip
    places = {op.name.lower(): ADDRESSES.operands[op] for op in Operand}
    assert args == {
        **{name: places[name] for name in names},
        "output": 1 << 30, "tile_counter": 1 << 31, "query_token_stride": 128,
        "output_token_stride": 32 * 128, "num_tokens": 8192, "num_seqs": 1, "table_width": 64,
        "num_pages": POOL.num_pages, "num_kv_heads": 8, "rope": 0, "rotary_dim": 0,
        "window": 2000, "softmax_scale": pytest.approx(0.1), "softcap": 30.0,
    }  # fmt: skip


def test_pools_that_move_get_new_maps() -> None:
    driver, maps = FakeDriver(), Maps()
    step = prepare(driver, maps, make_request())
    for shift in (0, 1 << 30):
        moved = tuple(place + shift for place in ADDRESSES.operands)
        step.bind(dataclasses.replace(ADDRESSES, operands=moved))
        step.launch(0)
        key = moved[Operand.KEY_POOL]
        assert list(driver.launches[-1].args["key_map"]) == [key >> 20] * 16
        shape = (POOL.num_pages, 8, 128, 128)
        assert maps.calls[-2:][0] == (key, step.request.kv_cache_dtype, shape, 128)


def test_the_append_clears_the_counter_of_the_prefill_behind() -> None:
    driver = FakeDriver()
    step = prepare(driver, Maps(), make_request())
    for workspace in (ADDRESSES.workspace, 1 << 33):
        step.bind(dataclasses.replace(ADDRESSES, workspace=workspace))
        step.launch(7)
        append, prefill = driver.launches[-2:]
        assert (append.args["counters"], append.args["num_counters"]) == (workspace, 1)
        assert prefill.args["tile_counter"] == workspace
        # It is clear before a block of the prefill starts.
        assert not prefill.overlaps
    assert list(driver.calls) == ["cuLaunchKernelEx"]


@pytest.mark.parametrize(
    ("request_", "explicit"),
    [
        (make_request(1024), None),
        (make_request(16 * 512, 16, 4), None),
        (make_request(), Direct()),
    ],
    ids=["few-tiles", "short", "no-workspace"],
)
def test_tiles_are_dealt_out_without_a_counter(
    request_: AttentionPlanRequest, explicit: Any
) -> None:
    driver = FakeDriver()
    step = prepare(driver, Maps(), request_, explicit)
    step.bind(ADDRESSES)
    step.launch(0)
    append, prefill = driver.launches
    assert (append.args["num_counters"], prefill.args["tile_counter"]) == (0, 0)


def test_split_keys_are_a_cluster() -> None:
    driver = FakeDriver()
    step = prepare(driver, Maps(), make_request(64, 1, 64))
    step.launch(0)
    launched = driver.launches[-1]
    assert launched.name == "prefill_sm90_split"
    assert (launched.grid, launched.cluster) == ((128, 1, 1), (8, 1, 1))
