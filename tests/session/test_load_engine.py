"""Engine directories and the reference executor's own checks."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engine_tables import make_table
from fake_driver import FakeDriver
from safetensors.numpy import save_file
from session.paged_toy import KV_HEADS, make_paged, make_scales, make_spec, open_toy, prompt_of

from paged_trt.plugins.device import Device
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import (
    ConfigError,
    ExecutionError,
    ManifestError,
    SpecMismatchError,
    UnsupportedError,
)
from paged_trt.plugins.fields import ABI_VERSION
from paged_trt.plugins.manifest import (
    KV_SCALES_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    BuildRecord,
    EngineManifest,
    SourceRecord,
    file_record,
    network_name,
)
from paged_trt.plugins.tensors import EngineSpec, LogitsMode
from paged_trt.runtime import engine as engine_module
from paged_trt.runtime import tensorrt_loader
from paged_trt.runtime.engine import load_engine
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.reference_executor import ReferenceExecutor
from paged_trt.runtime.session import Session

HASH = "0" * 64


def write_manifest(folder: Path, spec: EngineSpec) -> None:
    """Manifest of whatever files are in the folder."""
    (folder / PLAN_FILE).write_text(f"no plan, but its name: {network_name(spec)}")
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_FILE)
    manifest = EngineManifest.create(
        spec=spec,
        engine=make_table(spec),
        build=BuildRecord(
            flavor="tensorrt_rtx",
            tensorrt_version="1.7.0",
            route="plugin",
            abi_version=ABI_VERSION,
            kernel_source_sha256=HASH,
            compute_capabilities=("8.9",),
            attention_plan=None,
        ),
        source=SourceRecord(name="toy", sha256=HASH, dialect="toy"),
        files={name: file_record(folder / name) for name in names},
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def write_engine(folder: Path, spec: EngineSpec) -> None:
    open_toy(spec, folder).close()
    if spec.kv_cache_dtype.is_quantised:
        save_file(make_scales(spec), folder / KV_SCALES_FILE)
    write_manifest(folder, spec)


@pytest.mark.parametrize("kv", [DType.FLOAT16, DType.INT8])
def test_an_engine_directory_generates(tmp_path: Path, kv: DType) -> None:
    spec = make_spec(kv=kv)
    write_engine(tmp_path, spec)
    with Session(load_engine(tmp_path, "reference")) as session:
        result = session.generate([prompt_of(20)], 3)[0]
        assert session.executor.notes == ()
    (tmp_path / "other").mkdir()
    direct = Session(open_toy(spec, tmp_path / "other"))
    assert direct.generate([prompt_of(20)], 3)[0] == result


def test_auto_says_why_it_takes_the_reference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_engine(tmp_path, make_spec())
    with caplog.at_level(logging.INFO, logger="paged_trt"):
        executor = load_engine(str(tmp_path))
    assert executor.name == "reference"
    assert executor.notes == tuple(record.getMessage() for record in caplog.records)
    assert "runs the model on the CPU, for TensorRT cannot: " in executor.notes[0]


def test_tensorrt_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_engine(tmp_path, make_spec())
    with pytest.raises(UnsupportedError, match="pass `--executor reference`"):
        load_engine(tmp_path, "tensorrt")
    with pytest.raises(ConfigError, match="`gpu` is no executor; choose one of auto, tensorrt"):
        load_engine(tmp_path, "gpu")


def test_hashes_are_checked_before_anything_is_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_engine(tmp_path, make_spec())
    monkeypatch.setattr(onnx, "load", lambda *_, **__: pytest.fail("interpreted"))
    data = tmp_path / "model.onnx.data"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(ManifestError, match="the manifest says sha256"):
        load_engine(tmp_path, "reference")
    data.unlink()
    with pytest.raises(ManifestError, match=r"cannot read .*model.onnx.data"):
        load_engine(tmp_path, "reference")


@pytest.mark.parametrize("executor", ["auto", "tensorrt"])
def test_the_plan_that_is_deserialized_is_the_one_that_was_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    write_engine(tmp_path, make_spec())
    plan = tmp_path / PLAN_FILE

    def check_runnable(build: BuildRecord, ordinal: int) -> str:
        plan.write_bytes(bytes(plan.stat().st_size))  # the files were checked before
        return "sm_90"

    monkeypatch.setattr(tensorrt_loader, "check_runnable", check_runnable)
    monkeypatch.setattr(tensorrt_loader, "kept_device", lambda _: Device(driver=FakeDriver()))
    for name in ("warm_kernels", "load_sampling_kernel", "load_token_kernel"):
        monkeypatch.setattr(tensorrt_loader, name, lambda spec, arch: None)
    monkeypatch.setattr(tensorrt_loader, "_deserialize", lambda *_: pytest.fail("interpreted"))
    with pytest.raises(ManifestError, match=r"model.plan: the manifest says sha256"):
        load_engine(tmp_path, executor)


def test_the_scales_that_are_used_are_those_that_were_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(kv=DType.FLOAT8)
    write_engine(tmp_path, spec)

    def check_hops(folder: Path, manifest: EngineManifest) -> None:
        doubled = {name: 2 * array for name, array in make_scales(spec).items()}
        save_file(doubled, folder / KV_SCALES_FILE)  # the files were checked before

    monkeypatch.setattr(engine_module, "check_hops", check_hops)
    with pytest.raises(ManifestError, match=r"kv_scales.safetensors: the manifest says sha256"):
        load_engine(tmp_path, "reference")


def test_a_directory_without_the_model_names_the_option(tmp_path: Path) -> None:
    write_manifest(tmp_path, make_spec())
    with pytest.raises(UnsupportedError, match="rebuild without `--no-reference`"):
        load_engine(tmp_path, "reference")


def test_scales_are_part_of_a_quantised_engine(tmp_path: Path) -> None:
    spec = make_spec(kv=DType.FLOAT8)
    write_engine(tmp_path, spec)
    scales = tmp_path / KV_SCALES_FILE
    scales.write_bytes(b"no scales")
    write_manifest(tmp_path, spec)
    with pytest.raises(ManifestError, match="is no safetensors file"):
        load_engine(tmp_path, "reference")
    scales.unlink()
    write_manifest(tmp_path, spec)
    with pytest.raises(ManifestError, match=r"lists no kv_scales.safetensors, which a float8"):
        load_engine(tmp_path, "reference")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_scales.1": None}, r"missing \['kv_scales.1'\], unknown \[\]"),
        ({"kv_scales.2": np.ones((2, 2), np.float32)}, r"missing \[\], unknown \['kv_scales.2'\]"),
        ({"kv_scales.1": np.ones((2, 3), np.float32)}, r"\[2, 2\], found float32 \[2, 3\]"),
        ({"kv_scales.1": np.ones((2, 2))}, r"must be float32 \[2, 2\], found float64"),
        ({"kv_scales.0": np.zeros((2, 2), np.float32)}, "holds 0.0, .*positive and finite"),
        ({"kv_scales.0": np.full((2, 2), np.inf, np.float32)}, "holds inf"),
    ],
)
def test_scales_are_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    spec = make_spec(kv=DType.INT8)
    scales = {**make_scales(spec), **change}
    scales = {name: array for name, array in scales.items() if array is not None}
    with pytest.raises(ManifestError, match=message):
        ReferenceExecutor(tmp_path / "model.onnx", spec, kv_scales=scales)


def more_pages(spec: EngineSpec) -> EngineSpec:
    pool = dataclasses.replace(spec.pool, num_pages=spec.pool.num_pages + 1)
    return dataclasses.replace(spec, pool=pool)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (more_pages, r"`key_pool.0.dims` must be \[12, 2, 128, 16\], found \[11, 2, 128, 16\]"),
        (
            lambda spec: dataclasses.replace(spec, kv_cache_dtype=DType.BFLOAT16),
            "`key_pool.0.dtype` must be bfloat16, found float16",
        ),
        (
            lambda spec: dataclasses.replace(spec, logits_mode=LogitsMode.ALL),
            r"`logits.dims` must be \[1, '\?', 96\], found \['\?', 96\]",
        ),
        (
            lambda spec: dataclasses.replace(spec, reads_position_ids=True),
            "`position_ids` must be present, found no such tensor",
        ),
        (
            lambda spec: dataclasses.replace(spec, layers=spec.layers[:1]),
            "`inputs` must be 6, found `key_pool.1` as well",
        ),
    ],
)
def test_the_model_must_have_the_tensor_table(
    tmp_path: Path, change: Callable[[EngineSpec], EngineSpec], message: str
) -> None:
    spec = make_spec()
    open_toy(spec, tmp_path).close()
    with pytest.raises(SpecMismatchError, match=message):
        ReferenceExecutor(tmp_path / "model.onnx", change(spec))


@pytest.mark.parametrize("location", ["../elsewhere.data", "/etc/hostname", "link.data"])
def test_weights_stay_inside_the_directory(tmp_path: Path, location: str) -> None:
    spec = make_spec()
    folder = tmp_path / "engine"
    folder.mkdir()
    open_toy(spec, folder).close()
    (folder / "model.onnx.data").rename(tmp_path / "elsewhere.data")
    (folder / "link.data").symlink_to(tmp_path / "elsewhere.data")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ManifestError, match=r"the data of `embedding` lie at .*, outside"):
        ReferenceExecutor(folder / "model.onnx", spec)


def test_weights_in_a_function_stay_inside_too(tmp_path: Path) -> None:
    spec = make_spec()
    model = make_paged(spec)
    constant = next(node for node in model.functions[0].node if node.op_type == "Constant")
    tensor = constant.attribute[0].t
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ManifestError, match=r"lie at .*secret, outside"):
        ReferenceExecutor(tmp_path / "model.onnx", spec)


def test_a_model_without_its_weights_is_a_named_error(tmp_path: Path) -> None:
    spec = make_spec()
    open_toy(spec, tmp_path).close()
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(ManifestError, match=r"model.onnx.data holds .* does not exist"):
        ReferenceExecutor(tmp_path / "model.onnx", spec)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(ManifestError, match="is no readable ONNX model"):
        ReferenceExecutor(tmp_path / "model.onnx", spec)


def test_a_model_that_onnxruntime_refuses_is_a_named_error(tmp_path: Path) -> None:
    spec = make_spec()
    model = make_paged(spec)
    del model.functions[:]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(UnsupportedError, match=r"onnxruntime 1.* cannot load .*model.onnx"):
        ReferenceExecutor(tmp_path / "model.onnx", spec)


def test_onnxruntime_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UnsupportedError, match=r"pip install .paged-trt\[compare\]"):
        ReferenceExecutor(tmp_path / "model.onnx", make_spec())


def test_a_step_that_onnxruntime_refuses_is_a_named_error(tmp_path: Path) -> None:
    executor = open_toy(make_spec(), tmp_path)
    inputs = StepInputs(
        input_ids=np.asarray([1000]),
        position_ids=np.asarray([0]),
        page_table=np.zeros((1, 1), np.int32),
        query_start_offsets=np.asarray([0, 1], np.int32),
        past_lens=np.zeros(1, np.int32),
    )
    with pytest.raises(ExecutionError, match="failed in a step of 1 tokens and 1 sequences"):
        executor.step(inputs)


def test_pools_change_places_and_keep_their_content(tmp_path: Path) -> None:
    executor = open_toy(make_spec(), tmp_path)
    session = Session(executor, page_order=[4, *(page for page in range(11) if page != 4)])
    session.add(prompt_of(3), 4)
    for tokens in (3, 4, 5, 6):
        session.step()
        pool = executor.pool("key_pool.1")
        written = np.abs(pool.astype(np.float32)).sum(axis=(1, 3)) > 0
        assert pool.shape == (11, KV_HEADS, 128, 16)
        assert np.flatnonzero(written.any(axis=1)).tolist() == [4]
        assert np.flatnonzero(written[4]).tolist() == list(range(tokens))
