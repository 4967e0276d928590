"""The tuner's choice with given times, its cache file, and the planner's three sources."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_trt.plugins import cuda
from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, KernelCompileError
from paged_trt.plugins.launch import tuning_target
from paged_trt.plugins.launch.explicit import MAX_EXPLICIT_WORKSPACE_BYTES, require_affordable
from paged_trt.plugins.launch.partitions import active_partitions
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import AttentionPlan, Direct, PlanSource, SplitKv
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuned import (
    RequestKey,
    TunedPlan,
    TunedPlans,
    TuningTarget,
)
from paged_trt.plugins.launch.tuned_file import (
    look_up_tuned,
    open_tuned,
    read_tuned,
    tuned_path,
    write_tuned,
)
from paged_trt.plugins.launch.tuner import NOISE, step_lengths, tune_request
from paged_trt.plugins.launch.workspace import plan_workspace_bytes, split_partitions
from paged_trt.plugins.operands import StepShape

TARGET = TuningTarget(
    gpu="NVIDIA H200",
    arch="sm_90",
    num_multiprocessors=132,
    driver="580.1, CUDA 13.0",
    kernels="ab" * 32,
    compiler="13.0",
)


def make_request(
    num_seqs: int = 1, width: int = 32, *, tokens: int | None = None, window: int = -1
) -> AttentionPlanRequest:
    return AttentionPlanRequest(
        arch="sm_90",
        attention=AttentionSpec(
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=128,
            value_head_dim=128,
            softmax_scale=0.1,
            window=window,
        ),
        activation_dtype=DType.BFLOAT16,
        kv_cache_dtype=DType.BFLOAT16,
        step=StepShape(
            num_tokens=num_seqs if tokens is None else tokens, num_seqs=num_seqs, table_width=width
        ),
        num_multiprocessors=132,
    )


def given_times(fast: AttentionPlan, ratio: float) -> object:
    """A timing source: `fast` takes `ratio` of what every other plan takes."""
    return lambda request, plan: 10.0 * (ratio if plan == fast else 1.0)


REQUEST = make_request()
OTHERS = candidates(REQUEST)[1:]


@pytest.mark.parametrize("fast", OTHERS, ids=str)
def test_the_fastest_plan_is_chosen(fast: AttentionPlan) -> None:
    tuning = tune_request(REQUEST, given_times(fast, 0.5))  # type: ignore[arg-type]
    assert tuning.chosen == fast
    assert tuning.speedup == 2.0
    assert set(tuning.microseconds) == set(candidates(REQUEST))


def test_noise_does_not_replace_the_heuristic() -> None:
    heuristic = candidates(REQUEST)[0]
    within = tune_request(REQUEST, given_times(OTHERS[0], 1 - NOISE / 2))  # type: ignore[arg-type]
    beyond = tune_request(REQUEST, given_times(OTHERS[0], 1 - NOISE * 2))  # type: ignore[arg-type]
    assert (within.chosen, beyond.chosen) == (heuristic, OTHERS[0])
    assert within.speedup == 1.0


def test_a_plan_that_fails_is_left_out_and_named() -> None:
    def time_plan(request: AttentionPlanRequest, plan: AttentionPlan) -> float:
        if plan == OTHERS[0]:
            raise KernelCompileError("no such kernel")
        return 10.0

    tuning = tune_request(REQUEST, time_plan)
    assert {plan: str(error) for plan, error in tuning.failures.items()} == {
        OTHERS[0]: "no such kernel"
    }
    assert OTHERS[0] not in tuning.microseconds


@given(st.integers(1, 300), st.integers(1, 1100), st.one_of(st.just(-1), st.integers(1, 10**5)))
def test_candidates_fit_the_workspace_of_every_engine(seqs: int, width: int, window: int) -> None:
    request = make_request(seqs, width, window=window)
    bound = PolicyPlanner(explicit=None).workspace_bytes(request)
    found = candidates(request)
    assert len(set(found)) == len(found)
    assert found[0] == PolicyPlanner(explicit=None).plan(request).plan
    assert all(plan_workspace_bytes(plan, request) <= bound for plan in found)


def tuned(plan: AttentionPlan, request: AttentionPlanRequest = REQUEST) -> TunedPlan:
    return TunedPlan(
        request=RequestKey.of(request),
        plan_text=str(plan),
        microseconds=8.0,
        heuristic_text="direct",
        heuristic_microseconds=12.0,
    )


def test_explicit_wins_over_tuned_and_tuned_over_the_heuristic() -> None:
    measured = SplitKv(partition_tokens=1024, threshold_tokens=1024)
    plans = TunedPlans([tuned(measured)])
    explicit = PolicyPlanner(explicit=Direct(), tuned=plans).plan(REQUEST)
    assert (explicit.plan, explicit.source) == (Direct(), PlanSource.EXPLICIT)
    found = PolicyPlanner(explicit=None, tuned=plans).plan(REQUEST)
    assert (found.plan, found.source) == (measured, PlanSource.TUNED)
    assert "8.00 us" in found.reason
    assert "12.00 us" in found.reason
    other = PolicyPlanner(explicit=None, tuned=plans).plan(make_request(2))
    assert other.source is PlanSource.HEURISTIC
    assert "132 multiprocessors" in other.reason


def test_a_tuned_plan_beyond_the_workspace_of_the_engine_is_not_taken() -> None:
    request = make_request(200, 512)
    greedy = SplitKv(partition_tokens=128, threshold_tokens=0)
    assert plan_workspace_bytes(greedy, request) > PolicyPlanner(explicit=None).workspace_bytes(
        request
    )
    planner = PolicyPlanner(explicit=None, tuned=TunedPlans([tuned(greedy, request)]))
    assert planner.plan(request).source is PlanSource.HEURISTIC


def test_prefill_sizes_share_a_key_and_decode_sizes_do_not() -> None:
    first, second = (make_request(2, tokens=count) for count in (1000, 1024))
    assert RequestKey.of(first) == RequestKey.of(second)
    assert RequestKey.of(make_request(3)) != RequestKey.of(make_request(4))
    rope = dataclasses.replace(REQUEST.attention, rope=Rope.HALF_SPLIT, rotary_dim=128)
    rotated = dataclasses.replace(REQUEST, attention=rope)
    assert RequestKey.of(rotated) != RequestKey.of(REQUEST)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    first, second = tuned(Direct()), tuned(Direct(), make_request(8))
    write_tuned([first], TARGET, tmp_path)
    path = write_tuned([second], TARGET, tmp_path)
    assert read_tuned(TARGET, tmp_path).all() == (first, second)
    faster = first.model_copy(update={"microseconds": 5.0})
    write_tuned([faster], TARGET, tmp_path)
    found = read_tuned(TARGET, tmp_path).find(REQUEST)
    assert found is not None
    assert found.microseconds == 5.0
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".json"] == [path.name]


def test_no_file_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(read_tuned(TARGET, tmp_path)) == 0
    assert caplog.records == []


@pytest.mark.parametrize("field", ["driver", "kernels", "compiler"])
def test_stale_plans_are_ignored_with_one_line(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tuned([tuned(Direct()), tuned(Direct(), make_request(8))], TARGET, tmp_path)
    now = dataclasses.replace(TARGET, **{field: "another"})
    with caplog.at_level(logging.WARNING, "paged_trt"):
        assert len(read_tuned(now, tmp_path)) == 0
    (record,) = caplog.records
    assert field in record.getMessage()
    assert "paged-trt tune" in record.getMessage()
    write_tuned([tuned(Direct())], now, tmp_path)
    assert len(read_tuned(now, tmp_path)) == 1


def test_another_device_has_another_file(tmp_path: Path) -> None:
    other = dataclasses.replace(TARGET, gpu="NVIDIA H200 NVL")
    cut = dataclasses.replace(TARGET, num_multiprocessors=114)
    names = {tuned_path(target, tmp_path).name for target in (TARGET, other, cut)}
    assert len(names) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["plans"][0].update(plan_text="split:100"),
        lambda data: data["plans"][0].update(plan_text="auto"),
        lambda data: data["plans"][0].update(microseconds=-1.0),
        lambda data: data["plans"][0]["request"].update(num_seqs=0),
        lambda data: data.update(schema_version=2),
        lambda data: data.update(extra=1),
        lambda data: data.pop("driver"),
    ],
)
def test_a_damaged_file_is_ignored_with_one_line(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tuned([tuned(Direct())], TARGET, tmp_path)
    data = json.loads(path.read_text())
    damage(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING, "paged_trt"):
        assert len(read_tuned(TARGET, tmp_path)) == 0
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()


def test_a_directory_that_others_may_write_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tuned([tuned(Direct())], TARGET, tmp_path)
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "paged_trt"):
        assert len(read_tuned(TARGET, tmp_path)) == 0
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="other users may write"):
        write_tuned([tuned(Direct())], TARGET, tmp_path)
    tmp_path.chmod(0o700)
    assert len(read_tuned(TARGET, tmp_path)) == 1


@given(st.integers(1, 200), st.integers(1, 100_000))
def test_timed_lengths_fill_the_bucket(num_seqs: int, tokens: int) -> None:
    lengths = step_lengths(num_seqs, tokens)
    assert len(lengths) == num_seqs
    assert lengths[-1] == tokens
    assert all(tokens // 2 <= length <= tokens for length in lengths)
    assert lengths == sorted(lengths)


@given(
    st.integers(0, 20_000),
    st.integers(1, 40),
    st.integers(0, 9000),
    st.one_of(st.just(-1), st.integers(1, 30_000)),
)
def test_active_partitions_hold_every_visible_key_and_fit_the_grid(
    tokens: int, pages: int, threshold: int, window: int
) -> None:
    plan = SplitKv(partition_tokens=128 * pages, threshold_tokens=threshold)
    found = active_partitions(plan, token_count=tokens, window=window)
    width = max(1, -(-tokens // 128))
    assert found <= split_partitions(plan, table_width=width, window=window)
    visible = tokens if window == -1 else min(tokens, window)
    if tokens == 0:
        assert found == 0
    elif visible <= threshold:
        assert found == 1
    else:
        first = (tokens - visible) // 128 * 128
        assert found * plan.partition_tokens >= tokens - first
        assert (found - 1) * plan.partition_tokens < tokens - first


def test_a_split_that_takes_gigabytes_is_refused_with_what_fits() -> None:
    largest = make_request(256, 1024)
    greedy = SplitKv(partition_tokens=256, threshold_tokens=256)
    needed = plan_workspace_bytes(greedy, largest)
    assert needed > MAX_EXPLICIT_WORKSPACE_BYTES
    with pytest.raises(ConfigError, match=f"{needed:,} bytes") as caught:
        require_affordable(greedy, [largest])
    fitting = SplitKv(partition_tokens=1024, threshold_tokens=1024)
    assert f"`split:1024` ({plan_workspace_bytes(fitting, largest):,} bytes)" in str(caught.value)
    require_affordable(fitting, [largest])
    require_affordable(Direct(), [largest])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A device that is not there, with a cache directory of its own."""
    monkeypatch.setenv("PAGED_TRT_CACHE_DIR", str(tmp_path))
    for name, value in (
        ("device_name", TARGET.gpu),
        ("device_arch", TARGET.arch),
        ("multiprocessors", TARGET.num_multiprocessors),
    ):
        monkeypatch.setattr(cuda, name, lambda ordinal=None, value=value: value)
    monkeypatch.setattr(cuda, "driver_version", lambda: TARGET.driver)
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: TARGET.compiler)
    tuning_target._read_once.cache_clear()
    return tmp_path


def test_a_process_reads_its_plans_once(device: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = tuning_target.tuning_target()
    assert dataclasses.replace(now, kernels=TARGET.kernels) == TARGET
    path = write_tuned([tuned(Direct())], now)
    assert path.parent == device
    assert len(tuning_target.tuned_plans()) == 1
    path.unlink()
    assert len(tuning_target.tuned_plans()) == 1
    tuning_target._read_once.cache_clear()
    assert len(tuning_target.tuned_plans()) == 0
    assert caplog.records == []


def test_stale_plans_are_said_once_per_process(
    device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = tuning_target.tuning_target()
    path = write_tuned([tuned(Direct())], now)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "kernels": "0" * 64}))
    with caplog.at_level(logging.WARNING, "paged_trt"):
        for _ in range(3):
            assert len(tuning_target.tuned_plans()) == 0
    assert len(caplog.records) == 1


def test_a_lookup_names_the_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    none = look_up_tuned(TARGET, tmp_path)
    assert (none.path, len(none.plans), none.problem) == (tuned_path(TARGET, tmp_path), 0, None)
    path = write_tuned([tuned(Direct())], TARGET, tmp_path)
    found = look_up_tuned(TARGET, tmp_path)
    assert (found.path, len(found.plans), found.problem) == (path, 1, None)
    stale = look_up_tuned(dataclasses.replace(TARGET, driver="600"), tmp_path)
    assert (stale.path, len(stale.plans)) == (path, 0)
    assert "stale" in (stale.problem or "")
    target, plans = open_tuned(path)
    assert (target, len(plans)) == (TARGET, 1)
