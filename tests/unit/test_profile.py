"""Profiles without a GPU: Nsight Compute's table, its refusals, and the launches it is shown.

The tables here were written by hand in the form that `ncu --csv --page raw` documents: no run on a
GPU made them.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_driver import FakeDriver

from paged_trt.plugins import cuda
from paged_trt.plugins.errors import (
    ConfigError,
    ExecutionError,
    KernelError,
    UnsupportedError,
)
from paged_trt.plugins.launch.tuned import TunedPlans, TuningTarget
from paged_trt.scripts.gpu_host import host_results, ncu, profile, profile_launches
from paged_trt.scripts.gpu_host.ncu_metrics import (
    METRICS,
    STALL_PREFIX,
    STALL_SUFFIX,
    TIME,
    base_name,
    metrics_of,
)
from paged_trt.scripts.gpu_host.profile_launches import (
    MARKER,
    OURS,
    Launcher,
    Launches,
    Section,
    chosen_cells,
)
from paged_trt.scripts.gpu_host.profile_rows import rows_of, rows_table, stalls_of
from paged_trt.scripts.kernel_bench.cells import Family, cells_of
from paged_trt.scripts.kernel_bench.peers import PeerCalls, PeerError
from paged_trt.scripts.kernel_bench.profiled import PROFILED, SMALL_BYTES, by_pool, profiled_cells
from paged_trt.scripts.results import read_results

TARGET = TuningTarget(
    gpu="NVIDIA H200",
    arch="sm_90",
    num_multiprocessors=132,
    driver="580",
    kernels="0" * 64,
    compiler="13.0",
)
HEAD = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"),
    *("Block Size", "Grid Size", "Device", "CC"),
)
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
WAVES = "launch__waves_per_multiprocessor"
LEAST, MOST = "sm__cycles_active.min", "sm__cycles_active.max"
STALL = f"{STALL_PREFIX}{{}}{STALL_SUFFIX}"
COLUMNS = (
    *("device__attribute_display_name", TIME, DRAM, TENSOR, WAVES, LEAST, MOST),
    *(STALL.format(name) for name in ("long_scoreboard", "wait", "selected", "gmma", "barrier")),
)
UNITS = ("", "ns", "%", "%", "", "cycle", "cycle", *["inst"] * 5)


def line(*values: object) -> str:
    return ",".join(f'"{value}"' for value in values)


def launch(index: int, name: str, grid: int, *values: object) -> str:
    head = (index, 4711, "python3.12", "127.0.0.1", name, 1, 13, "(128, 1, 1)", f"({grid}, 1, 1)")
    return line(*head, 0, "9.0", *values)


MARK = ("NVIDIA H200", "2,048", "0.1", "n/a", "0.00", "0", "1,024", 0, 0, 1, 0, 0)
TABLE = "\n".join(
    (
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "section_marker" - 0: 0%....50%....100% - 14 passes',
        '==PROF== Profiling "decode" - 1: 0%....50%....100% - 15 passes',
        "==PROF== Disconnected from process 4711",
        line(*HEAD, *COLUMNS),
        line(*[""] * len(HEAD), *UNITS),
        launch(0, MARKER, 1, *MARK),
        launch(1, "decode", 256, "NVIDIA H200", "40,192", "71.5", "12.25", "0.97",
               "30,000", "60,000", 6, 2, 1, 0, 1),
        launch(2, "merge<128, 8>", 32, "NVIDIA H200", "4,096", "3.5", "n/a", "0.12",
               "0", "4,000", 1, 0, 1, 0, 0),
        launch(3, MARKER, 2, *MARK),
        launch(4, "device_kernel", 132, "NVIDIA H200", "1,250,000", "20", "64.5", "1.00",
               "1,000", "1,250", 1, 2, 1, 5, 1),
    )
)  # fmt: skip
DECODE = profiled_cells(Family.DECODE)[0]
PREFILL = profiled_cells(Family.PREFILL)[0]


def section(library: str = OURS, **more: Any) -> Section:
    cell = DECODE if library == OURS else PREFILL
    return Section(library=library, cell=str(cell), family=cell.family, row=cell.row(), **more)


LAUNCHES = Launches(
    sections=[section(plan="counter:8 (heuristic)"), section("FlashAttention-3")],
    peers={"FlashAttention-3": "3"},
)


def test_the_table_of_nsight_compute_is_read() -> None:
    marker, decode, merge, *others = ncu.kernels_of(TABLE)
    assert (marker.name, marker.grid, marker.block) == (MARKER, (1, 1, 1), (128, 1, 1))
    assert (decode.name, decode.grid) == ("decode", (256, 1, 1))
    assert decode.microseconds == pytest.approx(40.192)
    assert decode.metrics[DRAM] == 71.5
    assert decode.metrics[MOST] == 60_000
    assert merge.name == "merge<128, 8>"
    assert TENSOR not in merge.metrics
    assert "device__attribute_display_name" not in merge.metrics
    assert len(others) == 2
    assert ncu.passes_of(TABLE) == 15


def test_times_have_the_unit_that_the_table_names() -> None:
    text = TABLE.replace('"ns"', '"second"').replace('"40,192"', '"4.0e-05"')
    assert ncu.kernels_of(text)[1].microseconds == pytest.approx(40.0)
    with pytest.raises(ExecutionError, match="in `furlong`; known units are ns"):
        ncu.kernels_of(TABLE.replace('"ns"', '"furlong"'))


def test_launches_belong_to_the_marker_ahead_of_them() -> None:
    ours, theirs = rows_of(LAUNCHES, ncu.kernels_of(TABLE))
    assert (ours["family"], ours["library"], ours["kv_len"]) == ("decode", OURS, 4096)
    assert ours["plan"] == "counter:8 (heuristic)"
    assert ours["us"] == pytest.approx(44.29)
    assert [kernel["name"] for kernel in ours["kernels"]] == ["decode", "merge<128, 8>"]
    # Of the longest kernel.
    assert (ours["kernel"], ours["dram_pct"], ours["waves"]) == ("decode", 71.5, 0.97)
    assert ours["active_min_over_max"] == 0.5
    assert ours["stalls"] == {"long_scoreboard": 0.6, "wait": 0.2, "barrier": 0.1}
    assert (theirs["library"], theirs["tensor_pct"]) == ("FlashAttention-3", 64.5)
    assert next(iter(theirs["stalls"].items())) == ("gmma", 0.5)


def test_a_call_that_was_not_profiled_says_why() -> None:
    launches = Launches(sections=[section(), section("x", error="refused"), section()])
    kernels = [each for each in ncu.kernels_of(TABLE) if each.grid[0] != 132]
    good, lost, refused = rows_of(launches, kernels)  # decode first
    assert "error" not in good
    assert (refused["error"], "us" in refused) == ("refused", False)
    assert lost["error"] == "Nsight Compute has no kernel of it"
    assert rows_table([good, refused, lost]).row_count == 3


def test_shares_of_stalls_need_no_stall() -> None:
    assert stalls_of({}) == {}
    assert stalls_of({STALL.format("wait"): 0.0}) == {"wait": 0.0}


def test_metrics_that_are_not_known_are_left_out() -> None:
    everything = frozenset(map(base_name, METRICS))
    assert metrics_of(everything) == list(METRICS)
    assert metrics_of(frozenset()) == list(METRICS)
    fewer = metrics_of(everything - {"dram__throughput"})
    assert set(METRICS) - set(fewer) == {"dram__throughput.avg.pct_of_peak_sustained_elapsed"}
    listed = frozenset(name for name in everything if not name.startswith("launch__"))
    assert WAVES in metrics_of(listed)
    assert len(set(METRICS)) == len(METRICS)


def test_the_cells_are_cells_of_the_benchmark() -> None:
    for family in Family:
        cells = profiled_cells(family)
        assert len(set(cells)) == len(cells) >= len(PROFILED[family])
        assert set(cells) <= set(cells_of(family, quick=False))
    assert [cell.is_even for cell in profiled_cells(Family.DECODE)].count(False) == 1
    assert chosen_cells(["append"], [str(profiled_cells(Family.APPEND)[0])]) == [
        profiled_cells(Family.APPEND)[0]
    ]
    names = [cell.family for cell in chosen_cells(["prefill", "append"], [])]
    assert names[:3] == [Family.PREFILL, Family.APPEND, Family.PREFILL]
    assert len(names) == sum(len(profiled_cells(family)) for family in set(names))
    with pytest.raises(ConfigError, match="no decode cell `9 x 9`"):
        chosen_cells(["decode"], ["9 x 9"])
    with pytest.raises(ConfigError, match="2 are chosen"):
        chosen_cells(["decode", "append"], ["9 x 9"])


def test_a_large_cell_has_a_pool_of_its_own() -> None:
    cells = [cell for family in Family for cell in profiled_cells(family)]
    small, *large = by_pool(cells)
    sizes = [cell.sizes.kv_bytes(cell.attention, cell.kv) for (cell,) in large]
    assert sizes == sorted(sizes)
    assert min(sizes) > SMALL_BYTES
    assert sorted(map(str, cells)) == sorted(
        str(cell) for group in (small, *large) for cell in group
    )
    assert by_pool([]) == []


NCU = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
here = pathlib.Path(os.environ["FAKE_FOLDER"])
if words in (["--query-metrics"], ["--help"]):
    print(os.environ.get("FAKE_KNOWN" if "query" in words[0] else "FAKE_HELP", ""))
    sys.exit()
calls = here / "calls.json"
calls.write_text(json.dumps([*(json.loads(calls.read_text()) if calls.exists() else []), words]))
print("the program said this")
text = os.environ["FAKE_TABLE"]
metrics = words[words.index("--metrics") + 1].split(",")
bad = os.environ.get("FAKE_BAD")
if bad in metrics:
    text = "==ERROR== Failed to find metric regex:^" + bad.partition(".")[0] + r"\\.(sum|avg)$"
if text:
    pathlib.Path(words[words.index("--log-file") + 1]).write_text(text)
launches = next(word for word in words if word.endswith("launches.json"))
pathlib.Path(launches).write_text(os.environ["FAKE_LAUNCHES"])
sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with a stand-in for `ncu` that prints what the test says."""

    def start(keys: Any) -> concurrent.futures.Future[None]:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        assert keys
        done.set_result(None)
        return done

    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text(NCU.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(host_results, "gpu_and_driver", lambda device: ("NVIDIA H200", "580"))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(profile, "tuning_target", lambda device: TARGET)
    monkeypatch.setattr("paged_trt.scripts.kernel_bench.ours.tuned_plans", TunedPlans)
    monkeypatch.setattr(profile, "start_compiling", start)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))

    def call(*words: str, table: str = TABLE, launches: str | None = None, **more: str) -> Any:
        monkeypatch.setenv("FAKE_TABLE", table)
        monkeypatch.setenv("FAKE_LAUNCHES", launches or LAUNCHES.model_dump_json())
        for name, value in more.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", value)
        every = ["-o", str(tmp_path / "out"), "--commit", "abc", *words]
        return CliRunner().invoke(profile.main, every)

    return call


def test_a_profile_is_a_table_and_a_results_file(run: Run, tmp_path: Path) -> None:
    known = "\n".join(f"{name}  Counter  %" for name in map(base_name, METRICS))
    done = run("--cells", "decode,append", "--peers", known=f"Device H200\n---\n{known}")
    assert done.exit_code == 0, done.output
    for text in ("32/8, 8 x 4096", "44.29 (+1 kernels)", "long_scoreboard 60%", "15 passes"):
        assert text in done.output
    (path,) = (tmp_path / "out").glob("profile-nvidia-h200-*.json")
    results = read_results(path)
    assert (results.kind, results.commit, results.peers) == (
        "profile",
        "abc",
        {"FlashAttention-3": "3"},
    )
    assert [row["library"] for row in results.rows] == [OURS, "FlashAttention-3"]
    assert (tmp_path / "out" / "ncu.csv").read_text() == TABLE
    assert "the program said" in (tmp_path / "out" / "ncu.csv.out").read_text()
    (words,) = json.loads((tmp_path / "calls.json").read_text())
    joined = " ".join(words)
    for option in ("--clock-control none", "--profile-from-start off", "--replay-mode kernel"):
        assert option in joined
    assert words[words.index("--metrics") + 1].split(",") == list(METRICS)
    child = words[words.index("paged_trt.scripts.gpu_host.profile_launches") + 1 :]
    assert child[1:] == [
        *("--family", "decode", "--family", "append", "--peers"),
        *("--limit-s", "60.0", "--device", "0"),
    ]
    parsed = profile_launches.main.make_context("launches", list(child)).params
    assert parsed["families"] == ("decode", "append")
    assert parsed["with_peers"] is True


@pytest.mark.parametrize("known_options", ["", "  --pipeline-boost-state arg (=stable)"])
def test_tensor_cores_are_not_held_back(known_options: str, run: Run, tmp_path: Path) -> None:
    assert run(help=known_options).exit_code == 0
    (words,) = json.loads((tmp_path / "calls.json").read_text())
    assert ("--pipeline-boost-state dynamic" in " ".join(words)) is bool(known_options)


def test_a_metric_that_this_version_lacks_sinks_nothing(run: Run, tmp_path: Path) -> None:
    bad = "lts__t_sector_hit_rate.pct"
    done = run(bad=bad)
    assert done.exit_code == 0, done.output
    first, second = json.loads((tmp_path / "calls.json").read_text())
    tried = [words[words.index("--metrics") + 1].split(",") for words in (first, second)]
    assert set(tried[0]) - set(tried[1]) == {bad}


def test_a_call_without_a_kernel_fails_the_command(run: Run) -> None:
    launches = LAUNCHES.model_copy(update={"note": "not run from 32/8 on: the time ended"})
    done = run(launches=launches.model_dump_json(), table="\n".join(TABLE.split("\n")[:-1]))
    assert done.exit_code == 1
    assert "Nsight Compute has no kernel of it" in done.output
    assert "not run from 32/8 on" in done.output
    assert "1 of 2 calls" in done.output


def test_without_nsight_compute_nothing_is_begun(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    done = run()
    assert isinstance(done.exception, UnsupportedError)
    assert "add its `bin` folder to PATH" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_counters_that_may_not_be_read_are_named(run: Run) -> None:
    text = (
        "==PROF== Connected to process 1 (/usr/bin/python3.12)\n"
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
        "Performance Counters on the target device 0."
    )
    done = run(table=text, code="1")
    assert isinstance(done.exception, UnsupportedError)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in str(done.exception)


@pytest.mark.parametrize("table", ["", "==WARNING== No kernels were profiled.", line(*HEAD, TIME)])
def test_an_empty_profile_shows_what_both_programs_said(table: str, run: Run) -> None:
    done = run(table=table, code="9")
    assert isinstance(done.exception, ExecutionError)
    message = str(done.exception)
    assert "profiled no kernel, exit code 9" in message
    assert table in message
    assert "the program said this" in message


def test_launches_that_cannot_be_read_are_named(run: Run) -> None:
    done = run(launches="[]")
    assert isinstance(done.exception, ExecutionError)
    assert "launches.json does not say what was launched" in str(done.exception)


def test_a_profiler_that_does_not_end_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\n[ $1 = --help ] && exit\nsleep 1000 & sleep 1000\n")
    program.chmod(0o755)
    with pytest.raises(ExecutionError, match="did not end within 1 s"):
        ncu.profile(str(program), ["x"], metrics=["a"], log=tmp_path / "ncu.csv", limit_s=1)


class FakeGraphs:
    """Runs a call and remembers whether it was profiled."""

    def __init__(self, driver: FakeDriver, seen: list[tuple[str, bool]]) -> None:
        self.driver, self.seen = driver, seen

    def run(self, call: Callable[[], Any]) -> float:
        self.seen.append((call(), self.driver.is_profiling))
        return 1.0


class FakeMemory:
    def __init__(self) -> None:
        self.stream = self
        self.released = 0
        self.is_lost = False

    def release(self) -> None:
        self.released += 1

    def synchronize(self) -> None:
        if self.is_lost:
            raise ExecutionError("illegal address")


class FakeOurs:
    stream = 7

    def __init__(self) -> None:
        self.error: Exception | None = None

    def prepare(self, cell: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self

    def calls(self, stream: int, *, only: Any) -> list[Callable[[], str]]:
        assert (stream, only("append"), only("decode")) == (7, False, True)
        return [lambda: "call 0", lambda: "call 1", lambda: "call 2"]

    def plan_text(self, cell: Any) -> str:
        return "direct (heuristic)"


class FakeOpened:
    """As `OpenKernels`."""

    def __init__(self, graphs: FakeGraphs) -> None:
        self.graphs, self.ours, self.memory = graphs, FakeOurs(), FakeMemory()

    def data_of(self, cell: Any) -> Any:
        return cell


class FakePeer:
    name = "FlashAttention-3"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def prepare(self, data: Any) -> PeerCalls:
        if self.error is not None:
            raise self.error
        return PeerCalls(calls=[lambda: "theirs"], output=lambda: None)


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., Any]:
    def make(*peers: FakePeer) -> Any:
        driver = FakeDriver()
        seen: list[tuple[str, bool]] = []
        opened = FakeOpened(FakeGraphs(driver, seen))
        launcher = Launcher(
            path=tmp_path / "launches.json",
            mark=lambda number, stream: f"marker {number} on {stream}",  # type: ignore[arg-type, return-value]
            driver=driver,
            peers=peers,  # type: ignore[arg-type]
        )
        return launcher, opened, seen

    return make


def test_only_the_last_call_of_a_cell_is_profiled(launched: Any, tmp_path: Path) -> None:
    launcher, opened, seen = launched(FakePeer())
    assert launcher.run(opened, [PREFILL, DECODE], deadline=float("inf"))
    assert [what for what, is_profiled in seen if is_profiled] == [
        *("marker 1 on 7", "call 2", "marker 2 on 7", "theirs", "marker 3 on 7", "call 2"),
    ]
    assert [what for what, is_profiled in seen if not is_profiled] == [
        *("call 0", "call 1", "theirs", "theirs", "call 0", "call 1"),
    ]
    found = Launches.model_validate_json((tmp_path / "launches.json").read_text())
    assert [each.library for each in found.sections] == [OURS, "FlashAttention-3", OURS]
    assert [each.plan for each in found.sections] == [
        "direct (heuristic)",
        "",
        "direct (heuristic)",
    ]
    assert opened.memory.released == 2


def test_what_cannot_be_launched_says_why_and_the_rest_is(launched: Any) -> None:
    launcher, opened, seen = launched(FakePeer(PeerError("no cell for it")))
    opened.ours.error = KernelError("no kernel")
    assert launcher.run(opened, [PREFILL], deadline=float("inf"))
    assert [each.error for each in launcher.launches.sections] == ["KernelError: no kernel"]
    assert seen == []
    launcher.peers, opened.ours.error = [FakePeer(RuntimeError("it broke"))], None
    assert launcher.run(opened, [PREFILL], deadline=float("inf"))
    assert [each.error for each in launcher.launches.sections] == [
        *("KernelError: no kernel", "", "RuntimeError: it broke"),
    ]
    assert [what for what, is_profiled in seen if is_profiled] == ["marker 2 on 7", "call 2"]


def test_a_run_ends_in_time_and_with_a_lost_device(launched: Any) -> None:
    launcher, opened, _ = launched(FakePeer(RuntimeError("it broke")))
    assert not launcher.run(opened, [PREFILL], deadline=0.0)
    assert launcher.launches.note == f"not run from {PREFILL} on: the time ended"
    assert launcher.launches.sections == []
    opened.memory.is_lost = True
    assert not launcher.run(opened, [PREFILL, DECODE], deadline=float("inf"))
    assert launcher.launches.note == f"stopped at {PREFILL}: illegal address"
    assert [each.library for each in launcher.launches.sections] == [OURS, "FlashAttention-3"]
    opened.ours.error = ExecutionError("no memory")
    assert not launcher.run(opened, [PREFILL], deadline=float("inf"))
    assert launcher.launches.note == f"stopped at {PREFILL}: no memory"


def test_the_marker_is_a_kernel() -> None:
    cubin = cuda.compile_cubin(profile_launches.MARKER_SOURCE, arch="sm_90a")
    assert MARKER.encode() in cubin.code
    assert cubin.log.strip() == ""
