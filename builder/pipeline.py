"""One build, start to end: model in, engine directory out, or nothing at all."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from paged_trt.builder import artifact
from paged_trt.builder.config import BuildConfig, resolve
from paged_trt.builder.onnx.load import load_model
from paged_trt.builder.onnx.rewrite import rewrite
from paged_trt.builder.onnx.save import save_model
from paged_trt.builder.onnx.survey import survey
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv_scales import read_scales_file, require_scales, require_scales_for
from paged_trt.plugins.launch.explicit import require_affordable
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.plans import AUTO, AttentionPlan, parse_attention_plan
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.manifest import (
    KV_SCALES_FILE,
    MODEL_DATA_FILE,
    MODEL_FILE,
    PLAN_FILE,
    EngineManifest,
    SourceRecord,
    file_record,
)
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensors import EngineSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What one `paged-trt build` was asked for.

    Attributes:
        model: the source model.
        target: engine directory to write; None for a dry run.
        config: limits and types.
        tokenizer: folder of the tokenizer; None looks beside the model.
        reference: keep the rewritten model in the engine directory.
        save_onnx: also write the rewritten model to this file; None does not.
        force: replace an engine directory that is there.
    """

    model: Path
    target: Path | None
    config: BuildConfig
    tokenizer: Path | None = None
    reference: bool = True
    save_onnx: Path | None = None
    force: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """What an engine is going to hold, in bytes."""

    spec: EngineSpec
    model_name: str
    dialect: str
    pool_bytes: int
    kv_bytes_per_token: int
    page_table_bytes: int
    weight_bytes: int
    workspace_bytes: int
    layer_output_bytes: int

    @property
    def total_bytes(self) -> int:
        """Pools, page table, weights, attention workspace, layer outputs; activations not."""
        fixed = self.pool_bytes + self.page_table_bytes + self.weight_bytes
        return fixed + self.workspace_bytes + self.layer_output_bytes


def plan_build(request: BuildRequest) -> PagePlan:
    """Check a request and add up its bytes; nothing is written and TensorRT is not needed.

    Raises:
        PagedTrtError: the request, the model or a file beside it is not usable.
    """
    return _prepare(request).plan


def build_engine_directory(
    request: BuildRequest,
    *,
    on_plan: Callable[[PagePlan], None] | None = None,
) -> EngineManifest:
    """Build an engine directory.

    Args:
        request: what to build; `target` must be set.
        on_plan: called with the page plan before the build starts.

    Raises:
        PagedTrtError: by its class; nothing is left behind and `target` is as it was.
    """
    if request.target is None:
        raise ConfigError("an engine directory is needed; pass `-o ENGINE_DIR`")
    artifact.require_target(request.target, force=request.force)
    files = (request.model, request.tokenizer, request.config.kv_scales, request.save_onnx)
    artifact.require_outside(request.target, [path for path in files if path is not None])
    prepared = _prepare(request)
    if on_plan is not None:
        on_plan(prepared.plan)
    # TensorRT takes a second to load, and a dry run works without it.
    from paged_trt.builder.engine import build_plan

    with artifact.staged_directory(request.target, force=request.force) as staging:
        spec = prepared.plan.spec
        model_path = save_model(prepared.model, staging)
        built = build_plan(
            model_path,
            spec,
            attention_plan=request.config.attention_plan,
            float32_sums=not request.config.float16_sums,
        )
        (staging / PLAN_FILE).write_bytes(built.plan)
        if spec.kv_cache_dtype.is_quantised and request.config.kv_scales is not None:
            shutil.copyfile(request.config.kv_scales, staging / KV_SCALES_FILE)
        for source in prepared.tokenizer_files:
            shutil.copyfile(source, staging / source.name)
        if request.save_onnx is not None:
            _save_onnx(staging, request.save_onnx)
        if not request.reference:
            (staging / MODEL_FILE).unlink()
            (staging / MODEL_DATA_FILE).unlink(missing_ok=True)
        manifest = EngineManifest.create(
            spec=spec,
            build=built.build,
            engine=built.table,
            source=SourceRecord(
                name=request.model.name,
                sha256=file_record(request.model).sha256,
                dialect=prepared.plan.dialect,
            ),
            files=artifact.file_records(staging),
        )
        artifact.write_manifest(staging, manifest)
    return manifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    model: ir.Model
    plan: PagePlan
    tokenizer_files: list[Path]


def _prepare(request: BuildRequest) -> _Prepared:
    """Everything that can go wrong without TensorRT, and the rewritten model."""
    config = request.config
    _explicit_plan(config)
    if request.save_onnx is not None:
        _require_onnx_target(request.save_onnx)
    tokenizer_files = artifact.tokenizer_sources(request.tokenizer, request.model)
    model = load_model(request.model)
    facts = survey(model)
    spec = resolve(config, facts)
    if spec.kv_cache_dtype.is_quantised and config.kv_scales is not None:
        scales = read_scales_file(config.kv_scales)
        require_scales(scales, spec.layers, where=f"`{config.kv_scales}`")
        require_scales_for(config.kv_scales, spec.kv_cache_dtype)
    rewrite(model, facts=facts, spec=spec)
    plan = _page_plan(spec, model, request, dialect=facts.dialect.value)
    return _Prepared(model=model, plan=plan, tokenizer_files=tokenizer_files)


def _explicit_plan(config: BuildConfig) -> AttentionPlan | None:
    return parse_attention_plan(config.attention_plan or AUTO)


def _page_plan(
    spec: EngineSpec, model: ir.Model, request: BuildRequest, *, dialect: str
) -> PagePlan:
    initializers = model.graph.initializers.values()
    explicit = _explicit_plan(request.config)
    if explicit is not None:
        require_affordable(explicit, largest_requests(spec))
    return PagePlan(
        spec=spec,
        model_name=request.model.name,
        dialect=dialect,
        pool_bytes=spec.pool_bytes(),
        kv_bytes_per_token=sum(layer.kv_elements for layer in spec.layers)
        * spec.kv_cache_dtype.itemsize,
        page_table_bytes=spec.pool.table_entries() * DType.INT32.itemsize,
        weight_bytes=sum(v.const_value.nbytes for v in initializers if v.const_value is not None),
        workspace_bytes=max(workspace_bounds(spec, explicit)),
        layer_output_bytes=spec.layer_output_bytes(),
    )


def workspace_bounds(spec: EngineSpec, explicit: AttentionPlan | None) -> list[int]:
    """Bytes of attention workspace that no step passes, for each layer.

    TensorRT lets layers share one workspace: an engine needs the largest.
    """
    planner = PolicyPlanner(explicit=explicit)
    return [planner.workspace_bytes(request) for request in largest_requests(spec)]


def largest_requests(spec: EngineSpec) -> list[AttentionPlanRequest]:
    """The largest step of each layer, as far as an engine is known before its device is."""
    step = StepShape(
        num_tokens=spec.max_token_rows,
        num_seqs=spec.pool.max_batch_size,
        table_width=spec.pool.max_pages_per_seq,
    )
    return [
        AttentionPlanRequest(
            arch=None,
            attention=layer,
            activation_dtype=spec.activation_dtype,
            kv_cache_dtype=spec.kv_cache_dtype,
            step=step,
        )
        for layer in spec.layers
    ]


def _require_onnx_target(path: Path) -> None:
    for taken in (path, path.with_name(f"{path.name}.data")):
        if taken.exists():
            raise ConfigError(f"{taken} exists; `--save-onnx` writes new files only")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no directory; create it first")


def _save_onnx(staging: Path, path: Path) -> None:
    """Write the rewritten model with its data under the name that the user gave."""
    model = ir.load(staging / MODEL_FILE)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        ir.save(model, Path(folder, path.name), external_data=f"{path.name}.data")
        _require_onnx_target(path)
        # The data first: a model file that is there can be read.
        for written in sorted(Path(folder).iterdir(), reverse=True):
            written.rename(path.with_name(written.name))
