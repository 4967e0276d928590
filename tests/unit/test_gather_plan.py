"""The gather path of prefill: who plans it and why, its workspace, its launches and arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_dirs import small_spec
from fake_driver import FakeDriver
from hypothesis import given
from hypothesis import strategies as st
from unit.test_kernel_bench import TARGET
from unit.test_launch_dispatch import ADDRESSES
from unit.test_prefill_dispatch import POOL, Maps, prepare
from unit.test_prefill_plan import make_request

from paged_trt.plugins.attention import Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.launch import gather
from paged_trt.plugins.launch.dispatch import kernel_paths
from paged_trt.plugins.launch.explicit import require_affordable
from paged_trt.plugins.launch.gather import (
    FEWEST_ROWS,
    MOST_GATHERED_BYTES,
    gather_workspace,
    query_rows,
)
from paged_trt.plugins.launch.planner import PlannedAttention, PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import (
    Direct,
    Gather,
    PlanSource,
    PrefillPlan,
    SplitKv,
    parse_attention_plan,
)
from paged_trt.plugins.launch.registry import KernelPath
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import RequestKey, TunedPlan, TunedPlans
from paged_trt.plugins.launch.tuner import engine_requests, tune_request
from paged_trt.plugins.operands import Operand
from paged_trt.plugins.plugin_spec import PluginSpec
from paged_trt.plugins.trt import Route
from paged_trt.scripts.kernel_bench import ours
from paged_trt.scripts.kernel_bench.cells import Family, cells_of
from paged_trt.scripts.tune_device import keys_of, step_sizes
from paged_trt.scripts.tune_report import describe

FP8, INT8 = DType.FLOAT8, DType.INT8
AUTO, EXPLICIT = PolicyPlanner(explicit=None), PolicyPlanner(explicit=Gather())
ASKED = PolicyPlanner(explicit=None, gathers_unasked=False)
WIDE = {"head_dim": 256, "value_head_dim": 256, "num_kv_heads": 2}
HOPPER = (KernelPath.APPEND, KernelPath.GATHER, KernelPath.PREFILL_SM90)
PORTABLE = (KernelPath.APPEND, KernelPath.PREFILL)


def planned(
    planner: PolicyPlanner, request: AttentionPlanRequest
) -> tuple[PlannedAttention, PrefillPlan]:
    found = planner.plan(request)
    assert isinstance(found.plan, PrefillPlan)
    assert found.reason == found.plan.reason
    return found, found.plan


def request_of(*sizes: int, kv: DType = FP8, **attention: Any) -> AttentionPlanRequest:
    return make_request(*sizes, kv=kv, **attention)


def tuned(request: AttentionPlanRequest, text: str) -> TunedPlans:
    return TunedPlans([TunedPlan(
        request=RequestKey.of(request), plan_text=text, microseconds=10.0,
        heuristic_text="direct", heuristic_microseconds=20.0,
    )])  # fmt: skip


@pytest.mark.parametrize("kv", [FP8, INT8], ids=lambda kv: kv.value)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_8_bit_pools_are_gathered_unasked(kv: DType, head_dim: int) -> None:
    """Whoever changes this has run `test_prefill_gather.py` and `bench_gather.py` on a GPU."""
    assert gather.GATHERS_UNASKED is True
    assert gather.UNASKED_HEAD_DIMS == (64, 128)
    request = request_of(kv=kv, head_dim=head_dim, value_head_dim=head_dim)
    found, plan = planned(AUTO, request)
    assert (plan.kernel, plan.gathers, found.source) == ("hopper", True, PlanSource.HEURISTIC)
    assert str(plan) == (
        f"hopper from gathered pages (gathering pays from {FEWEST_ROWS} query rows a key on, and "
        "each serves 32768)"
    )
    assert kernel_paths(request, plan) == HOPPER
    assert candidates(request) == (Gather(), Direct())
    assert AUTO.workspace_bytes(request) == gather_workspace(request).num_bytes


@pytest.mark.parametrize(
    ("planner", "features"), [(AUTO, WIDE), (ASKED, {})], ids=["wide", "switched off"]
)
def test_what_gathers_only_if_it_is_asked_to(
    planner: PolicyPlanner, features: dict[str, Any]
) -> None:
    request = request_of(**features)
    found, plan = planned(planner, request)
    assert (plan.kernel, plan.gathers, found.source) == ("portable", False, PlanSource.HEURISTIC)
    assert str(plan) == (
        "portable (hopper's kernel has no a float8 pool under bfloat16; only "
        "`--attention-plan gather` gathers its pages)"
    )
    assert kernel_paths(request, plan) == PORTABLE
    assert candidates(request, gathers_unasked=planner.gathers_unasked) == (Direct(),)
    # What was measured elsewhere does not switch it on either: there is no workspace for it.
    measured = dataclasses.replace(planner, tuned=tuned(request, "gather"))
    assert not planned(measured, request)[1].gathers
    assert planner.workspace_bytes(request) < MOST_GATHERED_BYTES // 8


@pytest.mark.parametrize("kv", [FP8, INT8], ids=lambda kv: kv.value)
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"window": 300, "softcap": 5.0},
        {"rope": Rope.HALF_SPLIT, "rotary_dim": 64},
        {"head_dim": 64, "value_head_dim": 64},
        WIDE,
    ],
)
def test_an_explicit_plan_gathers(kv: DType, features: dict[str, Any]) -> None:
    request = request_of(kv=kv, **features)
    found, plan = planned(EXPLICIT, request)
    assert (plan.gathers, found.source) == (True, PlanSource.EXPLICIT)
    # The launch is that of a 16-bit pool.
    direct = planned(AUTO, make_request(**features))[1]
    assert (plan.kernel, plan.blocks, plan.partitions) == (
        direct.kernel, direct.blocks, direct.partitions
    )  # fmt: skip
    assert str(plan).startswith(
        "hopper from gathered pages (the engine was built with `--attention"
    )
    assert kernel_paths(request, plan) == HOPPER
    split = planned(EXPLICIT, request_of(64, kv=kv, **features))[1]
    assert split.partitions > 1
    assert kernel_paths(request, split)[-1] is KernelPath.PREFILL_SM90_SPLIT


def test_decode_steps_know_nothing_of_it() -> None:
    request = request_of(8, 8, 64)
    assert EXPLICIT.plan(request) == AUTO.plan(request)
    assert EXPLICIT.plan(request).source is PlanSource.HEURISTIC
    plans = tuned(request, "counter:3")
    assert str(dataclasses.replace(EXPLICIT, tuned=plans).plan(request).plan) == "counter:3"
    broken = tuned(request, "gather")
    assert dataclasses.replace(EXPLICIT, tuned=broken).plan(request) == AUTO.plan(request)


@pytest.mark.parametrize("planner", [EXPLICIT, AUTO], ids=["explicit", "auto"])
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (dataclasses.replace(request_of(), arch="sm_100"), "sm_100 is not sm_90"),
        (dataclasses.replace(request_of(), arch=None), "None is not sm_90"),
        (request_of(head_dim=96, value_head_dim=96), "float8 pool"),
        (request_of(value_head_dim=64), "float8 pool"),
        (request_of(softmax_scale=-1.0), "float8 pool"),
    ],
)
def test_what_hoppers_kernel_does_not_cover_is_not_gathered(
    planner: PolicyPlanner, request_: AttentionPlanRequest, reason: str
) -> None:
    found, plan = planned(planner, request_)
    assert (plan.kernel, plan.gathers, found.source) == ("portable", False, PlanSource.HEURISTIC)
    assert reason in plan.reason


def test_16_bit_pools_are_read_as_they_are() -> None:
    for planner in (AUTO, EXPLICIT, ASKED):
        assert planned(planner, make_request())[1].gathers is False
        assert planner.workspace_bytes(make_request()) == AUTO.workspace_bytes(make_request())


def test_a_step_beyond_the_bound_attends_from_the_pool_and_says_so() -> None:
    # 8 heads of 256 elements in 16 bits: half a MiB a page, so 512 pages would fill it.
    fitting, beyond = request_of(8192, 1, 511), request_of(8192, 8, 64)
    assert planned(EXPLICIT, fitting)[1].gathers
    assert EXPLICIT.workspace_bytes(fitting) == 511 * 2**19 + 2048 + 4
    plan = planned(EXPLICIT, beyond)[1]
    assert (plan.kernel, plan.gathers) == ("portable", False)
    assert plan.reason.endswith(
        "gathering its pages needs 268,437,508 bytes of workspace, over the limit of 268,435,456"
    )
    # Smaller steps of that engine gather, so it has the workspace.
    assert EXPLICIT.workspace_bytes(beyond) == MOST_GATHERED_BYTES
    # A window bounds what is read, however wide the table is.
    assert planned(EXPLICIT, request_of(8192, 8, 4096, window=1024))[1].gathers


def test_the_heuristic_counts_the_query_rows_of_a_key() -> None:
    group = 4
    enough = request_of(FEWEST_ROWS // group)
    assert query_rows(enough) == FEWEST_ROWS
    found, plan = planned(AUTO, enough)
    assert (plan.gathers, found.source) == (True, PlanSource.HEURISTIC)
    reason = f"gathering pays from {FEWEST_ROWS} query rows a key on, and each serves "
    assert plan.reason == f"{reason}{FEWEST_ROWS}"
    few = request_of(FEWEST_ROWS // group - 1)
    plan = planned(AUTO, few)[1]
    assert (plan.kernel, plan.gathers) == ("portable", False)
    assert plan.reason.endswith(f"{reason}{FEWEST_ROWS - group}")
    # Rows of a key are rows of its sequence.
    assert not planned(AUTO, request_of(FEWEST_ROWS, 16, 16))[1].gathers
    assert candidates(enough) == (Gather(), Direct())
    assert candidates(few) == (Direct(), Gather())
    assert candidates(request_of(8192, 8, 64)) == (Direct(),)


@pytest.mark.parametrize(("text", "gathers"), [("gather", True), ("direct", False)])
@pytest.mark.parametrize("tokens", [64, 4096])
def test_a_measured_plan_wins_over_counting(tokens: int, text: str, gathers: bool) -> None:
    request = request_of(tokens)
    found, plan = planned(dataclasses.replace(AUTO, tuned=tuned(request, text)), request)
    assert (plan.gathers, found.source) == (gathers, PlanSource.TUNED)
    assert "measured: " in plan.reason
    assert "10.00 us" in plan.reason


def test_a_measured_decode_is_no_measured_prefill() -> None:
    """Rounded up, five tokens of eight rows are the eight of a decode step."""
    plans = tuned(request_of(8, 8, 16), "direct")
    found, _ = planned(dataclasses.replace(AUTO, tuned=plans), request_of(5, 8, 16))
    assert found.source is PlanSource.HEURISTIC


def test_a_plan_that_nothing_follows_is_refused_by_the_build() -> None:
    require_affordable(Gather(), [make_request(), request_of()])
    require_affordable(Gather(), [dataclasses.replace(request_of(), arch=None)])
    with pytest.raises(ConfigError, match=r"a bfloat16 pool is read as it is; .*--kv-cache"):
        require_affordable(Gather(), [make_request()])
    with pytest.raises(ConfigError, match="no layer has one: head_dim=96"):
        require_affordable(Gather(), [request_of(head_dim=96, value_head_dim=96)])


@pytest.mark.parametrize(
    "text", ["auto", "direct", "balanced", "gather", "cluster:4", "counter:9", "split:256:0"]
)
def test_plans_are_read_back_from_a_text_and_from_an_engine(text: str) -> None:
    plan = parse_attention_plan(text)
    assert text == ("auto" if plan is None else str(plan))
    spec = PluginSpec(
        operator=OperatorSpec(pool=POOL, attention=request_of().attention),
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=FP8,
        attention_plan=plan,
        route=Route.PLUGIN,
    )
    fields = {name: array.item() for name, array in spec.to_fields().items()}
    assert PluginSpec.from_fields(fields, where="test") == spec


@st.composite
def steps(draw: st.DrawFn) -> AttentionPlanRequest:
    return request_of(
        draw(st.integers(1, 20_000)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 600)),
        kv=draw(st.sampled_from([FP8, INT8, DType.BFLOAT16])),
        window=draw(st.one_of(st.just(-1), st.integers(1, 20_000))),
        num_kv_heads=draw(st.sampled_from([1, 2, 8, 32])),
    )


@given(steps(), st.integers(0, 5000), st.integers(0, 30), st.integers(0, 300),
       st.sampled_from([AUTO, EXPLICIT, ASKED, PolicyPlanner(explicit=Direct())]))  # fmt: skip
def test_no_step_passes_the_bound_of_its_engine(
    request: AttentionPlanRequest, tokens: int, seqs: int, width: int, planner: PolicyPlanner
) -> None:
    step = request.step
    if request.is_decode:
        return
    largest = dataclasses.replace(
        request,
        arch=None,
        num_multiprocessors=None,
        step=dataclasses.replace(
            step,
            num_tokens=step.num_tokens + tokens,
            num_seqs=step.num_seqs + seqs,
            table_width=step.table_width + width,
        ),
    )
    bound = planner.workspace_bytes(largest)
    plan = planned(planner, request)[1]
    if plan.gathers:
        assert gather_workspace(request).num_bytes <= min(bound, MOST_GATHERED_BYTES)
    elif plan.takes_tiles:
        assert bound >= 4


def test_every_argument_is_exact() -> None:
    driver, maps = FakeDriver(), Maps()
    request = request_of(8192, 1, 64, window=2000, kv=INT8)
    step = prepare(driver, maps, request, Gather())
    step.bind(ADDRESSES)
    step.launch(9)
    append, gathered, prefill = driver.launches
    names = ["append", "gather", "prefill_sm90"]
    assert [append.name, gathered.name, prefill.name] == names
    # Only the gather starts before the kernel ahead of it has ended.
    assert [each.overlaps for each in driver.launches] == [False, True, False]
    assert {each.stream for each in driver.launches} == {9}
    places = {op.name.lower(): ADDRESSES.operands[op] for op in Operand}
    workspace = gather_workspace(request)
    assert workspace.pages == 64
    keys, values = ADDRESSES.workspace, ADDRESSES.workspace + 64 * 128 * 8 * 128 * 2
    table = values + 64 * 128 * 8 * 128 * 2
    pools = ("key_pool", "value_pool", "page_table", "query_start_offsets", "past_lens")
    assert gathered.args == {
        **{name: places[name] for name in pools},
        "gathered_keys": keys, "gathered_values": values, "gathered_table": table,
        "tile_counter": table + 256,
        "num_seqs": 1, "table_width": 64, "num_pages": POOL.num_pages, "num_kv_heads": 8,
        "window": 2000,
    }  # fmt: skip
    assert (gathered.grid, gathered.threads, gathered.shared_bytes) == ((64 * 8, 1, 1), 256, 0)
    args = prefill.args
    assert (args["page_table"], args["num_pages"]) == (table, 64)
    assert (args["kv_scales"], args["query"]) == (places["kv_scales"], places["query"])
    assert list(args["key_map"]) == [keys >> 20] * 16
    assert list(args["value_map"]) == [values >> 20] * 16
    shape = (64, 8, 128, 128)
    assert maps.calls[-2:] == [
        (keys, DType.BFLOAT16, shape, 128), (values, DType.BFLOAT16, shape, 128)
    ]  # fmt: skip
    # The counter lies behind the table; the gather kernel clears it.
    assert args["tile_counter"] == table + 256
    assert append.args["num_counters"] == 0
    assert table + 256 + 4 == ADDRESSES.workspace + workspace.num_bytes


def test_a_windowed_step_has_a_slot_for_what_it_sees() -> None:
    driver = FakeDriver()
    request = request_of(300, 2, 64, window=200)
    step = prepare(driver, Maps(), request, Gather())
    step.bind(ADDRESSES)
    step.launch(0)
    assert driver.launches[2].args["tile_counter"] == 0  # few tiles are dealt out
    assert driver.launches[1].grid == (gather_workspace(request).pages * 8, 1, 1)
    assert gather_workspace(request).pages == (300 + 2 * 325) // 128 + 2 == 9
    assert driver.launches[2].args["num_pages"] == 9


def test_moved_workspaces_get_new_maps_and_tables() -> None:
    driver, maps = FakeDriver(), Maps()
    step = prepare(driver, maps, request_of(), Gather())
    for workspace in (1 << 31, 1 << 33):
        step.bind(dataclasses.replace(ADDRESSES, workspace=workspace))
        step.launch(0)
        _, gathered, prefill = driver.launches[-3:]
        assert gathered.args["gathered_keys"] == workspace
        assert prefill.args["page_table"] == gathered.args["gathered_table"]
        assert list(prefill.args["key_map"]) == [workspace >> 20] * 16


def test_prefill_steps_are_tuned_where_they_may_gather() -> None:
    spec = dataclasses.replace(
        small_spec(DType.FLOAT16, FP8),
        pool=KvPoolSpec.plan(max_batch_size=3, max_kv_cache_capacity=1024),
        max_num_tokens=300,
    )
    options = {"arch": "sm_90", "num_multiprocessors": 132}
    asked = list(engine_requests(spec, **options, gathers_unasked=False))
    assert all(each.is_decode for each in asked)
    *_, last = requests = list(engine_requests(spec, **options))
    decodes = [each for each in requests if each.is_decode]
    prefills = requests[len(decodes) :]
    assert requests[: len(decodes)] == decodes == asked
    assert prefills
    assert max(each.step.num_tokens for each in prefills) == spec.max_num_tokens
    for request in prefills:
        assert len(candidates(request)) == 2
        sizes = step_sizes(request)
        assert sizes.shape == request.step
        assert sum(sizes.query_lens) == request.step.num_tokens
    times = {"gather": 5.0, "direct": 9.0}
    tuning = tune_request(last, lambda _, plan: times[str(plan)])
    assert tuning.chosen == Gather()
    found, plan = planned(dataclasses.replace(AUTO, tuned=TunedPlans([tuning.record()])), last)
    assert (plan.gathers, found.source) == (True, PlanSource.TUNED)
    assert "T " in describe(last)


@pytest.mark.parametrize("text", ["direct", "gather"])
def test_a_tuned_step_has_the_kernels_of_its_plan(text: str) -> None:
    plan = parse_attention_plan(text)
    assert plan is not None
    paths = tuple(key.path for key in keys_of(request_of(), plan))
    assert paths == (HOPPER if text == "gather" else PORTABLE)


def test_the_benchmark_times_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "tuned_plans", TunedPlans)
    cells = [cell for cell in cells_of(Family.PREFILL, quick=False) if cell.kv.is_quantised]
    assert {cell.kv for cell in cells} == {FP8, INT8}

    def paths(**options: Any) -> set[KernelPath]:
        options = {"all_plans": False, **options}
        return {key.path for key in ours.kernels_of(cells, TARGET, **options)}

    split = KernelPath.PREFILL_SM90_SPLIT
    assert paths(explicit=Direct()) == set(PORTABLE)
    # The cell with the fewest rows of queries for a key has 256.
    assert paths() == {*HOPPER, split}
    assert paths(explicit=Gather()) == {*HOPPER, split}
    assert paths(all_plans=True) == {*HOPPER, *PORTABLE, split}
    assert ours.plans_worth_timing(make_request()) == ()


def test_a_split_is_no_plan_of_prefill_steps() -> None:
    split = PolicyPlanner(explicit=SplitKv(partition_tokens=256, threshold_tokens=256))
    assert not split.may_gather(request_of())
    assert not dataclasses.replace(split, gathers_unasked=False).may_gather(request_of())
