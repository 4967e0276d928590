"""The sweep of plans and kernel variants on a stand-in device whose kernels compute on the host."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver, Function, Launched

from paged_trt.plugins.cuda import Cubin
from paged_trt.plugins.device import Device, KernelLaunch, Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import KernelCompileError
from paged_trt.plugins.launch.kernels_decode import KernelBuild, kernel_build
from paged_trt.plugins.launch.loaded import ARGUMENT_STRUCTS, DeviceKernels
from paged_trt.plugins.launch.planner import PolicyPlanner, candidates
from paged_trt.plugins.launch.plans import Balanced, Cluster, Counter, Direct, SplitKv
from paged_trt.plugins.launch.registry import Feature, KernelKey, KernelPath, KernelVariant
from paged_trt.plugins.launch.sources import KERNEL_DIRECTORY
from paged_trt.plugins.launch.step_sizes import StepSizes
from paged_trt.plugins.launch.trial_memory import TrialMemory
from paged_trt.plugins.launch.tuned import TuningTarget
from paged_trt.plugins.timing import DriverGraphs, measure_in_turn
from paged_trt.scripts.bench import plans
from paged_trt.scripts.cli import main
from paged_trt.scripts.kernel_bench.candidates import (
    Candidate,
    append_candidates,
    decode_candidates,
    variants_of,
)
from paged_trt.scripts.kernel_bench.cells import Cell, Family
from paged_trt.scripts.kernel_bench.misses import DECODE_MISSES, missed_cells
from paged_trt.scripts.kernel_bench.sweep import Sweep
from paged_trt.scripts.kernel_bench.variants import builds_of
from paged_trt.scripts.results import read_results

LENGTHS = (300, 200)
DECODE = Cell(
    family=Family.DECODE,
    group="x",
    heads=(4, 2),
    head_dim=64,
    sizes=StepSizes(query_lens=(1, 1), kv_lens=LENGTHS),
)
APPEND = Cell(
    family=Family.APPEND,
    group="x",
    heads=(4, 2),
    head_dim=64,
    sizes=StepSizes(query_lens=(130,), kv_lens=(130,)),
)
UNITS = 8
POISON = 0x5A5A
BF16 = DType.BFLOAT16.numpy


def at(address: int, shape: tuple[int, ...], kind: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), kind).reshape(shape)


def attention(args: dict[str, Any]) -> Any:
    """A decode of two query heads per key head, from the arguments of its kernel alone."""
    seqs, width, heads = args["num_seqs"], args["table_width"], args["num_kv_heads"]
    query = at(args["query"], (seqs, heads, 2, 64), BF16).astype(np.float64)
    pools = [
        at(args[name], (args["num_pages"], heads, 128, 64), BF16)
        for name in ("key_pool", "value_pool")
    ]
    table = at(args["page_table"], (seqs, width), np.int32)
    lens = at(args["past_lens"], (seqs,), np.int32) + 1
    out = np.zeros((seqs, heads, 2, 64))
    for row, length in enumerate(lens):
        used = table[row][: -(-int(length) // 128)]
        for head in range(heads):
            key, value = (
                np.concatenate([pool[page, head] for page in used])[:length].astype(np.float64)
                for pool in pools
            )
            scores = query[row, head] @ key.T * args["softmax_scale"]
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[row, head] = weights @ value / weights.sum(axis=1, keepdims=True)
    return out.astype(BF16)


class Kernels:
    """What NVRTC and the driver would give: names of kernels, and what they do.

    Attributes:
        wrong: texts in the names of kernels that give something else.
        missing: texts in the names of kernels that do not compile.
        wrong_rounds: of a warp of an append, with which its result is wrong.
        loaded: names of those that were loaded.
    """

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.missing: set[str] = set()
        self.wrong_rounds: set[int] = set()
        self.loaded: list[str] = []
        self._split: Any = None
        self._places: Any = None

    def compile(self, source: str, name_expression: str, *, arch: str) -> Cubin:
        if any(text in name_expression for text in self.missing):
            raise KernelCompileError("it does not fit")
        return Cubin(code=b"", arch=arch, names={name_expression: name_expression}, log="")

    def load(self, code: bytes, name: str, *, shared_bytes: int) -> Function:
        self.loaded.append(name)
        path = KernelPath(name.removeprefix("paged_trt::").partition("<")[0])
        return Function(name, ARGUMENT_STRUCTS[path], functools.partial(self.run, path, name))

    def run(self, path: KernelPath, name: str, args: dict[str, Any]) -> None:
        is_wrong = any(text in name for text in self.wrong)
        if path is KernelPath.APPEND:
            self.append(args, args["rounds_per_warp"] in self.wrong_rounds)
        elif path is KernelPath.DECODE_SPLIT:
            places = args["page_table"], args["partial_output"]
            if places != self._places:
                self._places, self._split = places, attention(args)
        else:
            output = at(args["output"], (args["num_seqs"], 2, 2, 64), BF16)
            if output.any():
                return  # a replay: memory of a new trial is zero
            found = self._split if path is KernelPath.MERGE else attention(args)
            output[:] = found * BF16(1 - 0.2 * is_wrong)

    def append(self, args: dict[str, Any], is_wrong: bool) -> None:
        """The new keys and values of one sequence, from its first position on."""
        tokens, heads = args["num_tokens"], args["num_kv_heads"]
        table = at(args["page_table"], (args["table_width"],), np.int32)
        for name in ("key", "value"):
            rows = at(args[name], (tokens, heads, 64), np.uint16)
            pool = at(args[f"{name}_pool"], (args["num_pages"], heads, 128, 64), np.uint16)
            if pool[table[0], 0, 0, 0] != POISON:
                continue  # a replay
            for token in range(tokens - is_wrong):
                pool[table[token // 128], :, token % 128] = rows[token]


@contextlib.contextmanager
def make_sweep(kernels: Kernels, driver: FakeDriver, *, arch: str = "sm_90") -> Iterator[Sweep]:
    device = Device(driver=driver)
    stream = Stream(driver)
    memory = TrialMemory(device, stream, pool_bytes=1 << 20)
    yield Sweep(
        graphs=DriverGraphs(stream, driver=driver),
        memory=memory,
        stream=stream.handle,
        arch=arch,
        num_multiprocessors=UNITS,
        ceilings={"read_GBs": 4000.0, "copy_GBs": 3000.0},
        kernels=DeviceKernels(kernels, load=kernels.load, context=lambda: 1),  # type: ignore[arg-type]
        graph_microseconds=20.0,
        trial_options={"make_launch": functools.partial(KernelLaunch, driver=driver)},
    )
    memory.close()
    assert not driver.blocks


def small_blocks_are_fast(launched: Launched) -> float:
    if launched.name.startswith("paged_trt::merge"):
        return 1.0
    return 5.0 if launched.threads == 128 else 8.0


def test_the_fastest_right_candidate_of_a_decode_is_found() -> None:
    driver, kernels = FakeDriver(), Kernels()
    driver.launch_us = small_blocks_are_fast
    request = DECODE.request(arch="sm_90", num_multiprocessors=UNITS)
    with make_sweep(kernels, driver) as sweep:
        (row,), note = sweep.run([DECODE])
    assert note == ""
    assert "errors" not in row
    heuristic = PolicyPlanner(explicit=None).plan(request).plan
    assert row["plan"] == str(heuristic)
    first = [str(each) for each in decode_candidates(request)]
    assert set(first) <= set(row["all_us"])
    assert row["best"] == "balanced"  # the first of those that take 5 us; its blocks are small
    assert row["best_us"] == 5.0
    assert {row["all_us"][name][0] for name in row["all_us"] if "4 warps" in name} == {5.0}
    assert row["ours_us"] == row["all_us"][row["plan"]][0] == 8.0
    assert any("other depth" in name for name in row["all_us"])
    assert row["kv_lens"] == list(LENGTHS)


def test_a_wrong_candidate_has_no_time_and_a_reason() -> None:
    driver, kernels = FakeDriver(), Kernels()
    driver.launch_us = small_blocks_are_fast
    # Blocks of four warps: the last number of the name but two.
    kernels.wrong = {"2, 4, 1, 0>"}
    kernels.missing = {"decode_split"}
    with make_sweep(kernels, driver) as sweep:
        (row,), _ = sweep.run([DECODE])
    wrong = {name: text for name, text in row["errors"].items() if "off by 0.2" in text}
    assert all("4 warps" in name or name == "balanced" for name in wrong)
    assert len(wrong) >= 2
    missing = [name for name, text in row["errors"].items() if "does not fit" in text]
    assert missing
    assert all(name.startswith("split") for name in missing)
    assert not set(row["errors"]) & set(row["all_us"])
    assert "4 warps" not in row["best"]


def test_a_wrong_kernel_of_the_engine_itself_is_found_by_the_reference() -> None:
    driver, kernels = FakeDriver(), Kernels()
    request = DECODE.request(arch="sm_90", num_multiprocessors=UNITS)
    usual = decode_candidates(request)[0]
    (path,) = {
        "cluster": [KernelPath.DECODE_CLUSTER],
        "counter": [KernelPath.DECODE_COUNTER],
        "direct": [KernelPath.DECODE_COUNTER],
    }[str(usual).partition(":")[0]]
    kernels.wrong = {f"{path.value}<"}
    with make_sweep(kernels, driver) as sweep:
        (row,), _ = sweep.run([DECODE])
    assert "off by 0.2" in row["errors"][str(usual)]
    assert "ours_us" not in row
    assert "best_us" in row


def test_appends_are_cut_as_asked_and_compared_byte_by_byte() -> None:
    driver, kernels = FakeDriver(), Kernels()
    driver.launch_us = lambda launched: 100.0 / launched.args["rounds_per_warp"]
    kernels.wrong_rounds = {3}
    # Hopper's prefill kernel would want tensor maps of the driver.
    with make_sweep(kernels, driver, arch="sm_89") as sweep:
        (row,), _ = sweep.run([APPEND])
    assert (row["plan"], row["ours_us"]) == ("append", 100.0)
    assert (row["best"], row["best_us"]) == ("append 4 rounds", 25.0)
    assert row["errors"].keys() == {"append 3 rounds"}
    assert "bytes of the pools differ" in row["errors"]["append 3 rounds"]
    cut = {
        (launched.args["rounds_per_warp"], launched.grid)
        for launched in driver.launches
        if launched.name.startswith("paged_trt::append")
    }
    # 130 tokens, four warps to a block; two rounds: both heads of keys, both of values.
    assert cut == {(1, (33, 2, 1)), *((rounds, (33, 1, 1)) for rounds in (2, 3, 4))}


def test_replays_of_several_works_take_turns() -> None:
    class Graphs:
        def __init__(self) -> None:
            self.order: list[str] = []

        def run(self, call: Any) -> float:
            return 1.0

        def record(self, calls: Any) -> Any:
            return Replay(self, calls[0]())

    class Replay:
        def __init__(self, graphs: Graphs, name: str) -> None:
            self.graphs, self.name = graphs, name

        def __call__(self) -> float:
            self.graphs.order.append(self.name)
            return 2.0 * len(self.graphs.order)

        def close(self) -> None:
            self.graphs.order.append(f"-{self.name}")

    graphs = Graphs()
    works: Any = [[lambda: "a"], [lambda: "b", lambda: "b"]]
    first, second = measure_in_turn(graphs, works, replays=3, graph_microseconds=2.0, estimate=1.0)
    assert graphs.order == ["a", "b"] * 4 + ["-b", "-a"]
    assert (first.calls, second.calls) == (2, 2)
    assert (first.median, first.minimum, first.maximum) == (5.0, 3.0, 7.0)
    assert second.median == 6.0


def test_a_sweep_begins_with_what_the_tuner_times() -> None:
    """One list of plans: planner, tuner and benchmarks call `planner.candidates`."""
    for cell in missed_cells(Family.DECODE):
        request = cell.request(arch="sm_90", num_multiprocessors=132)
        tuned = [str(plan) for plan in candidates(request)]
        found = [str(each) for each in decode_candidates(request)]
        assert found[: len(tuned)] == tuned
        assert len(set(found)) == len(found)
        assert len(found) > len(tuned) or cell.heads == (32, 32)


def test_the_cells_that_missed_are_cells_of_the_benchmark() -> None:
    found = missed_cells(Family.DECODE)
    assert [str(cell) for cell in found[: len(DECODE_MISSES)]] == list(DECODE_MISSES)
    assert sum(not cell.is_even for cell in found) == 3
    assert len(missed_cells(Family.APPEND)) >= 10


KEY = KernelKey(
    path=KernelPath.DECODE_COUNTER,
    arch="sm_90",
    activation_dtype=DType.BFLOAT16,
    kv_cache_dtype=DType.BFLOAT16,
    head_dim=128,
    value_head_dim=128,
    group_size=4,
)


@pytest.mark.parametrize(
    ("path", "variant", "name", "threads"),
    [
        (KernelPath.DECODE_COUNTER, KernelVariant(), "4, 8, 1, 0>", 256),
        (KernelPath.DECODE_COUNTER, KernelVariant(warps=4, other_depth=True), "4, 4, 1, 8>", 128),
        (KernelPath.DECODE_DIRECT, KernelVariant(warps=8, other_depth=True), "4, 8, 1, 8>", 256),
        (KernelPath.APPEND, KernelVariant(other_depth=True, warps=8), "128, 128, 0>", 128),
        (KernelPath.MERGE, KernelVariant(other_depth=True), "merge<__nv_bfloat16, 128>", 128),
    ],
)
def test_a_variant_is_another_instance(
    path: KernelPath, variant: KernelVariant, name: str, threads: int
) -> None:
    build = kernel_build(dataclasses.replace(KEY, path=path), variant)
    assert build.name_expression.endswith(name)
    assert build.threads == threads


def test_variants_fit_their_plans() -> None:
    request = missed_cells(Family.DECODE)[2].request(arch="sm_90", num_multiprocessors=132)
    every = (Direct(), Balanced(), Cluster(blocks=8), Counter(blocks=16),
             SplitKv(partition_tokens=128, threshold_tokens=128))  # fmt: skip
    for plan in every:
        found = variants_of(request, [Candidate(plan=plan)])
        assert any(each.variant.other_depth for each in found)
    assert [each.append_rounds for each in append_candidates()] == [None, 1, 2, 3, 4]


def test_kernels_are_compiled_once_beforehand() -> None:
    builds = builds_of([DECODE, APPEND, DECODE], arch="sm_90", num_multiprocessors=UNITS)
    names = [build.name_expression for build in builds]
    assert len(set(names)) == len(names)
    assert {build.source for build in builds} >= {"append.cu", "decode_balanced.cu", "merge.cu"}


def test_the_command_lists_cells_and_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plans", "--list", "--match", "1 x 16384"]) == 0
    assert "decode: 32/8 d256 bfloat16 1 x 16384" in capsys.readouterr().out
    assert main(["bench", "plans", "--match", "no such cell"]) == 2
    assert "no cell has `no such cell`" in capsys.readouterr().err


def test_a_run_is_a_table_and_a_results_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver, kernels = FakeDriver(), Kernels()
    driver.launch_us = small_blocks_are_fast
    kernels.missing = {"decode_split"}
    compiled: list[KernelBuild] = []

    def start_compiling_builds(builds: Any, arch: str) -> concurrent.futures.Future[None]:
        compiled.extend(builds)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done

    target = TuningTarget(
        gpu="NVIDIA H200", arch="sm_90", num_multiprocessors=UNITS, driver="580", kernels="0" * 64,
        compiler="13.0",
    )  # fmt: skip
    monkeypatch.setattr(plans, "tuning_target", lambda device: target)
    monkeypatch.setattr(plans, "missed_cells", lambda family: [DECODE])
    monkeypatch.setattr(plans, "open_sweep", lambda *_: make_sweep(kernels, driver))
    monkeypatch.setattr(plans, "start_compiling_builds", start_compiling_builds)
    arguments = ["bench", "plans", "--cells", "decode", "--commit", "abc", "-o", str(tmp_path)]
    assert main(arguments) == 0
    (path,) = tmp_path.glob("decode-nvidia-h200-*.json")
    results = read_results(path)
    (row,) = results.rows
    assert row["best"] in row["all_us"]
    assert "take turns" in results.method
    said = " ".join(capsys.readouterr().out.split())
    assert "balanced" in said
    assert "failed" in said
    # What was compiled ahead is what was loaded.
    assert set(kernels.loaded) <= {build.name_expression for build in compiled}


@pytest.mark.parametrize(
    ("constant", "path", "variant"),
    [
        ("kOtherDepth", KernelPath.DECODE_SPLIT, KernelVariant(other_depth=True)),
    ],
)
def test_variants_have_the_numbers_of_the_kernels(
    constant: str, path: KernelPath, variant: KernelVariant
) -> None:
    text = (KERNEL_DIRECTORY / "decode_config.cuh").read_text(encoding="utf-8")
    assert f"constexpr int {constant} = {variant.bits(path)};" in text
    # None of them is a feature of a layer.
    assert not variant.bits(path) & sum(feature.value for feature in Feature)
