"""`paged-trt bench engine`: what it writes, what it refuses; the GPU part on stand-ins."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from engine_dirs import write_engine_dir
from fake_driver import FakeDriver
from fake_engine import FakeEngine
from session.paged_toy import make_spec, open_toy

from paged_trt.plugins.device import Device
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.launch.dispatch import PreparedStep
from paged_trt.plugins.launch.plans import Direct
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor
from paged_trt.scripts import engine_timing
from paged_trt.scripts.bench.engine import kernel_columns
from paged_trt.scripts.cli import main
from paged_trt.scripts.engine_timing import Cell, KernelTimes, StepTimes, Times, time_kernels
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy
from paged_trt.scripts.readme import render
from paged_trt.scripts.results import Results, read_results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "toy"
    write_toy(folder, Dialect.GQA)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    limits = {"max_batch_size": 2, "max_kv_cache_capacity": 200, "max_input_len": 100}
    return write_engine_dir(model, model.parents[1] / "engine", **limits)


@pytest.mark.parametrize("draws_on_device", [False, True])
def test_a_cpu_measures_and_says_what(
    draws_on_device: bool,
    model: Path,
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A TensorRT engine draws its tokens where the logits are: another way to run a step.
    monkeypatch.setattr(ReferenceExecutor, "samples_on_device", draws_on_device)
    output = tmp_path / "engine.json"
    words = ["--executor=reference", "--steps=3", "--model", str(model), "-o", str(output)]
    assert main(["bench", "engine", str(engine), *words]) == 0
    output_text = capsys.readouterr().out
    assert "no kernel of ours ran" in output_text
    assert output_text.count("the un-rewritten model in onnxruntime") == 2
    results = read_results(output)
    assert (results.kind, results.cuda) == ("engine", "none")
    assert "onnxruntime" in results.peers
    assert [(row["batch"], row["kv_len"], row["steps"]) for row in results.rows] == [
        (1, 100, 3),
        (2, 100, 3),
    ]
    for row in results.rows:
        assert row["ours_share"] is None
        assert "say nothing about a GPU" in row["notes"][-1]
        for values in (row, row["peers_us"]["onnxruntime_dense"]):
            assert 0 < values["decode_us_min"] <= values["decode_us"] <= values["decode_us_max"]
            assert values["prefill_us"] > 0
    table = render(MARKER, tmp_path)
    assert table.count("| reference executor, ") == 2
    assert "none of our kernels ran" in table
    # Once, though both cells have it.
    assert table.count("say nothing about a GPU") == 1


MARKER = "<!-- results: engine -->\n<!-- end -->"


def test_the_prefill_that_counts_runs_the_whole_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounds have the same prompts, and the second must find no page of the first."""
    limits = {"max_batch_size": 1, "max_kv_cache_capacity": 300, "max_input_len": 260}
    folder = write_engine_dir(model, tmp_path / "engine", **limits)
    counts: list[int] = []
    run = ReferenceExecutor.step

    def step(self: ReferenceExecutor, inputs: StepInputs) -> Any:
        counts.append(int(inputs.query_start_offsets[-1]))
        return run(self, inputs)

    monkeypatch.setattr(ReferenceExecutor, "step", step)
    engine_timing.time_steps(folder, "reference", Cell(batch=1, kv_len=260), 2, device=0)
    prefills = [count for count in counts if count > 1]
    assert sum(prefills) == 2 * 260


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cell=3x8"], "3 sequences and the engine takes 2"),
        (["--cell=1x101"], "101 prompt tokens and the engine takes 100"),
        (["--cell=1x99", "--steps=99"], "and the engine takes 200"),
        (["--steps=500"], "leaves no room"),
        (["--cell=4"], "no BATCHxTOKENS"),
        (["--cell=0x5"], "no BATCHxTOKENS"),
        (["--executor=tensorrt"], "--executor reference"),
    ],
)
def test_what_does_not_fit_is_refused_first(
    words: list[str],
    expected: str,
    engine: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "engine.json"
    if "--executor=tensorrt" in words and _has_device():
        pytest.skip("there is a GPU here, and the plan of this directory is none")
    assert main(["bench", "engine", str(engine), *words, "-o", str(output)]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def _has_device() -> bool:
    from paged_trt.plugins import cuda

    return cuda.driver_available()


class Host:
    """TensorRT executors on stand-ins, each with a launch of ours per layer."""

    def __init__(self, folder: Path) -> None:
        self.driver = FakeDriver()
        self.device = Device(driver=self.driver)
        self.folder = folder
        self.launches = 0
        self.opened = 0
        self.is_capturable = True

    def open(self, directory: Path, *, device: int, pipelines: bool) -> TensorRtExecutor:
        # A launched step would not come by.
        assert not pipelines
        self.opened += 1
        folder = self.folder / str(self.opened)
        folder.mkdir()
        engine = FakeEngine(self.driver, open_toy(make_spec(), folder))
        engine.uncapturable = not self.is_capturable
        layers = [self.layer() for _ in make_spec().layers]

        def make_context(engine: FakeEngine, profile: int) -> Any:
            context = engine.create_execution_context()
            assert context is not None
            context.on_execute = lambda: [layer.launch(5) for layer in layers] and None
            return context

        return TensorRtExecutor(engine, make_spec(), self.device, make_context=make_context)

    def layer(self) -> PreparedStep:
        def launch(stream: int) -> None:
            self.driver.perform(self.count)

        layer = object.__new__(PreparedStep)
        layer._launches = (launch,)
        layer.plan = Direct()
        return layer

    def count(self) -> None:
        self.launches += 1


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path)
    monkeypatch.setattr(engine_timing, "open_plan", found.open)
    monkeypatch.setattr(engine_timing, "kept_device", lambda _: found.device)
    monkeypatch.setattr(engine_timing, "REPLAYS", 4)
    return found


@pytest.mark.parametrize("draws_on_device", [False, True])
def test_our_launches_are_replayed_with_without_and_alone(
    draws_on_device: bool, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorRtExecutor, "samples_on_device", draws_on_device)
    seen = []
    original = engine_timing._time_replays

    def time_replays(stream: Any, launch: Any) -> Times:
        before = host.launches
        launch()
        seen.append(host.launches - before)
        return original(stream, launch)

    monkeypatch.setattr(engine_timing, "_time_replays", time_replays)
    times = time_kernels(Path("engine"), Cell(batch=2, kv_len=20), device=0)
    num_layers = len(make_spec().layers)
    # The whole step, ours alone, and the step without ours.
    assert seen == [num_layers, num_layers, 0]
    assert times.plans == ("direct",) * num_layers
    assert len(times.step.values) == engine_timing.ROUNDS
    assert (host.driver.graphs, host.driver.streams) == (0, 0)
    # What was patched to watch is as it was.
    assert PreparedStep.launch.__module__ == PreparedStep.__module__


def test_steps_that_are_not_replayed_are_refused(host: Host) -> None:
    host.is_capturable = False
    with pytest.raises(ExecutionError, match="0 graphs were captured"):
        time_kernels(Path("engine"), Cell(batch=1, kv_len=20), device=0)


def times(*values: float) -> Times:
    return Times(values=values)


@pytest.mark.parametrize(("others", "is_missed"), [(60.0, False), (50.0, True)])
def test_the_share_of_our_kernels(others: float, is_missed: bool, tmp_path: Path) -> None:
    steps = StepTimes(prefill=times(1), decode=times(130, 120, 140), session=times(1), notes=("n",))
    kernels = KernelTimes(
        step=times(99, 100, 101), others=times(others), ours_alone=times(40), plans=("direct",) * 2
    )
    row = kernel_columns(steps, kernels)
    assert row["host_us"] == 30
    assert row["ours_share"] == (100 - others) / 100
    assert row["ours_in_step_to_alone"] == (100 - others) / 40
    assert row["plan"] == ["direct"]
    assert row["notes"][0] == "n"
    assert any("over the target of 1.05" in note for note in row["notes"]) == is_missed
    steps_us = {"prefill_us": 2000.0, "decode_us": 130.0, "decode_us_min": 1, "decode_us_max": 200}
    shape = {"model": "toy", "layers": 2, "executor": "tensorrt", "route": "gqa", "batch": 4}
    peers = {"onnxruntime_paged": {"decode_us": 9000.0}}
    Results(
        kind="engine",
        commit="0" * 12,
        date=datetime.date(2026, 1, 1),
        gpu="NVIDIA H200",
        driver="580.1",
        cuda="13.0",
        tensorrt="tensorrt_rtx 1.6.1.120",
        method="as the command says",
        peers={},
        rows=[{**shape, "kv_len": 512, **steps_us, **row, "peers_us": peers}],
    ).write(tmp_path / "engine.json")
    line = next(each for each in render(MARKER, tmp_path).splitlines() if "| toy, " in each)
    assert f"| 0.10 | {(100 - others) / 100:.0%} | {(100 - others) / 40:.2f} | 9.00 |" in line


def test_a_readme_without_results_has_no_table(tmp_path: Path) -> None:
    assert render(MARKER, tmp_path) == MARKER
    readme = Path(__file__).parents[2] / "README.md"
    assert MARKER.partition("\n")[0] in readme.read_text(encoding="utf-8")
