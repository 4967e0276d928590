"""PagedAttention as a TensorRT plugin: thin callbacks over the specs.

Importing this module loads TensorRT. One class serves both routes; the input layout is data.
TensorRT turns an exception in a callback into a bare failure, so every callback that may raise
is `kept`, and the builder raises the kept exception as the cause of its own. `clone`,
`attach_to_context`, `get_capability_interface` and `supports_format_combination` must not raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from paged_trt.plugins import cuda, device
from paged_trt.plugins.callback_errors import keep_where_watched, kept, kept_or
from paged_trt.plugins.errors import KernelLaunchError, SpecMismatchError
from paged_trt.plugins.fields import OP_DOMAIN, OP_TYPE, OP_VERSION
from paged_trt.plugins.launch.dispatch import PreparedStep, warm_keys
from paged_trt.plugins.launch.kernels_decode import CallAddresses
from paged_trt.plugins.launch.layer import LayerLauncher
from paged_trt.plugins.launch.loaded import KERNELS
from paged_trt.plugins.launch.planner import PolicyPlanner
from paged_trt.plugins.launch.requests import AttentionPlanRequest
from paged_trt.plugins.launch.tuning_target import tuned_plans
from paged_trt.plugins.operands import (
    ALIASES,
    Dims,
    Operand,
    Output,
    StepShape,
    check_input_dims,
    input_dtypes,
    operand_places,
    output_dims,
)
from paged_trt.plugins.plugin_spec import PluginSpec
from paged_trt.plugins.trt import Route, from_api_dtype, load, to_api_dtype

api: Final = load()

TACTIC_PLANNER: Final = 1
"""The planner decides at run time; the README says why there is no other. Tactic numbers live in
plans: append only, never reuse."""
GQA_NAME: Final = "GroupQueryAttention"
PLUGIN_NAMES: Final = {Route.PLUGIN: (OP_TYPE, OP_DOMAIN), Route.GQA: (GQA_NAME, "")}
"""Name and namespace of the plugin on each route; the version is OP_VERSION on both."""

_ALIASED_INPUT: Final = {int(output): int(operand) for output, operand in ALIASES.items()}
_NO_ALIAS: Final = -1
_ANY_STEP: Final = StepShape(num_tokens=1, num_seqs=1, table_width=1)
"""The kernels of a layer do not depend on the step."""


_ATTACHED: Final[list[Any]] = []
"""Instances that contexts run, kept for good. The bindings drop the last reference to one when its
context is made, and TensorRT deletes it when the context ends: it would be freed twice, and the
process abort (RTX 1.6.1)."""


class PagedAttentionPlugin(
    api.IPluginV3,  # type: ignore[misc,name-defined]
    api.IPluginV3OneCore,  # type: ignore[misc,name-defined]
    api.IPluginV3OneBuildV2,  # type: ignore[misc,name-defined]
    api.IPluginV3OneRuntime,  # type: ignore[misc,name-defined]
):
    """Paged attention that appends to the KV pools in place.

    Args:
        spec: everything that the instance knows.
    """

    def __init__(self, spec: PluginSpec) -> None:
        for base in PagedAttentionPlugin.__bases__:
            base.__init__(self)
        self.plugin_name, self.plugin_namespace = PLUGIN_NAMES[spec.route]
        self.plugin_version = OP_VERSION
        self.num_outputs = len(Output)
        self.spec = spec
        self.tactic = TACTIC_PLANNER
        self._planner = PolicyPlanner(explicit=spec.attention_plan)
        self._arch: str | None = None
        self._num_multiprocessors: int | None = None
        self._places: list[tuple[int, int]] = []
        query, key, value = (
            spec.layout.token_stride(operand, spec.operator)
            for operand in (Operand.QUERY, Operand.KEY, Operand.VALUE)
        )
        self._token_strides = (query, key, value)
        self._launcher = LayerLauncher()
        self._field_arrays: list[Any] = []
        inputs = input_dtypes(spec.layout, spec.activation_dtype, spec.kv_cache_dtype)
        pools = (spec.kv_cache_dtype, spec.kv_cache_dtype)
        self._dtypes = [*inputs, spec.activation_dtype, *pools]
        self._api_dtypes = [to_api_dtype(dtype) for dtype in self._dtypes]

    def get_capability_interface(self, kind: Any) -> PagedAttentionPlugin:
        """Core, build and runtime capability are this object."""
        return self

    def clone(self) -> PagedAttentionPlugin:
        """A plugin of the same spec and tactic; TensorRT keeps it."""
        copy = PagedAttentionPlugin(self.spec)
        copy.tactic = self.tactic
        return copy

    def attach_to_context(self, context: Any) -> PagedAttentionPlugin:
        """The instance that one execution context runs; its kernels are loaded here.

        RTX attaches during a build as well, and then there may be no device, or no context that
        could hold a kernel.
        """
        copy = self.clone()
        copy._load_kernels()
        _ATTACHED.append(copy)
        return copy

    # An exception in `attach_to_context` ends the process: whoever attaches looks for a kept one.
    @kept_or(None)
    def _load_kernels(self) -> None:
        if cuda.driver_available() and device.context_id():
            self._arch = cuda.device_arch()
            self._num_multiprocessors = cuda.multiprocessors()
            request = self._plan_request(_ANY_STEP)
            KERNELS.warm(warm_keys(request, gathers=self._planner.may_gather(request)))
            if self._planner.uses_tuned:
                self._planner = dataclasses.replace(self._planner, tuned=tuned_plans())

    def get_aliased_input(self, output: int) -> int:
        """Input whose memory an output uses; must not raise: TensorRT would drop the alias."""
        return _ALIASED_INPUT.get(output, _NO_ALIAS)

    @kept
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        """Activation type, then the pool type twice.

        TensorRT asks while it parses, which makes this the place to refuse a type: a plugin
        that supports no format later on ends the process (RTX 1.6.1 and 1.7.1).

        Raises:
            SpecMismatchError: an input has another type.
        """
        self._check_dtypes(input_types, f"{self._where()}, types of the model")
        return self._api_dtypes[-len(Output) :]

    @kept
    def get_output_shapes(
        self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any
    ) -> list[Any]:
        """Output 0 has query's token rows; the pools keep their dims."""
        layout = self.spec.layout
        tokens = inputs[Operand.QUERY][1 if layout.is_packed else 0]
        # The token count is an expression; -1 marks its place among the fixed dims.
        dims = output_dims(layout, self.spec.operator, -1)
        output = api.DimsExprs(
            [tokens if dim == -1 else expr_builder.constant(dim) for dim in dims]
        )
        pools = [api.DimsExprs(inputs[operand]) for operand in ALIASES.values()]
        return [output, *pools]

    # True keeps the build alive until the builder raises what was kept.
    @kept_or(True)
    def supports_format_combination(
        self, position: int, descriptions: Sequence[Any], num_inputs: int
    ) -> bool:
        """Linear memory and the exact type of every input and output."""
        description = descriptions[position].desc
        return bool(
            description.format == api.TensorFormat.LINEAR
            and description.type == self._api_dtypes[position]
        )

    @kept
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check types, and dims at the three bounds of a profile.

        Raises:
            SpecMismatchError: an input differs from the spec, or a pool's size is a range.
        """
        for bound in ("min", "opt", "max"):
            where = f"{self._where()}, profile {bound}"
            self._check_dtypes([item.desc.type for item in inputs], where)
            dims = [tuple(getattr(item, bound)) for item in inputs]
            self._check_dims(dims, where)

    @kept
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check the actual dims and keep what `enqueue` needs of them.

        Raises:
            SpecMismatchError: an input differs from the spec.
        """
        where = f"{self._where()}, actual shape"
        self._check_dtypes([item.type for item in inputs], where)
        step = self._check_dims([tuple(item.dims) for item in inputs], where)
        spec = self.spec
        self._places = operand_places(spec.layout, spec.operator, self._dtypes, step.num_seqs)
        self._launcher.set_shape(self._plan_request(step))

    @kept
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Bytes that the planner may need for any step of the profile."""
        dims = [tuple(item.max) for item in inputs]
        step = self._check_dims(dims, f"{self._where()}, profile max")
        return self._planner.workspace_bytes(self._plan_request(step))

    def get_valid_tactics(self) -> list[int]:
        """The only one; TensorRT's timing could not choose among plans."""
        return [TACTIC_PLANNER]

    @kept
    def set_tactic(self, tactic: int) -> None:
        """Record the tactic of the plan.

        Raises:
            SpecMismatchError: a plan of a newer version; 0 is TensorRT's default tactic.
        """
        if tactic not in (0, TACTIC_PLANNER):
            raise SpecMismatchError("tactic", TACTIC_PLANNER, tactic, where=self._where())
        self.tactic = tactic

    @kept
    def get_fields_to_serialize(self) -> Any:
        """The spec; the arrays live as long as the plugin, TensorRT reads them later."""
        arrays = self.spec.to_fields()
        self._field_arrays = list(arrays.values())
        kinds = {"int32": api.PluginFieldType.INT32, "float32": api.PluginFieldType.FLOAT32}
        return api.PluginFieldCollection(
            [
                api.PluginField(name, array, kinds[array.dtype.name])
                for name, array in arrays.items()
            ]
        )

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch one step on `stream`.

        Raises:
            KernelLaunchError: a kernel is missing, or a pool output is not its input's memory.
        """
        # No decorator and no helper: every call here is paid once per layer and step.
        try:
            self._launcher.enqueue(inputs, outputs, workspace, stream, layer=self)
        except BaseException as error:
            keep_where_watched(error)

    def locate(
        self, inputs: Sequence[int], outputs: Sequence[int], workspace: int
    ) -> CallAddresses:
        """As `Layer.locate`."""
        for output, operand in _ALIASED_INPUT.items():
            if outputs[output] != inputs[operand]:
                raise KernelLaunchError(
                    f"{self._where()}: pool output {output} is at {outputs[output]:#x} and its "
                    f"input at {inputs[operand]:#x}; bind both to one address"
                )
        return CallAddresses(
            operands=tuple([inputs[index] + offset for index, offset in self._places]),
            token_strides=self._token_strides,
            output=outputs[Output.OUTPUT],
            workspace=workspace,
        )

    def prepare(self, request: AttentionPlanRequest, addresses: CallAddresses) -> PreparedStep:
        """As `Layer.prepare`."""
        return PreparedStep(request, self.spec.operator, addresses, planner=self._planner)

    def _plan_request(self, step: StepShape) -> AttentionPlanRequest:
        return AttentionPlanRequest(
            arch=self._arch,
            attention=self.spec.operator.attention,
            activation_dtype=self.spec.activation_dtype,
            kv_cache_dtype=self.spec.kv_cache_dtype,
            step=step,
            num_multiprocessors=self._num_multiprocessors,
        )

    def _where(self) -> str:
        return f"plugin {self.plugin_name}"

    def _check_dims(self, dims: Sequence[Dims], where: str) -> StepShape:
        return check_input_dims(self.spec.layout, self.spec.operator, dims, where=where)

    def _check_dtypes(self, types: Sequence[Any], where: str) -> None:
        for name, want, api_dtype in zip(self.spec.layout.names, self._dtypes, types, strict=False):
            found = from_api_dtype(api_dtype)
            if found is not want:
                raise SpecMismatchError(f"{name}.dtype", want.value, found.value, where=where)
