"""Keys and values in the order of their tokens, gathered from either executor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from fake_driver import FakeDriver
from fake_engine import FakeEngine
from session.paged_toy import LAYERS, make_scales, make_spec, open_toy

from paged_trt.plugins.device import Device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError
from paged_trt.runtime.logical_kv import gather_kv, poison_byte
from paged_trt.runtime.recorded_steps import record_steps
from paged_trt.runtime.scenarios import make_scenarios, random_prompts
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor

SPECS = [
    pytest.param(make_spec(), id="float16"),
    pytest.param(make_spec(activation=DType.BFLOAT16), id="bfloat16"),
    pytest.param(make_spec(kv=DType.FLOAT8), id="float8"),
    pytest.param(make_spec(kv=DType.INT8), id="int8"),
]


@pytest.mark.parametrize("spec", SPECS)
def test_both_executors_store_the_same(spec, tmp_path: Path) -> None:
    driver = FakeDriver()
    (tmp_path / "plan").mkdir()
    reference = open_toy(spec, tmp_path)
    executor = TensorRtExecutor(
        FakeEngine(driver, open_toy(spec, tmp_path / "plan")),
        spec,
        Device(driver=driver),
        kv_scales=make_scales(spec),
    )
    prompts = random_prompts(spec, (1, 127, 130), seed=1)
    (scenario, _) = make_scenarios(spec, prompts, num_new_tokens=3)
    for each in (reference, executor):
        each.fill_pools(poison_byte(spec.kv_cache_dtype))
    for inputs in record_steps(spec, scenario, seed=5):
        reference.step(inputs)
        executor.step(inputs)
        stored, found = gather_kv(reference, inputs), gather_kv(executor, inputs)
        assert found.keys() == stored.keys()
        for name, array in stored.items():
            assert np.array_equal(found[name], array), name
            assert np.isfinite(array.astype(np.float32)).all()
    executor.close()
    with pytest.raises(ExecutionError, match="closed"):
        executor.read_pages("key_pool.0", [0])
    with pytest.raises(ExecutionError, match="closed"):
        executor.fill_pools(0)


def test_rows_follow_the_table_and_end_with_their_tokens(tmp_path: Path) -> None:
    spec = make_spec()
    executor = open_toy(spec, tmp_path)
    for layer in range(LAYERS):
        for name in (f"key_pool.{layer}", f"value_pool.{layer}"):
            pool = executor.pool(name)
            pool[:] = np.arange(len(pool))[:, None, None, None]
    (first, *_) = record_steps(
        spec,
        make_scenarios(spec, random_prompts(spec, (200,), seed=0), num_new_tokens=1)[0],
        seed=0,
    )
    inputs = dataclasses.replace(
        first,
        page_table=np.array([[3, 1, -1], [2, -1, -1]], np.int32),
        query_start_offsets=np.array([0, 1, 2], np.int32),
        past_lens=np.array([199, 0], np.int32),
    )
    rows = gather_kv(executor, inputs)["value.1"]
    assert rows.shape == (2, 2, 384, 16)
    assert (rows[0, :, :128] == 3).all()
    assert (rows[0, :, 128:200] == 1).all()
    assert (rows[0, :, 200:] == 0).all()
    assert (rows[1, :, 0] == 2).all()
    assert (rows[1, :, 1:] == 0).all()


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8])
def test_poison_is_not_a_number(dtype: DType) -> None:
    raw = np.full(dtype.itemsize, poison_byte(dtype), np.uint8)
    assert np.isnan(raw.view(dtype.numpy).astype(np.float32)).all()
