"""What `bench host` counts, on a driver and an engine that stand in."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_driver import FakeDriver, Function
from fake_engine import FakeEngine
from session.paged_toy import make_spec, open_toy, prompt_of
from unit.test_launched_steps import take_tokens

from paged_trt.plugins.device import Device
from paged_trt.plugins.launch.args import TakeTokensArgs
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor
from paged_trt.scripts.bench.host import measure
from paged_trt.scripts.timed import TimedExecutor


@pytest.mark.parametrize("pipelines", [False, True], ids=["plain", "pipelined"])
def test_steps_that_count_are_replayed_where_the_page_table_grows(
    tmp_path: Path, pipelines: bool
) -> None:
    """A context that is made among them would take longer than all others together."""
    driver, spec = FakeDriver(), make_spec(greedy_in_engine=True)
    executor = TensorRtExecutor(
        FakeEngine(driver, open_toy(spec, tmp_path)),
        spec,
        Device(driver=driver),
        token_kernel=Function("take_tokens", TakeTokensArgs, take_tokens),
    )
    # From one page to two after the steps that are not counted.
    prompts, steps = [prompt_of(100), prompt_of(40)], 20
    row = measure(TimedExecutor(executor), prompts, new_tokens=45, steps=steps, pipelines=pipelines)
    assert row["graph_hit_rate"] == 1
    assert row["host_share"] == round(row["host_us"] / row["step_us"], 4)
    assert row["cached_tokens"] == 0
    assert ("runtime_us" in row) is not pipelines
    executor.close()
