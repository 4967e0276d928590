"""`polygraphy run` with the extension: engines that are right pass, tampered ones fail."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engine_dirs import change_scales, tamper, write_engine_dir
from polygraphy_cli import polygraphy, printed_commands, register

from paged_trt.plugins import cuda
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import UnsupportedError
from paged_trt.scripts.cli import main
from paged_trt.scripts.example_models.config import Dialect
from paged_trt.scripts.example_models.toy import write_toy

STEPS = ("--prompt-lens", "1,127,129", "--new-tokens", "2")
SCALES = {DType.INT8: 6 / 127, DType.FLOAT8: 6 / 448}


@dataclasses.dataclass(frozen=True)
class Check:
    """An engine, what `paged-trt polygraphy` wrote for it, and the commands that it printed."""

    engine: Path
    folder: Path
    against_onnxruntime: list[str]
    save_golden: list[str]
    check_plan: list[str]

    @property
    def options(self) -> list[str]:
        return self.against_onnxruntime[self.against_onnxruntime.index("--check-error-stat") :]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("polygraphy")
    register(folder / "installed")
    return folder


@pytest.fixture(scope="module")
def make_check(workspace: Path) -> Callable[..., Check]:
    made: dict[str, Check] = {}

    def make(
        capsys: pytest.CaptureFixture[str],
        kv: DType | None = None,
        activation: DType = DType.FLOAT16,
    ) -> Check:
        name = f"{activation.value}-{kv.value if kv else 'own'}"
        if name not in made:
            folder = workspace / name
            write_toy(folder / "toy", Dialect.GQA_SPLIT, dtype=activation)
            engine = write_engine_dir(
                folder / "toy" / "model.onnx",
                folder / "engine",
                kv_cache_dtype=kv,
                kv_scale=SCALES.get(kv, 1.0) if kv else 1.0,
            )
            assert main(["polygraphy", str(engine), "-o", str(folder / "check"), *STEPS]) == 0
            commands = printed_commands(capsys.readouterr().out)
            made[name] = Check(engine, folder / "check", *commands)
        return made[name]

    return make


@pytest.fixture
def run(workspace: Path) -> Callable[..., tuple[int, str]]:
    def run_(words: list[str]) -> tuple[int, str]:
        done = polygraphy(workspace / "installed", words)
        assert "Traceback" not in done.stdout
        return done.returncode, done.stdout

    return run_


Run = Callable[..., tuple[int, str]]
Make = Callable[..., Check]


@pytest.mark.parametrize(
    ("activation", "kv"),
    [
        pytest.param(DType.FLOAT16, None, id="float16"),
        pytest.param(DType.BFLOAT16, None, id="bfloat16"),
        pytest.param(DType.FLOAT16, DType.FLOAT8, id="float8"),
        pytest.param(DType.FLOAT16, DType.INT8, id="int8"),
    ],
)
def test_printed_command_passes_against_onnxruntime(
    activation: DType,
    kv: DType | None,
    make_check: Make,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = make_check(capsys, kv, activation)
    code, output = run(check.against_onnxruntime)
    assert code == 0, output
    assert "Pass Rate: 100.00%" in output
    # Gathered keys and values are compared, and no raw pool.
    assert "Outputs: ['logits', 'key.0', 'value.0', 'key.1', 'value.1']" in output
    assert "_pool" not in output


@pytest.fixture
def golden(make_check: Make, run: Run, capsys: pytest.CaptureFixture[str]) -> Check:
    """A check whose golden files are written."""
    check = make_check(capsys)
    if not (check.folder / "outputs").exists():
        code, output = run(check.save_golden)
        assert code == 0, output
    return check


def load(check: Check, **changed: Path) -> list[str]:
    """Words that run the reference executor against golden files."""
    inputs = changed.get("inputs", check.folder / "inputs")
    outputs = changed.get("outputs", check.folder / "outputs")
    engine = changed.get("engine", check.engine)
    return [
        *("run", str(check.folder / "model.onnx"), "--paged-ref", "--paged-engine", str(engine)),
        *("--load-inputs", str(inputs), "--load-outputs", str(outputs)),
        *check.options,
    ]


def test_golden_files_are_met(golden: Check, run: Run) -> None:
    code, output = run(load(golden))
    assert code == 0, output
    assert "Pass Rate: 100.00%" in output


def test_swapped_page_fails(golden: Check, run: Run, tmp_path: Path) -> None:
    """The last decode step reads two pages of a sequence in the wrong order."""
    from polygraphy.json import load_json, save_json

    inputs = Path(shutil.copytree(golden.folder / "inputs", tmp_path / "inputs"))
    path = max(inputs.iterdir())
    feeds = load_json(str(path))
    row = int(np.flatnonzero((feeds["page_table"] >= 0).sum(axis=1) > 1)[0])
    feeds["page_table"][row, :2] = feeds["page_table"][row, 1::-1]
    save_json(feeds, str(path))
    code, output = run(load(golden, inputs=inputs))
    assert code == 1
    assert "FAILED | Output: 'key.0'" in output


def _scale_of_layer_1(model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    attribute = next(each for each in nodes[1].attribute if each.name == "softmax_scale")
    attribute.f *= 1.1


def test_changed_softmax_scale_fails_at_the_logits(golden: Check, run: Run, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(golden.engine, tmp_path / "engine"))
    tamper(engine, _scale_of_layer_1)
    code, output = run(load(golden, engine=engine))
    assert code == 1
    assert "FAILED | Output: 'logits'" in output
    # What layer 1 stores is computed before its attention.
    assert "FAILED | Output: 'value.1'" not in output


@pytest.mark.parametrize("kv", [DType.INT8, DType.FLOAT8], ids=lambda kv: kv.value)
def test_kv_scale_that_is_10_percent_off_fails(
    kv: DType, make_check: Make, run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Only the keys of one layer, written and read alike, so that nothing but rounding differs."""
    check = make_check(capsys, kv)
    engine = Path(shutil.copytree(check.engine, tmp_path / "engine"))
    change_scales(engine, "kv_scales.1", side=0, factor=1.1)
    words = [
        str(engine) if word == str(check.engine) else word for word in check.against_onnxruntime
    ]
    code, output = run(words)
    assert code == 1
    assert "FAILED | Output: 'key.1'" in output
    assert "FAILED | Output: 'value.1'" not in output


def _change(name: str, value: Any, index: int = 0) -> Callable[[dict[str, Any]], None]:
    def change(feeds: dict[str, Any]) -> None:
        feeds[name].flat[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change("page_table", 4711), "names page 4711, outside the pool of"),
        # Behind the end of the first sequence.
        (_change("page_table", 4711, 1), "names page 4711, outside the pool of"),
        (_change("page_table", -2, 1), "names page -2, outside the pool of"),
        (
            lambda feeds: feeds.update(page_table=feeds["page_table"][:1]),
            "the page table is 1 x 2 for 2 sequence rows",
        ),
        (
            lambda feeds: feeds.update(page_table=np.tile(feeds["page_table"], 99)),
            "the page table is 2 x 198 for 2 sequence rows",
        ),
        (
            lambda feeds: feeds.update(position_ids=np.zeros((1, 7), np.int64)),
            "130 tokens have 7 positions",
        ),
        (
            lambda feeds: feeds.update(
                page_table=np.full_like(feeds["page_table"], -1),
                query_start_offsets=np.zeros_like(feeds["query_start_offsets"]),
            ),
            "the page table names no page",
        ),
        (_change("page_table", -1), "names page -1, outside the pool of"),
        (_change("query_start_offsets", 1), "must rise from 0"),
        (_change("past_lens", -9), "must be 0 or more"),
        (_change("past_lens", 2**30), "row 0 of the page table has"),
        (_change("input_ids", 512), "outside the vocabulary of 512"),
    ],
)
def test_a_step_that_would_leave_the_pool_is_refused(
    change: Callable[[dict[str, Any]], None], message: str, golden: Check
) -> None:
    """Golden files are data of others: a kernel never sees what they may hold."""
    from polygraphy.exception import PolygraphyException

    from paged_trt.runtime.polygraphy_paged import LoadPagedEngine, PagedRunner
    from paged_trt.runtime.polygraphy_steps import load_steps

    feeds = next(load_steps(golden.engine, prompt_lens=(1, 129)))
    change(feeds)
    step = {name: array for name, array in feeds.items() if not name.startswith("history")}
    loader = LoadPagedEngine(str(golden.engine), executor="reference")
    with PagedRunner(loader) as runner, pytest.raises(PolygraphyException, match=message):
        runner.infer(step)


def test_data_that_polygraphy_invents_is_refused_with_the_loader_to_use(
    golden: Check, run: Run
) -> None:
    code, output = run(["run", str(golden.engine / "model.onnx"), "--paged-ref"])
    assert code == 1
    assert "must rise from 0" in output
    assert "`--data-loader-script FOLDER/load_data.py`" in output
    assert "Traceback" not in output


def test_an_engine_directory_in_the_place_of_its_model_is_named(golden: Check, run: Run) -> None:
    code, output = run(["run", str(golden.engine), "--paged-ref"])
    assert code == 1
    assert f"pass {golden.engine / 'model.onnx'} for `--paged-ref`" in output
    assert "Traceback" not in output


def test_folder_without_an_engine_is_named(golden: Check, run: Run) -> None:
    code, output = run(["run", str(golden.folder / "model.onnx"), "--paged-ref"])
    assert code == 1
    assert "is no engine directory: it has no manifest.json" in output


def test_plan_without_a_gpu_is_named(golden: Check, run: Run) -> None:
    try:
        cuda.device_arch()
    except UnsupportedError:
        code, output = run(golden.check_plan)
        assert code == 1
        assert "no CUDA device can be used" in output
    else:
        pytest.skip("this machine has a CUDA device")


def test_generated_script_names_what_it_runs(golden: Check, run: Run) -> None:
    code, output = run([*golden.check_plan, "--gen-script", "-", "--paged-logits-only"])
    assert code == 0
    assert "from paged_trt.runtime.polygraphy_paged import LoadPagedEngine, PagedRunner" in output
    assert "executor='tensorrt', device=0" in output
    assert "with_kv=False" in output


def test_target_must_be_new(golden: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["polygraphy", str(golden.engine), "-o", str(golden.folder)]) == 2
    assert "must be the name of a new folder" in capsys.readouterr().err
