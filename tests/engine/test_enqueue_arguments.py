"""The plugin's own enqueue on both routes: exact addresses, no work that shapes do not ask for.

The driver only records, so that this runs without a GPU; the plugin class is TensorRT's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import paged_models
import pytest
from fake_driver import FakeDriver, Function

from paged_trt.plugins.device import KernelLaunch
from paged_trt.plugins.errors import KernelLaunchError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.launch.kernels_decode import CallAddresses
from paged_trt.plugins.launch.loaded import ARGUMENT_STRUCTS, LoadedKernel, build_of
from paged_trt.plugins.launch.plans import SplitKv
from paged_trt.plugins.launch.registry import KernelKey
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.operands import LAYOUTS, Operand, StepShape, operand_places
from paged_trt.plugins.plugin_spec import PluginSpec
from paged_trt.plugins.trt import Route

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")

SPEC = paged_models.make_spec()
OUTPUT, WORKSPACE, STREAM = 1 << 30, 1 << 31, 9


class Registry:
    def find(self, key: KernelKey) -> LoadedKernel:
        function = Function(key.path.value, ARGUMENT_STRUCTS[key.path])
        return LoadedKernel(key=key, build=build_of(key), function=function)


def make_plugin(driver: Any, route: Route) -> Any:
    """A plugin whose launches go to `driver`, with the shape of a decode step of N = 3."""
    from paged_trt.plugins.plugin import PagedAttentionPlugin

    plugin = PagedAttentionPlugin(
        PluginSpec(
            operator=OperatorSpec(pool=SPEC.pool, attention=SPEC.layers[0]),
            activation_dtype=SPEC.activation_dtype,
            kv_cache_dtype=SPEC.kv_cache_dtype,
            attention_plan=SplitKv(partition_tokens=128, threshold_tokens=128),
            route=route,
        )
    )

    def prepare(request: AttentionPlanRequest, addresses: CallAddresses) -> PreparedStep:
        return PreparedStep(
            request,
            plugin.spec.operator,
            addresses,
            planner=plugin._planner,
            registry=Registry(),
            make_launch=functools.partial(KernelLaunch, driver=driver),
        )

    plugin.prepare = prepare
    set_shape(plugin, num_seqs=3)
    return plugin


def set_shape(plugin: Any, *, num_seqs: int) -> None:
    """As `on_shape_change` does with descriptions."""
    step = StepShape(num_tokens=num_seqs, num_seqs=num_seqs, table_width=2)
    spec = plugin.spec
    plugin._places = operand_places(spec.layout, spec.operator, plugin._dtypes, num_seqs)
    plugin._launcher.set_shape(plugin._plan_request(step))


def addresses(route: Route) -> tuple[list[int], list[int]]:
    inputs = [(index + 1) << 20 for index in range(len(LAYOUTS[route].names))]
    return inputs, [OUTPUT, inputs[3], inputs[4]]


@pytest.mark.parametrize("route", Route)
def test_every_operand_reaches_its_kernel(route: Route) -> None:
    driver = FakeDriver()
    plugin = make_plugin(driver, route)
    inputs, outputs = addresses(route)
    plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
    append, split, merge = driver.launches
    index = LAYOUTS[route].index
    expected = {op.name.lower(): inputs[index[op]] for op in Operand}
    if route is Route.GQA:
        # [past_lens | query_start_offsets] and [kv_scales | sinks], four bytes each.
        expected["query_start_offsets"] += 3 * 4
        expected["sinks"] += 2 * 2 * 4
    expected |= {"output": OUTPUT, "partial_output": WORKSPACE}
    for launch in (append, split, merge):
        for name, value in launch.args.items():
            if name in expected:
                assert value == expected[name], (launch.name, name)
    assert merge.args["partial_lse"] == split.args["partial_lse"] > WORKSPACE
    # On the GQA route values are padded to the width of keys.
    stride = 2 * (32 if route is Route.GQA else 16)
    assert append.args["value_token_stride"] == stride
    assert (append.args["key_token_stride"], split.args["query_token_stride"]) == (64, 128)
    assert {launch.stream for launch in driver.launches} == {STREAM}


def test_packed_operands_move_with_the_number_of_sequences() -> None:
    driver = FakeDriver()
    plugin = make_plugin(driver, Route.GQA)
    inputs, outputs = addresses(Route.GQA)
    offsets = []
    for num_seqs in (3, 1, 3):
        set_shape(plugin, num_seqs=num_seqs)
        driver.launches.clear()
        plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
        args = driver.launches[0].args
        offsets.append(args["query_start_offsets"] - args["past_lens"])
        assert args["num_seqs"] == args["num_tokens"] == num_seqs
    assert offsets == [12, 4, 12]


@pytest.mark.parametrize("moved", [1, 2])
def test_a_pool_output_elsewhere_is_refused_in_any_call(moved: int) -> None:
    driver = FakeDriver()
    plugin = make_plugin(driver, Route.PLUGIN)
    inputs, outputs = addresses(Route.PLUGIN)
    plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
    outputs[moved] += 256
    with pytest.raises(KernelLaunchError, match="bind both to one address"):
        plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
    assert len(driver.launches) == 3


def answer(*_: Any) -> tuple[int]:
    return (0,)


class SilentDriver(FakeDriver):
    """Launches nothing and records nothing."""

    def __getattr__(self, name: str) -> Any:
        return answer if name == "cuLaunchKernelEx" else super().__getattr__(name)


def test_a_known_step_is_one_python_and_one_driver_call_per_kernel() -> None:
    """Of Python's calls nothing else is left: no property, no wrapper, no helper."""
    plugin = make_plugin(SilentDriver(), Route.GQA)
    inputs, outputs = addresses(Route.GQA)
    plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(argument.__name__)

    # The bindings make new lists of new numbers for every call.
    again = [address + 0 for address in inputs], [address + 0 for address in outputs]
    sys.setprofile(note)
    try:
        plugin.enqueue([], [], *again, WORKSPACE, STREAM)
    finally:
        sys.setprofile(None)
    kernels = ["__call__", "answer"] * 3
    assert calls == ["enqueue", "enqueue", "launch", *kernels, "setprofile"]


def test_a_known_step_keeps_no_memory() -> None:
    plugin = make_plugin(SilentDriver(), Route.GQA)
    inputs, outputs = addresses(Route.GQA)

    def kept_by(count: int) -> int:
        before = sys.getallocatedblocks()
        for _ in range(count):
            plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
        return sys.getallocatedblocks() - before

    kept_by(10)
    # Whatever else the interpreter does meanwhile is less than a block for each call.
    assert kept_by(2000) < 200


def test_a_caller_may_change_its_own_lists() -> None:
    driver = FakeDriver()
    plugin = make_plugin(driver, Route.GQA)
    inputs, outputs = addresses(Route.GQA)
    plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
    outputs[0] += 256
    plugin.enqueue([], [], inputs, outputs, WORKSPACE, STREAM)
    merges = [launch.args["output"] for launch in driver.launches if launch.name == "merge"]
    assert merges == [OUTPUT, OUTPUT + 256]
