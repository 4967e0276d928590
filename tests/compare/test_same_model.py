"""An engine against the same model on the reference executor: what a wide tolerance hides."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engine_dirs import (
    change_initializer,
    change_scales,
    tamper,
    write_engine_dir,
    write_manifest,
)
from fake_driver import FakeDriver
from fake_engine import FakeEngine
from session.paged_toy import make_scales, make_spec, open_toy

from paged_trt.plugins.device import Device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.manifest import MODEL_DATA_FILE, MODEL_FILE, read_manifest
from paged_trt.plugins.tensors import LOGITS, EngineSpec, LogitsMode
from paged_trt.runtime.compare import CompareOptions, compare_engine
from paged_trt.runtime.comparison import tolerance_for
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.recorded_steps import record_steps
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.same_model import compare_steps
from paged_trt.runtime.same_model_check import NO_ATTENTION, check_same_model
from paged_trt.runtime.same_model_report import SameModelReport
from paged_trt.runtime.same_model_tolerance import same_model_tolerance
from paged_trt.runtime.scenarios import Scenario, make_scenarios, random_prompts
from paged_trt.runtime.tensorrt_executor import TensorRtExecutor
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.toy import write_toy

QUICK = CompareOptions(executor="reference", num_new_tokens=3, prompt_lens=(3, 129))
QUANTISED = {DType.INT8: 6 / 127, DType.FLOAT8: 6 / 448}
Good = Callable[[DType], Path]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder / "model", "gqa")
    return folder / "model" / "model.onnx"


@pytest.fixture(scope="module")
def good(toy: Path) -> Callable[[DType], Path]:
    """An engine directory that is right; nobody changes it."""

    def make(kv: DType) -> Path:
        folder = toy.parents[1] / f"engine-{kv.value}"
        if not folder.exists():
            write_engine_dir(toy, folder, kv_cache_dtype=kv, kv_scale=QUANTISED.get(kv, 1.0))
        return folder

    return make


@pytest.fixture
def copy(good: Good, tmp_path: Path) -> Callable[[DType], Path]:
    """An engine directory that a test may change."""
    return lambda kv: Path(shutil.copytree(good(kv), tmp_path / "engine"))


def check(
    model: Path, engine: Path, lengths: tuple[int, ...] = (3, 129), *, layers: bool = False
) -> SameModelReport:
    """Hold an engine against the model of another directory, without a dense model."""
    executor = load_engine(engine, "reference")
    prompts = random_prompts(executor.spec, lengths, seed=0)
    scenarios = make_scenarios(executor.spec, prompts, num_new_tokens=3)[:1]
    try:
        return check_same_model(executor, engine, scenarios, model=model, seed=0, layers=layers)
    finally:
        executor.close()


@pytest.mark.parametrize("kv", list(QUANTISED), ids=lambda kv: kv.value)
def test_scale_that_is_10_percent_off_is_caught(
    kv: DType, toy: Path, good: Good, copy: Good
) -> None:
    """Written and read alike, so that only the rounding differs: the case that hides best."""
    bad = copy(kv)
    change_scales(bad, "kv_scales.1", side=0, factor=1.1)
    # Against the dense model it hides in the tolerance of a quantised pool.
    assert all(r.passed for _, rs in compare_engine(toy, bad, QUICK).iterations for r in rs)
    report = compare_engine(good(kv) / MODEL_FILE, bad, QUICK)
    assert not report.passed
    assert report.same_model is not None
    assert report.same_model.first is not None
    assert report.same_model.first.tensor == "key.1"
    assert report.same_model.reference == str(good(kv) / MODEL_FILE)


@pytest.mark.parametrize("kv", list(QUANTISED), ids=lambda kv: kv.value)
@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize(("side", "name"), [(0, "key.0"), (1, "value.1")], ids=["keys", "values"])
def test_scale_of_any_layer_and_side_is_named(
    kv: DType, factor: float, side: int, name: str, good: Good, copy: Good
) -> None:
    bad = copy(kv)
    change_scales(bad, f"kv_scales.{name[-1]}", side=side, factor=factor)
    report = check(good(kv) / MODEL_FILE, bad)
    assert report.first is not None
    assert report.first.tensor == name


def test_quantised_pool_is_compared_with_its_own_model_unasked(toy: Path, good: Good) -> None:
    report = compare_engine(toy, good(DType.INT8), QUICK).same_model
    assert report is not None
    assert report.passed
    assert report.reference == str(good(DType.INT8) / MODEL_FILE)
    names = [each.name for each in report.tensors]
    assert names == ["key.0", "value.0", "key.1", "value.1", LOGITS]
    assert report.num_steps > 6


def test_float16_pool_is_compared_with_its_own_model_where_asked(toy: Path, good: Good) -> None:
    engine = good(DType.FLOAT16)
    assert compare_engine(toy, engine, QUICK).same_model is None
    options = dataclasses.replace(QUICK, layers=True)
    report = compare_engine(toy, engine, options).same_model
    assert report is not None
    assert report.passed
    assert "attention.1" in {each.name for each in report.tensors}


def _attribute(layer: int, name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
        attribute = next(each for each in nodes[layer].attribute if each.name == name)
        if attribute.type == onnx.AttributeProto.INT:
            attribute.i = int(factor)
        else:
            attribute.f *= factor

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_attribute(0, "softmax_scale", 1.1), ("attention.0", 0)),
        (_attribute(1, "softmax_scale", 1.1), ("attention.1", 0)),
        (_attribute(1, "window", 4), ("attention.1", 2)),
    ],
    ids=["scale of layer 0", "scale of layer 1", "window of layer 1"],
)
def test_first_difference_names_layer_step_row_and_element(
    change: Callable[[onnx.ModelProto], None], place: tuple[str, int], good: Good, copy: Good
) -> None:
    """A window of 4 first matters to the step that has 5 tokens."""
    bad = copy(DType.FLOAT16)
    tamper(bad, change)
    first = check(good(DType.FLOAT16) / MODEL_FILE, bad, (3,), layers=True).first
    assert first is not None
    assert (first.tensor, first.step) == place
    assert len(first.element) == 2
    assert abs(first.engine - first.reference) > 1e-3
    assert f"`{place[0]}` in step {place[1]}, row {first.row}, element [" in str(first)


def test_layers_need_the_reference_model(
    toy: Path, copy: Good, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = copy(DType.FLOAT16)
    for name in (MODEL_FILE, MODEL_DATA_FILE):
        (engine / name).unlink()
    manifest = read_manifest(engine)
    write_manifest(engine, manifest.spec, source=manifest.source)
    assert main(["compare", str(toy), str(engine), "--layers"]) == 2
    assert f"{engine} has no model.onnx; build without" in capsys.readouterr().err


SPECS = [
    pytest.param(make_spec(), id="float16"),
    pytest.param(make_spec(activation=DType.BFLOAT16), id="bfloat16"),
    pytest.param(make_spec(kv=DType.INT8), id="int8"),
    pytest.param(make_spec(kv=DType.FLOAT8), id="float8"),
    pytest.param(make_spec(logits_mode=LogitsMode.ALL), id="all-logits"),
]


def scenario(spec: EngineSpec) -> Scenario:
    return make_scenarios(spec, random_prompts(spec, (1, 129), seed=1), num_new_tokens=3)[0]


def open_plan(spec: EngineSpec, folder: Path, *, factor: float) -> TensorRtExecutor:
    """A TensorRT executor whose stand-in of an engine has scales that are `factor` off."""
    folder.mkdir()
    open_toy(spec, folder).close()
    scales = {name: each * np.float32(factor) for name, each in make_scales(spec).items()}
    inner = ReferenceExecutor(folder / MODEL_FILE, spec, kv_scales=scales)
    driver = FakeDriver()
    return TensorRtExecutor(
        FakeEngine(driver, inner), spec, Device(driver=driver), kv_scales=make_scales(spec)
    )


def run(spec: EngineSpec, tmp_path: Path, *, factor: float = 1.0) -> SameModelReport:
    return compare_steps(
        open_plan(spec, tmp_path / "plan", factor=factor),
        open_toy(spec, tmp_path),
        record_steps(spec, scenario(spec), seed=0),
        seed=3,
        name="toy",
    )


@pytest.mark.parametrize("spec", SPECS)
def test_plan_is_compared_on_other_pages(spec: EngineSpec, tmp_path: Path) -> None:
    report = run(spec, tmp_path)
    assert report.passed, report
    # The same arithmetic: only a sum over other pages may round otherwise.
    assert max(each.error / each.limit for each in report.tensors) < 0.1


@pytest.mark.parametrize("kv", list(QUANTISED), ids=lambda kv: kv.value)
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_plan_that_writes_with_a_wrong_scale_is_caught(
    kv: DType, factor: float, tmp_path: Path
) -> None:
    report = run(make_spec(kv=kv), tmp_path, factor=factor)
    assert report.first is not None
    assert report.first.tensor == "key.0"
    assert report.tensors[0].error == pytest.approx(0.1, rel=0.2)


def test_plan_says_which_outputs_it_lacks(toy: Path, good: Good) -> None:
    engine = good(DType.FLOAT16)
    executor = load_engine(engine, "reference")

    class Plan:
        """The executor under the name of TensorRT's."""

        name = "tensorrt"

        def __getattr__(self, name: str) -> object:
            return getattr(executor, name)

    prompts = random_prompts(executor.spec, (3,), seed=0)
    scenarios = make_scenarios(executor.spec, prompts, num_new_tokens=1)
    report = check_same_model(Plan(), engine, scenarios, model=toy, seed=0, layers=True)
    executor.close()
    assert report.missing == (NO_ATTENTION,)
    assert "`--layer-outputs`" in NO_ATTENTION
    assert not any(each.name.startswith("attention") for each in report.tensors)


def open_with_layers(spec: EngineSpec, folder: Path) -> tuple[TensorRtExecutor, Any]:
    """A TensorRT executor of an engine with layer outputs, and what its stand-in runs."""
    folder.mkdir()
    inner, driver = open_toy(spec, folder), FakeDriver()
    engine = FakeEngine(driver, inner)
    scales = make_scales(spec)
    return TensorRtExecutor(engine, spec, Device(driver=driver), kv_scales=scales), inner


@pytest.mark.parametrize("activation", [DType.FLOAT16, DType.BFLOAT16], ids=lambda d: d.value)
def test_plan_with_layer_outputs_is_compared_layer_by_layer(
    activation: DType, tmp_path: Path
) -> None:
    spec = make_spec(activation=activation, layer_outputs=True)
    executor, inner = open_with_layers(spec, tmp_path / "plan")
    (tmp_path / "reference").mkdir()
    steps = record_steps(spec, scenario(spec), seed=0)
    reference = open_toy(spec, tmp_path / "reference")
    report = compare_steps(executor, reference, steps, seed=3, name="toy")
    assert report.passed, report
    assert [each.name for each in report.tensors] == [
        *("key.0", "value.0", "attention.0"),
        *("key.1", "value.1", "attention.1"),
        LOGITS,
    ]

    # The plan's second layer is off by a tenth: neither key.1 nor logits would say which part.
    honest = inner.read_layer_outputs
    inner.read_layer_outputs = lambda: [
        each * each.dtype.type(1 if layer == 0 else 1.1) for layer, each in enumerate(honest())
    ]
    report = compare_steps(executor, reference, steps, seed=3, name="toy")
    assert report.first is not None
    assert (report.first.tensor, report.first.step) == ("attention.1", 0)


def test_plan_without_layer_outputs_names_the_option(tmp_path: Path) -> None:
    executor, _ = open_with_layers(make_spec(), tmp_path / "plan")
    assert not executor.gives_layer_outputs
    with pytest.raises(UnsupportedError, match="build --layer-outputs"):
        executor.read_layer_outputs()
    executor, _ = open_with_layers(make_spec(layer_outputs=True), tmp_path / "other")
    assert [each.shape[0] for each in executor.read_layer_outputs()] == [0, 0]


def test_engine_with_layer_outputs_is_held_against_one_without(
    toy: Path, good: Good, tmp_path: Path
) -> None:
    engine = write_engine_dir(toy, tmp_path / "engine", layer_outputs=True)
    tamper(engine, _attribute(1, "softmax_scale", 1.1))
    reference = good(DType.FLOAT16) / MODEL_FILE
    report = check(reference, engine, layers=True)
    assert report.reference == str(reference)
    assert report.first is not None
    assert report.first.tensor == "attention.1"
    assert report.missing == ()


@pytest.mark.parametrize("kv", [*QUANTISED, DType.FLOAT16], ids=lambda kv: kv.value)
def test_bounds_are_tighter_than_those_of_the_dense_model(kv: DType) -> None:
    spec = make_spec(kv=kv)
    assert same_model_tolerance(spec).limit(LOGITS) <= tolerance_for(spec).rtol
    # A scale that is 10 % off changes what a layer stores by a tenth.
    assert same_model_tolerance(spec).limit("value.20") < 0.1


def test_one_lost_token_is_caught(tmp_path: Path) -> None:
    """It is one of 300: the mean over all hardly changes."""
    spec = make_spec(kv=DType.FLOAT8)
    (tmp_path / "other").mkdir()
    engine = open_toy(spec, tmp_path / "other")
    whole = engine.step

    def step(inputs: StepInputs) -> Any:
        logits = whole(inputs)
        if inputs.past_lens[0] == 300:
            engine.pool("value_pool.1")[inputs.page_table[0, 1], :, 44] = 0
        return logits

    engine.step = step
    (long, _) = make_scenarios(spec, random_prompts(spec, (300,), seed=1), num_new_tokens=3)
    steps = record_steps(spec, long, seed=0)
    report = compare_steps(engine, open_toy(spec, tmp_path), steps, seed=3, name="toy")
    assert report.first is not None
    assert (report.first.tensor, report.first.step) == ("value.1", 1)
    assert report.first.element[1] == 128 + 44
    result = next(each for each in report.tensors if each.name == "value.1")
    assert result.error < result.limit
    assert result.token_error == pytest.approx(1, rel=0.3)


def test_numbers_that_are_none_differ(good: Good, copy: Good) -> None:
    bad = copy(DType.FLOAT16)

    def poison(model: onnx.ModelProto) -> None:
        weight = "model.layers.0.self_attn.o_proj.weight"
        change_initializer(model, weight, lambda array: array.fill(np.nan))

    tamper(bad, poison)
    report = check(good(DType.FLOAT16) / MODEL_FILE, bad, (3,), layers=True)
    assert report.first is not None
    assert report.first.tensor == "key.1"
    assert report.to_json()["first"]["engine"] is None
