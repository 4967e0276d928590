"""Engine directories for tests, in milliseconds and without TensorRT.

The rewritten model and the manifest are real; the plan is a line of text that says what it
is. The reference executor runs such a directory, TensorRT cannot.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import safetensors.numpy
from engine_tables import make_table

from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.fields import ABI_VERSION, OP_TYPE, STRING_ATTRIBUTES, OperatorSpec
from paged_trt.plugins.kv import KvPoolSpec
from paged_trt.plugins.manifest import (
    KV_SCALES_FILE,
    MANIFEST_FILE,
    MODEL_DATA_FILE,
    MODEL_FILE,
    PLAN_FILE,
    TOKENIZER_FILES,
    BuildRecord,
    EngineManifest,
    SourceRecord,
    file_record,
    network_name,
    read_manifest,
)
from paged_trt.plugins.tensors import EngineSpec, LogitsMode

NOT_A_PLAN: Final = b"not a TensorRT plan: written by tests/engine_dirs.py\n"


def write_engine_dir(
    source: Path,
    target: Path,
    *,
    max_batch_size: int = 4,
    max_kv_cache_capacity: int = 512,
    max_input_len: int = 384,
    max_num_tokens: int = 1024,
    kv_cache_dtype: DType | None = None,
    logits_mode: LogitsMode = LogitsMode.LAST,
    kv_scale: float = 1.0,
    chat_template: str | None = None,
    greedy_in_engine: bool = False,
    layer_outputs: bool = False,
) -> Path:
    """Rewrite a dense model into an engine directory whose plan is none.

    Args:
        source: the dense model.
        target: the directory; it is made.
        max_batch_size: as in `KvPoolSpec`.
        max_kv_cache_capacity: as in `KvPoolSpec`.
        max_input_len: as in `EngineSpec`.
        max_num_tokens: as in `EngineSpec`.
        kv_cache_dtype: type of the pools; None is the model's own.
        logits_mode: as in `EngineSpec`.
        kv_scale: every scale of quantised pools.
        chat_template: with it the directory has this template and the source's tokenizer.
        greedy_in_engine: as in `EngineSpec`.
        layer_outputs: as in `EngineSpec`.

    Returns:
        `target`.
    """
    target.mkdir(parents=True)
    model = load_model(source)
    facts = survey(model)
    spec = EngineSpec(
        pool=KvPoolSpec.plan(
            max_batch_size=max_batch_size, max_kv_cache_capacity=max_kv_cache_capacity
        ),
        layers=facts.layers,
        activation_dtype=facts.activation_dtype,
        kv_cache_dtype=kv_cache_dtype or facts.activation_dtype,
        vocab_size=facts.vocab_size,
        logits_dtype=facts.logits_dtype,
        logits_mode=logits_mode,
        max_input_len=max_input_len,
        max_num_tokens=max_num_tokens,
        reads_position_ids=facts.reads_position_ids,
        greedy_in_engine=greedy_in_engine,
        layer_outputs=layer_outputs,
    )
    save_model(rewrite(model, facts=facts, spec=spec), target)
    write_plan(target, spec)
    if spec.kv_cache_dtype.is_quantised:
        write_scales(target, spec, kv_scale)
    if chat_template is not None:
        (target / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(source.parent / name, target / name)
    record = SourceRecord(
        name=source.name, sha256=file_record(source).sha256, dialect=facts.dialect.value
    )
    write_manifest(target, spec, source=record)
    return target


def small_spec(activation: DType, kv_cache: DType) -> EngineSpec:
    """A valid spec of one layer, one sequence of 128 tokens and four words."""
    layer = AttentionSpec(
        num_q_heads=1, num_kv_heads=1, head_dim=64, value_head_dim=64, softmax_scale=0.125
    )
    return EngineSpec(
        pool=KvPoolSpec.plan(max_batch_size=1, max_kv_cache_capacity=128),
        layers=(layer,),
        activation_dtype=activation,
        kv_cache_dtype=kv_cache,
        vocab_size=4,
        logits_dtype=activation,
        logits_mode=LogitsMode.LAST,
        max_input_len=64,
        max_num_tokens=64,
        reads_position_ids=False,
    )


def write_scales(target: Path, spec: EngineSpec, kv_scale: float) -> None:
    """One scale for all heads of all layers."""
    scales = {
        tensor.name: np.full([int(dim) for dim in tensor.dims], kv_scale, np.float32)
        for tensor in spec.tensors()
        if tensor.name.startswith("kv_scales")
    }
    safetensors.numpy.save_file(scales, target / KV_SCALES_FILE)


def change_scales(directory: Path, name: str, *, side: int, factor: float) -> None:
    """Change one layer's scales of keys (side 0) or values (1), and sign the directory anew."""
    path = directory / KV_SCALES_FILE
    scales = safetensors.numpy.load_file(path)
    scales[name][side] *= np.float32(factor)
    safetensors.numpy.save_file(scales, path)
    manifest = read_manifest(directory)
    write_manifest(directory, manifest.spec, source=manifest.source)


def write_manifest(target: Path, spec: EngineSpec, *, source: SourceRecord) -> None:
    """The manifest of the files that lie in `target`."""
    names = (PLAN_FILE, MODEL_FILE, MODEL_DATA_FILE, KV_SCALES_FILE, *TOKENIZER_FILES)
    manifest = EngineManifest.create(
        spec=spec,
        engine=make_table(spec),
        build=BuildRecord(
            flavor="tensorrt_rtx",
            tensorrt_version="0.0.0",
            route="plugin",
            abi_version=ABI_VERSION,
            kernel_source_sha256="0" * 64,
            compute_capabilities=(),
            attention_plan=None,
        ),
        source=source,
        files={name: file_record(target / name) for name in names if (target / name).exists()},
    )
    (target / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def tamper(directory: Path, change: Callable[[onnx.ModelProto], Any]) -> None:
    """Change the model of an engine directory and sign it anew, as if it had been built so."""
    manifest = read_manifest(directory)
    path = directory / MODEL_FILE
    model = onnx.load(path)
    change(model)
    (directory / MODEL_DATA_FILE).unlink()
    onnx.save(model, path, save_as_external_data=True, location=MODEL_DATA_FILE)
    spec = dataclasses.replace(manifest.spec, layers=_layers(model))
    write_plan(directory, spec)
    write_manifest(directory, spec, source=manifest.source)


def _layers(model: onnx.ModelProto) -> tuple[AttentionSpec, ...]:
    nodes = [node for node in model.graph.node if node.op_type == OP_TYPE]
    fields = [
        {
            attribute.name: onnx.helper.get_attribute_value(attribute)
            for attribute in node.attribute
            if attribute.name not in STRING_ATTRIBUTES
        }
        for node in nodes
    ]
    return tuple(OperatorSpec.from_fields(each, where="tamper").attention for each in fields)


def write_plan(directory: Path, spec: EngineSpec) -> None:
    """Text that is no plan, but names the spec as a plan does."""
    (directory / PLAN_FILE).write_bytes(NOT_A_PLAN + network_name(spec).encode())


def change_initializer(
    model: onnx.ModelProto, name: str, change: Callable[[npt.NDArray[Any]], None]
) -> None:
    """Change the values of one weight in place."""
    tensor = next(each for each in model.graph.initializer if each.name == name)
    array = onnx.numpy_helper.to_array(tensor).copy()
    change(array)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
