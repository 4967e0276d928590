"""`paged-trt compare` on toys: equal pairs pass, tampered ones do not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engine_dirs import change_initializer, tamper, write_engine_dir

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, ExecutionError, SpecMismatchError
from paged_trt.plugins.manifest import KV_SCALES_FILE, MODEL_FILE
from paged_trt.plugins.tensors import LogitsMode
from paged_trt.runtime.compare import CompareOptions, ComparisonReport, compare_engine
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

DIALECTS = [pytest.param(dialect, id=dialect.value) for dialect in Dialect]
WEIGHT = "model.layers.1.self_attn.o_proj.weight"
QUICK = CompareOptions(executor="reference", num_new_tokens=4, prompt_lens=(3, 127, 129))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def toy(folder: Path) -> Callable[..., Path]:
    """Path of a toy's model, written once for each set of arguments."""

    def write(dialect: Dialect = Dialect.GQA, **arguments: Any) -> Path:
        target = folder / "-".join([dialect.value, *map(str, arguments.values())])
        if not target.exists():
            write_toy(target, dialect, **arguments)
        return target / "model.onnx"

    return write


@pytest.fixture(scope="module")
def pair(folder: Path, toy: Callable[..., Path]) -> tuple[Path, Path]:
    """A model and its engine directory, both as they should be."""
    model = toy()
    return model, write_engine_dir(model, folder / "engine")


@pytest.fixture
def copy(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A pair that a test may change."""
    model = Path(shutil.copytree(pair[0].parent, tmp_path / "model")) / "model.onnx"
    return model, Path(shutil.copytree(pair[1], tmp_path / "engine"))


def run(model: Path, engine: Path, *arguments: str) -> int:
    base = ["compare", str(model), str(engine), "--executor", "reference"]
    return main([*base, "--new-tokens", "4", *arguments])


def worst(report: ComparisonReport) -> float:
    """Largest difference as a part of its tolerance."""
    results = [result for _, each in report.iterations for result in each]
    return max(result.max_difference / result.limit for result in results)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_agrees(dialect: Dialect, toy: Callable[..., Path], tmp_path: Path) -> None:
    model = toy(dialect)
    engine = write_engine_dir(model, tmp_path / "engine")
    report = compare_engine(model, engine, CompareOptions(executor="reference"))
    assert report.passed, report
    assert report.same_source
    assert report.executor == "reference"
    assert [name for name, _ in report.iterations] == ["prefill whole", "prefill by 77"]
    lengths = [result.prompt_len for result in report.iterations[0][1]]
    assert lengths == [1, 127, 128, 129, 255, 256, 257]
    # Half of the tolerance is the margin for kernels that this run has not seen.
    assert worst(report) < 0.6


@pytest.mark.parametrize("mode", list(LogitsMode), ids=lambda mode: mode.value)
def test_small_limits_run_in_chunks_and_waves(
    mode: LogitsMode, toy: Callable[..., Path], tmp_path: Path
) -> None:
    model = toy()
    engine = write_engine_dir(
        model, tmp_path / "engine", max_batch_size=2, max_num_tokens=48, logits_mode=mode
    )
    report = compare_engine(model, engine, QUICK)
    assert report.passed, report
    assert [name for name, _ in report.iterations] == ["prefill by 47"]
    assert any("prefill whole" in line for line in report.not_run)


def test_window_and_softcap_agree(toy: Callable[..., Path], tmp_path: Path) -> None:
    model = toy(Dialect.GQA, window=40, softcap=20.0)
    report = compare_engine(model, write_engine_dir(model, tmp_path / "engine"), QUICK)
    assert report.passed, report


def test_bfloat16_agrees_and_both_sides_say_that_they_are_upcast(
    toy: Callable[..., Path], tmp_path: Path
) -> None:
    model = toy(Dialect.GQA_SPLIT, dtype=DType.BFLOAT16)
    report = compare_engine(model, write_engine_dir(model, tmp_path / "engine"), QUICK)
    assert report.passed, report
    assert sum("float32" in note for note in report.notes) == 2


@pytest.mark.parametrize(("dtype", "scale"), [(DType.INT8, 6 / 127), (DType.FLOAT8, 6 / 448)])
def test_quantised_pools_agree_within_their_own_tolerance(
    dtype: DType, scale: float, toy: Callable[..., Path], tmp_path: Path
) -> None:
    model = toy()
    engine = write_engine_dir(model, tmp_path / "engine", kv_cache_dtype=dtype, kv_scale=scale)
    report = compare_engine(model, engine, QUICK)
    assert report.passed, report
    assert "cannot meet the float16 tolerance" in report.tolerance.reason


def test_paged_model_is_compared_on_identity_pages(pair: tuple[Path, Path]) -> None:
    report = compare_engine(pair[1] / MODEL_FILE, pair[1], QUICK)
    assert report.passed, report
    assert not report.same_source
    assert any("identity pages" in note for note in report.notes)


@pytest.mark.parametrize(
    ("activation", "pool"),
    [
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.FLOAT16, DType.FLOAT8),
        (DType.FLOAT16, DType.INT8),
    ],
    ids=lambda dtype: dtype.value,
)
def test_paged_model_of_any_type_is_the_same_on_identity_pages(
    activation: DType, pool: DType, toy: Callable[..., Path], tmp_path: Path
) -> None:
    model = toy(Dialect.GQA_SPLIT, dtype=activation)
    engine = write_engine_dir(model, tmp_path / "engine", kv_cache_dtype=pool, kv_scale=0.05)
    report = compare_engine(engine / MODEL_FILE, engine, QUICK)
    assert report.passed, report
    # The pools round alike on both sides: only the order of a float32 sum may differ.
    assert worst(report) < 0.05


def test_pools_of_a_users_bfloat16_model_keep_their_type(
    toy: Callable[..., Path], tmp_path: Path
) -> None:
    engine = write_engine_dir(toy(Dialect.GQA_SPLIT, dtype=DType.BFLOAT16), tmp_path / "engine")
    model = onnx.load(engine / MODEL_FILE, load_external_data=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace("_pool", "_pages") for name in names]
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace("_pool", "_pages")
    onnx.save(model, engine / "users.onnx")
    report = compare_engine(engine / "users.onnx", engine, QUICK)
    assert report.passed, report


def test_damaged_scales_beside_a_paged_model_are_named(
    toy: Callable[..., Path], tmp_path: Path
) -> None:
    engine = write_engine_dir(toy(), tmp_path / "engine", kv_cache_dtype=DType.INT8, kv_scale=0.05)
    for name in (MODEL_FILE, f"{MODEL_FILE}.data"):
        shutil.copy(engine / name, tmp_path)
    (tmp_path / KV_SCALES_FILE).write_bytes(b"no scales")
    with pytest.raises(ConfigError, match="no safetensors file"):
        compare_engine(tmp_path / MODEL_FILE, engine, QUICK)


def test_model_with_fewer_tokens_is_a_named_error(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Another model than the engine's may refuse what the engine takes."""
    model = onnx.load(pair[0])
    for tensor in model.graph.initializer:
        if tensor.name == "model.embed_tokens.weight":
            array = onnx.numpy_helper.to_array(tensor)[:5]
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, tmp_path / "small.onnx")
    with pytest.raises(ExecutionError, match="onnxruntime failed"):
        compare_engine(tmp_path / "small.onnx", pair[1], QUICK)


def test_model_with_more_tokens_is_a_mismatch(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = onnx.load(pair[0])
    head = model.graph.output[0].name
    both = onnx.helper.make_node("Concat", ["half_logits", "half_logits"], [head], axis=-1)
    for node in model.graph.node:
        node.output[:] = ["half_logits" if name == head else name for name in node.output]
    model.graph.node.append(both)
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value *= 2
    onnx.save(model, tmp_path / "large.onnx")
    with pytest.raises(SpecMismatchError, match="`vocab_size` must be 512, found 1024"):
        compare_engine(tmp_path / "large.onnx", pair[1], QUICK)


def test_paged_model_without_its_function_gets_the_projects(copy: tuple[Path, Path]) -> None:
    _, engine = copy
    path = engine / "bare.onnx"
    model = onnx.load(engine / MODEL_FILE, load_external_data=False)
    del model.functions[:]
    for value in model.graph.input:
        if "pool" in value.name:
            value.type.tensor_type.shape.dim[0].Clear()
    onnx.save(model, path)
    report = compare_engine(path, engine, QUICK)
    assert report.passed, report


def _one_weight(model: onnx.ModelProto) -> None:
    def change(array: np.ndarray) -> None:
        array[5, 7] += 2

    change_initializer(model, WEIGHT, change)


def _attribute(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    """Changes one attribute of one layer."""

    def change(model: onnx.ModelProto) -> None:
        node = next(each for each in model.graph.node if each.op_type == "PagedAttention")
        attribute = next(each for each in node.attribute if each.name == name)
        if attribute.type == onnx.AttributeProto.INT:
            attribute.i = int(factor)
        else:
            attribute.f *= factor

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_one_weight, id="one weight"),
        pytest.param(_attribute("softmax_scale", 1.1), id="softmax scale"),
        pytest.param(_attribute("window", 100), id="window"),
    ],
)
def test_tampered_engine_differs(
    change: Callable[[onnx.ModelProto], None],
    copy: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, engine = copy
    tamper(engine, change)
    assert run(model, engine) == 1
    assert "differs" in capsys.readouterr().out


def test_dropped_window_differs(toy: Callable[..., Path], tmp_path: Path) -> None:
    model = toy(Dialect.GQA, window=40, softcap=20.0)
    engine = write_engine_dir(model, tmp_path / "engine")
    tamper(engine, _attribute("window", -1))
    assert not compare_engine(model, engine, QUICK).passed


def test_tampered_source_differs_and_is_another_file(
    copy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, engine = copy
    source = onnx.load(model)
    _one_weight(source)
    model.with_name("model.onnx.data").unlink()
    onnx.save(source, model)
    assert run(model, engine) == 1
    assert "built from another file" in capsys.readouterr().out


def test_dropped_mask_of_the_source_differs(toy: Callable[..., Path], tmp_path: Path) -> None:
    source = toy(Dialect.ATTENTION23_PAST)
    engine = write_engine_dir(source, tmp_path / "engine")
    model = onnx.load(source)
    node = next(each for each in model.graph.node if each.op_type == "Attention")
    node.input[3] = ""
    onnx.save(model, tmp_path / "model.onnx")
    assert not compare_engine(tmp_path / "model.onnx", engine, QUICK).passed


def test_not_a_number_is_a_difference_and_names_the_step(copy: tuple[Path, Path]) -> None:
    model, engine = copy

    def poison(proto: onnx.ModelProto) -> None:
        change_initializer(proto, "lm_head.weight", lambda array: array.fill(np.nan))

    tamper(engine, poison)
    report = compare_engine(model, engine, QUICK)
    assert not report.passed
    assert len(report.failures) == 2
    assert "prefill whole" in report.failures[0]
    assert json.dumps(report.to_json(), allow_nan=False)


def test_report_says_what_ran_and_what_did_not(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*pair, "--prompt-lens", "5,80") == 0
    output = capsys.readouterr()
    assert "engine run by the reference executor" in output.out
    assert "not run: TensorRT" in output.out
    assert "16 roundings of float16" in output.out
    assert "4 of 4 sequences agree" in output.out
    # Polygraphy's log is not the user's.
    assert "[I]" not in output.out + output.err


def test_short_prompts_say_that_no_chunk_ran(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*pair, "--prompt-lens", "1") == 0
    assert "not run: prefill by chunks" in capsys.readouterr().out


def test_json_holds_the_same_report(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    assert run(*pair, "--prompt-lens", "80,130", "--json", str(path)) == 0
    data = json.loads(path.read_text())
    assert data["passed"] is True
    (report,) = data["reports"]
    assert report["passed"] is True
    assert report["executor"] == "reference"
    assert [each["name"] for each in report["iterations"]] == ["prefill whole", "prefill by 77"]
    sequence = report["iterations"][1]["sequences"][1]
    assert sequence["prompt_len"] == 130
    assert sequence["steps_compared"] == sequence["num_steps"] == 4
    assert 0 <= sequence["max_difference"] <= sequence["limit"]
    assert sequence["token_difference"] is None
    assert sequence["first_over"] is None
    assert sum(report["histogram"]["counts"]) == 2 * 2 * 4 * 512
    assert len(report["histogram"]["counts"]) == len(report["histogram"]["edges"]) + 1
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_report_has_a_place_before_the_run(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*pair, "--json", str(tmp_path / "none" / "report.json")) == 2
    assert "is no directory" in capsys.readouterr().err


def test_table_fits_80_columns(copy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model, engine = copy
    tamper(engine, _attribute("window", 20))
    assert run(model, engine) == 1
    output = capsys.readouterr().out
    assert "…" not in output
    assert "token difference: prefill whole, sequence" in output
    assert ">= bound" in output


def test_users_tolerance_decides(pair: tuple[Path, Path]) -> None:
    assert run(*pair, "--prompt-lens", "130", "--atol", "0", "--rtol", "1e-9") == 1
    assert run(*pair, "--prompt-lens", "130", "--atol", "1000") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-lens", "1,x"], "no list of integers"),
        (["--prompt-lens", "9999"], "max_input_len=384"),
        (["--new-tokens", "0"], "--new-tokens"),
        (["--rtol", "-1"], "--rtol"),
        (["--seed", "-1"], "--seed"),
        (["--input-ids", "1,512"], "vocabulary of 512"),
        (["--input-ids", "1,-1"], "token -1 at position 1"),
        (["--json", "."], "is a directory"),
    ],
)
def test_wrong_options_are_usage_errors(
    arguments: list[str],
    message: str,
    pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*pair, *arguments) == 2
    assert message in capsys.readouterr().err


def test_missing_files_are_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "none.onnx", pair[1]) == 2
    assert "none.onnx" in capsys.readouterr().err
    assert run(pair[0], tmp_path) == 4
    assert "no engine directory" in capsys.readouterr().err


def test_missing_polygraphy_names_the_extra(pair: tuple[Path, Path]) -> None:
    code = (
        "import sys; sys.modules['polygraphy'] = None\n"
        "from paged_trt.scripts.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", *map(str, pair)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert 'pip install "paged-trt[compare]"' in done.stderr
    assert "Traceback" not in done.stderr
