from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tables import make_table

from paged_trt.plugins import errors
from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, ManifestError, PagedTrtError, SpecMismatchError
from paged_trt.plugins.fields import ABI_VERSION, OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.manifest import (
    BuildRecord,
    EngineManifest,
    FileRecord,
    SourceRecord,
    check_files,
    file_record,
    network_name,
    read_manifest,
)
from paged_trt.plugins.tensors import EngineSpec, LogitsMode

ATTENTION = AttentionSpec(
    num_q_heads=4, num_kv_heads=2, head_dim=80, value_head_dim=64, softmax_scale=80**-0.5
)
SPEC = EngineSpec(
    pool=KvPoolSpec.plan(max_batch_size=4, max_kv_cache_capacity=300, retained_pages=2),
    layers=(ATTENTION, dataclasses.replace(ATTENTION, window=100, softcap=30.0)),
    activation_dtype=DType.FLOAT16,
    kv_cache_dtype=DType.INT8,
    vocab_size=512,
    logits_dtype=DType.FLOAT32,
    logits_mode=LogitsMode.LAST,
    max_input_len=200,
    max_num_tokens=64,
    reads_position_ids=True,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 5}, "num_q_heads=5 is no multiple of num_kv_heads=2"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"softmax_scale": 1}, "softmax_scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"window": 0}, "window"),
        ({"window": -2}, "window"),
        ({"rotary_dim": 2}, "rotary_dim=2 needs a rope"),
        ({"rope": Rope.HALF_SPLIT, "rotary_dim": 81}, "rotary_dim"),
        ({"rope": Rope.HALF_SPLIT, "rotary_dim": 82}, "head_dim=80"),
        ({"rope": 1, "rotary_dim": 2}, "rope"),
    ],
)
def test_attention_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(ATTENTION, **changes)


def test_scale_survives_the_trip_through_float32() -> None:
    operator = OperatorSpec(pool=SPEC.pool, attention=ATTENTION)
    assert OperatorSpec.from_fields(operator.to_fields(), where="test") == operator


@pytest.mark.parametrize(
    "name", sorted(OperatorSpec(pool=SPEC.pool, attention=ATTENTION).to_fields())
)
def test_every_field_is_needed_and_compared(name: str) -> None:
    operator = OperatorSpec(pool=SPEC.pool, attention=ATTENTION)
    fields = operator.to_fields()
    value = fields.pop(name)
    with pytest.raises(SpecMismatchError, match=rf"missing \['{name}'\]"):
        OperatorSpec.from_fields(fields, where="test")
    with pytest.raises(SpecMismatchError, match=r"unknown \['other'\]"):
        OperatorSpec.from_fields({**operator.to_fields(), "other": 1}, where="test")
    changed = {
        "window": 7,
        "rope": 1,
        "rotary_dim": 2,
        "num_q_heads": 6,
        "num_kv_heads": 4,
    }.get(name, value + 1)
    fields = {**operator.to_fields(), name: changed}
    if name in {"rope", "rotary_dim"}:
        fields |= {"rope": 1, "rotary_dim": 2}
    if name in {"max_pages_per_seq", "max_batch_size"}:
        fields["num_pages"] = 1000
    with pytest.raises(SpecMismatchError):
        operator.require_equal(OperatorSpec.from_fields(fields, where="test"), where="test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "found 0"),
        ({"activation_dtype": DType.FLOAT32}, "got float32"),
        ({"kv_cache_dtype": DType.INT32}, "got int32"),
        ({"max_input_len": 301}, "max_input_len=301 .*max_kv_cache_capacity=300"),
        ({"max_num_tokens": 0}, "max_num_tokens"),
        ({"vocab_size": 1.0}, "vocab_size"),
    ],
)
def test_engine_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SPEC, **changes)


def test_tensor_table_carries_one_count() -> None:
    pools = [t for t in SPEC.tensors() if "pool" in t.name]
    assert len(pools) == 8
    assert {t.dims[0] for t in pools} == {SPEC.pool.num_pages} == {14}
    assert SPEC.pool_bytes() == 2 * 14 * 2 * 128 * (80 + 64)


def test_scales_exist_only_for_a_quantised_pool() -> None:
    names = {t.name for t in SPEC.tensors()}
    plain = {t.name for t in dataclasses.replace(SPEC, kv_cache_dtype=DType.FLOAT16).tensors()}
    assert names - plain == {"kv_scales.0", "kv_scales.1"}


def _manifest(files: dict[str, Any]) -> EngineManifest:
    build = BuildRecord(
        flavor="tensorrt_rtx",
        tensorrt_version="1.7.1.116",
        route="plugin",
        abi_version=ABI_VERSION,
        kernel_source_sha256="0" * 64,
        compute_capabilities=("8.0+",),
        attention_plan=None,
    )
    source = SourceRecord(name="model.onnx", sha256="0" * 64, dialect="paged")
    return EngineManifest.create(
        spec=SPEC, engine=make_table(SPEC), build=build, source=source, files=files
    )


def test_manifest_round_trip(tmp_path: Path) -> None:
    (tmp_path / "model.plan").write_bytes(b"plan")
    manifest = _manifest({"model.plan": file_record(tmp_path / "model.plan")})
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    assert read_manifest(tmp_path) == manifest
    check_files(tmp_path, manifest)
    assert network_name(SPEC).startswith("paged-trt/3 pages=14 sha256=")
    assert json.loads(manifest.to_json())["pool"]["num_pages"] == 14


TAMPERINGS: list[tuple[str, Callable[[dict[str, Any]], object], type[PagedTrtError]]] = [
    ("written pool", lambda d: d["pool"].update(num_pages=15), SpecMismatchError),
    ("spec pool", lambda d: d["spec"]["pool"].update(num_pages=15), SpecMismatchError),
    ("both pools", lambda d: (d["pool"].update(num_pages=15),
                              d["spec"]["pool"].update(num_pages=15)), SpecMismatchError),
    ("tensor", lambda d: d["tensors"][5]["dims"].__setitem__(0, 15), SpecMismatchError),
    ("lost tensor", lambda d: d["tensors"].pop(), SpecMismatchError),
    ("hash", lambda d: d.update(geometry_sha256="1" * 64), SpecMismatchError),
    ("abi", lambda d: d["build"].update(abi_version=ABI_VERSION + 1), SpecMismatchError),
    ("schema", lambda d: d.update(schema_version=2), ManifestError),
    ("bool count", lambda d: d["pool"].update(num_pages=True), ManifestError),
    ("float count", lambda d: d["pool"].update(num_pages=14.0), ManifestError),
    ("under the minimum", lambda d: d["spec"]["pool"].update(num_pages=3), ManifestError),
    ("unknown name", lambda d: d["spec"].update(extra=1), ManifestError),
    ("missing name", lambda d: d["spec"].pop("vocab_size"), ManifestError),
    ("flavour", lambda d: d["build"].update(flavor="other"), ManifestError),
    ("capability", lambda d: d["build"].update(compute_capabilities=["sm80 and newer"]),
     ManifestError),
    ("page size", lambda d: d["pool"].update(tokens_per_page=64), ManifestError),
    ("escape", lambda d: d["files"].update({"../x": {"sha256": "0" * 64, "size": 1}}),
     ManifestError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tamper", "error"), TAMPERINGS, ids=[t[0] for t in TAMPERINGS])
def test_a_tampered_manifest_is_refused(
    name: str,
    tamper: Callable[[dict[str, Any]], object],
    error: type[PagedTrtError],
    tmp_path: Path,
) -> None:
    data = json.loads(_manifest({}).to_json())
    tamper(data)
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(error) as caught:
        read_manifest(tmp_path)
    assert caught.value.exit_code == 4
    # For people: the next step, and no Python object.
    assert "`paged-trt build`" in str(caught.value)
    assert "TensorSpec" not in str(caught.value)


def test_a_tampered_tensor_is_named_with_both_values(tmp_path: Path) -> None:
    data = json.loads(_manifest({}).to_json())
    data["tensors"][5]["dtype"] = "bfloat16"
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(SpecMismatchError) as caught:
        read_manifest(tmp_path)
    name = data["tensors"][5]["name"]
    assert (caught.value.field, caught.value.right) == (f"tensors.{name}.dtype", "bfloat16")


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00", '{"schema_version": 2}'])
def test_a_broken_manifest_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ManifestError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_a_truncated_or_swapped_file_is_refused(cut: int, tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"plan")
    manifest = _manifest({"model.plan": file_record(plan)})
    plan.write_bytes(b"plan"[:cut])
    with pytest.raises(ManifestError, match=f"size 4, found {cut}"):
        check_files(tmp_path, manifest)
    plan.write_bytes(b"PLAN")
    with pytest.raises(ManifestError, match="sha256"):
        check_files(tmp_path, manifest)
    plan.unlink()
    with pytest.raises(ManifestError, match="No such file"):
        check_files(tmp_path, manifest)


def test_a_file_that_no_hash_covers_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    plan.write_bytes(b"plan")
    with pytest.raises(ManifestError, match=r"lists no model\.plan"):
        check_files(tmp_path, _manifest({}))
    manifest = _manifest({"model.plan": file_record(plan)})
    check_files(tmp_path, manifest)
    (tmp_path / "notes.txt").write_text("mine")
    check_files(tmp_path, manifest)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ManifestError, match=r"chat_template\.jinja is not listed"):
        check_files(tmp_path, manifest)
    check_files(tmp_path, manifest, names=["tokenizer.json"])


@pytest.mark.parametrize("name", ["model.plan", "manifest.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    manifest = _manifest({"model.plan": FileRecord(sha256="0" * 64, size=1)})
    reads = {
        "manifest.json": lambda: read_manifest(tmp_path),
        "model.plan": lambda: check_files(tmp_path, manifest),
    }
    with pytest.raises(ManifestError, match="no regular file"):
        reads[name]()


def test_exit_codes_are_the_contract() -> None:
    codes = {
        "ConfigError": 2, "KvPoolError": 2, "UnsupportedError": 2, "OnnxRewriteError": 2,
        "SequenceError": 2, "BuildError": 3, "KernelError": 3, "KernelCompileError": 3,
        "KernelLaunchError": 3, "PagesExhausted": 3, "ManifestError": 4, "SpecMismatchError": 4,
    }  # fmt: skip
    assert {name: getattr(errors, name).exit_code for name in codes} == codes
