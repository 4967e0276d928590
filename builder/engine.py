"""A paged ONNX model to a TensorRT plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from paged_trt.builder.onnx.lowering import lower_to_gqa, node_operators
from paged_trt.builder.onnx.products import sum_in_float32
from paged_trt.builder.profile import make_profiles
from paged_trt.builder.progress import BuildProgress
from paged_trt.plugins import cuda, trt
from paged_trt.plugins.callback_errors import CALLBACK_ERRORS
from paged_trt.plugins.engine_table import EngineTable
from paged_trt.plugins.errors import BuildCancelledError, BuildError
from paged_trt.plugins.fields import ABI_VERSION, OP_TYPE, OperatorSpec
from paged_trt.plugins.launch.plans import AUTO, parse_attention_plan
from paged_trt.plugins.launch.sources import kernel_source_sha256
from paged_trt.plugins.load_check import check_engine_table, table_from_network
from paged_trt.plugins.manifest import BuildRecord, network_name
from paged_trt.plugins.tensorrt_messages import tensorrt_error
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.plugins.trt import LogLines, Route

RTX_PORTABLE: Final = ("8.0+",)
"""Compute capabilities of a default RTX plan: 8.0 with forward compatibility."""

_abandoned: Final[list[object]] = []
"""TensorRT's objects of a cancelled build: freeing them can end the process (RTX 1.7.1)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """A serialized engine, the record of how it was made, and the table of its network."""

    plan: bytes
    build: BuildRecord
    table: EngineTable


def build_plan(
    model_path: Path,
    spec: EngineSpec,
    *,
    attention_plan: str | None = None,
    float32_sums: bool = True,
    progress: BuildProgress | None = None,
) -> BuiltPlan:
    """Build the engine of a paged model.

    Args:
        model_path: `model.onnx` with PagedAttention nodes; its weights lie beside it.
        spec: what the model was rewritten for.
        attention_plan: text of `--attention-plan`; None leaves the choice to the planner.
        float32_sums: sum float16 products in float32, as other runtimes do.
        progress: listener that is not active yet; None shows bars on a terminal.

    Raises:
        ConfigError: `attention_plan` names no plan, or TensorRT is missing or unsuited.
        SpecMismatchError: model or network differ from `spec`.
        BuildError: TensorRT refused the model; an exception of a callback is the cause.
        BuildCancelledError: Ctrl-C. The caller should then end the process without cleaning
            up (`os._exit`), for a cancelled build of RTX 1.7.1 leaves a damaged heap.
    """
    explicit_plan = parse_attention_plan(attention_plan or AUTO)
    # The plugin classes derive from TensorRT's: importing them loads TensorRT.
    from paged_trt.plugins import creator

    creator.register()
    model = ir.load(model_path)
    operators = node_operators(model, spec)
    context = creator.BuildContext(
        operators=operators,
        activation_dtype=spec.activation_dtype,
        kv_cache_dtype=spec.kv_cache_dtype,
        attention_plan=explicit_plan,
    )
    CALLBACK_ERRORS.clear()
    session = _Session(spec)
    with (
        creator.build_context(context),
        _parsable_model(model_path, model, operators, float32_sums=float32_sums) as path,
        progress or BuildProgress() as listener,
    ):
        session.parse(path, num_nodes=len(operators))
        table = session.configure(listener)
        plan = session.serialize(listener)
    return BuiltPlan(plan=plan, build=_build_record(attention_plan, float32_sums), table=table)


@contextlib.contextmanager
def _parsable_model(
    model_path: Path,
    model: ir.Model,
    operators: Mapping[str, OperatorSpec],
    *,
    float32_sums: bool,
) -> Iterator[Path]:
    """Path of a model that this version's parser reads as it should; weights are never copied."""
    changes = sum_in_float32(model) if float32_sums else 0
    if trt.route() is Route.GQA:
        lower_to_gqa(model, operators)
    elif not changes:
        yield model_path
        return
    with tempfile.TemporaryDirectory(prefix="paged-trt-") as directory:
        for location in sorted(_external_files(model)):
            link = Path(directory, location)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((model_path.parent / location).resolve())
        path = Path(directory, model_path.name)
        ir.save(model, path)
        yield path


def _external_files(model: ir.Model) -> set[str]:
    return {
        str(value.const_value.location)
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }


class _Session:
    """One build: TensorRT's objects, in the order in which they are needed."""

    def __init__(self, spec: EngineSpec) -> None:
        self._api = trt.load()
        self._spec = spec
        self._lines = LogLines()
        self._logger = trt.logger(self._lines)
        self._builder = self._api.Builder(self._logger)
        self._network = trt.create_network(self._builder)
        self._config = self._builder.create_builder_config()
        self._parser: Any = None

    def parse(self, path: Path, *, num_nodes: int) -> None:
        """Read the model and check that every PagedAttention node became a plugin."""
        network = self._network
        parser = self._parser = self._api.OnnxParser(network, self._logger)
        is_parsed = parser.parse_from_file(str(path))
        if not is_parsed or CALLBACK_ERRORS.first is not None:
            errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
            raise self._error("TensorRT cannot read the paged model", errors)
        self._refuse_unused_inputs()
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        plugins = [layer for layer in layers if layer.type == self._api.LayerType.PLUGIN_V3]
        if len(plugins) != num_nodes:
            raise self._error(
                f"{num_nodes} {OP_TYPE} nodes became {len(plugins)} plugin layers: TensorRT "
                "inlined the function of the others; write `plugin_namespace` and "
                "`plugin_version` on every node"
            )

    def configure(self, listener: BuildProgress) -> EngineTable:
        """Set name, flags and profiles; give the network's table, checked against the spec."""
        network, config, builder = self._network, self._config, self._builder
        network.name = network_name(self._spec)
        self._allow_aliases()
        config.progress_monitor = trt.progress_monitor(listener)
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        dims = {tensor.name: tuple(tensor.shape) for tensor in inputs}
        profiles = []
        for wanted in make_profiles(self._spec, dims):
            profile = builder.create_optimization_profile()
            for name, shapes in wanted.shapes.items():
                profile.set_shape(name, *shapes)
            profiles.append(profile)
        table = table_from_network(network, profiles)
        check_engine_table(self._spec, table)
        for profile in profiles:
            if config.add_optimization_profile(profile) < 0:
                raise self._error("TensorRT refused an optimization profile")
        return table

    def _allow_aliases(self) -> None:
        config, api = self._config, self._api
        config.set_preview_feature(api.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)

    def serialize(self, listener: BuildProgress) -> bytes:
        """The plan."""
        builder, network, config = self._builder, self._network, self._config
        plan = builder.build_serialized_network(network, config)
        if listener.is_cancelled:
            _abandoned.extend((self, plan))
            raise BuildCancelledError("the build was stopped; nothing was written")
        if plan is None or CALLBACK_ERRORS.first is not None:
            raise self._error("TensorRT built no engine")
        self._refuse_unused_inputs()
        return bytes(plan)

    def _refuse_unused_inputs(self) -> None:
        for line in self._lines.warnings:
            if "Unused Input" in line:
                raise self._error(
                    f"TensorRT found an input of the model that nothing reads ({line}); make the "
                    "model again with `paged-trt build`"
                )

    def _error(self, problem: str, lines: list[str] | None = None) -> BuildError:
        cause = CALLBACK_ERRORS.first
        tail = "\n".join(lines or []) or self._lines.tail()
        return tensorrt_error(BuildError, problem, log=tail, cause=cause)


@functools.cache
def _compute_capabilities() -> tuple[str, ...]:
    if trt.flavor() == "tensorrt_rtx":
        return RTX_PORTABLE
    # Full TensorRT builds for the device that it runs on.
    digits = cuda.device_arch().removeprefix("sm_")
    return (f"{digits[:-1]}.{digits[-1]}",)


def _build_record(attention_plan: str | None, float32_sums: bool) -> BuildRecord:
    return BuildRecord(
        flavor=trt.flavor(),
        tensorrt_version=trt.version(),
        route="plugin" if trt.route() is Route.PLUGIN else "gqa",
        abi_version=ABI_VERSION,
        kernel_source_sha256=kernel_source_sha256(),
        compute_capabilities=_compute_capabilities(),
        attention_plan=attention_plan,
        float32_sums=float32_sums,
    )
