"""Creators: from an ONNX node or from the fields in a plan to a plugin.

Importing this module loads TensorRT; `register()` makes the plugin known, once per process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from paged_trt.plugins.callback_errors import kept
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import BuildError, SpecMismatchError, UnsupportedError
from paged_trt.plugins.fields import (
    FLOAT_ATTRIBUTES,
    INT_ATTRIBUTES,
    OP_TYPE,
    OP_VERSION,
    OperatorSpec,
)
from paged_trt.plugins.launch.plans import AttentionPlan
from paged_trt.plugins.plugin import PLUGIN_NAMES, PagedAttentionPlugin
from paged_trt.plugins.plugin_spec import FieldValue, PluginSpec
from paged_trt.plugins.trt import Route, flavor, load, route, version

api: Final = load()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What the builder knows and a node's attributes do not say.

    Attributes:
        operators: spec of every PagedAttention node, by node name.
        activation_dtype: type of query, key, value and output.
        kv_cache_dtype: type of the pools.
        attention_plan: the user's plan; None leaves the choice to the planner.
    """

    operators: Mapping[str, OperatorSpec]
    activation_dtype: DType
    kv_cache_dtype: DType
    attention_plan: AttentionPlan | None


_context: BuildContext | None = None


@contextlib.contextmanager
def build_context(context: BuildContext) -> Iterator[None]:
    """Creators take what the nodes do not say from `context`."""
    global _context
    previous, _context = _context, context
    try:
        yield
    finally:
        _context = previous


class _Creator(api.IPluginCreatorV3One):  # type: ignore[misc,name-defined]
    """Common part: name, registration data, and the plan's own fields.

    Args:
        served: the route that the creator serves.
    """

    def __init__(self, served: Route) -> None:
        api.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_namespace = PLUGIN_NAMES[served]
        self.plugin_version = OP_VERSION
        self._route = served
        # Only a listed name arrives; the empty arrays must outlive the collection.
        self._empty = np.array([], dtype=np.int32)
        kinds = {
            **dict.fromkeys(INT_ATTRIBUTES, api.PluginFieldType.INT32),
            **dict.fromkeys(FLOAT_ATTRIBUTES, api.PluginFieldType.FLOAT32),
        }
        self.field_names = api.PluginFieldCollection(
            [api.PluginField(field, self._empty, kind) for field, kind in kinds.items()]
        )

    @kept
    def create_plugin(self, name: str, fields: Any, phase: Any) -> PagedAttentionPlugin:
        """A plugin of a node (build phase) or of a plan (runtime phase).

        Raises:
            SpecMismatchError: a field is missing, unknown or differs from the model.
            BuildError: a node is built outside of `paged-trt build`.
        """
        values = {field.name: decode_field(field) for field in fields}
        if phase == api.TensorRTPhase.RUNTIME:
            spec = PluginSpec.from_fields(values, where=f"plan, plugin `{name}`")
        else:
            spec = self._spec_of_node(name, values)
        return PagedAttentionPlugin(spec)

    def _spec_of_node(self, name: str, values: Mapping[str, FieldValue]) -> PluginSpec:
        if _context is None:
            raise BuildError(
                f"node `{name}`: {OP_TYPE} is built only by `paged-trt build`, which knows the "
                "types of the model"
            )
        operator = _context.operators.get(name)
        if operator is None:
            known = ", ".join(_context.operators)
            raise SpecMismatchError("node", known, name, where=f"creator {self.name}")
        if self._route is Route.PLUGIN:
            where = f"attributes of node `{name}`"
            operator.require_equal(OperatorSpec.from_fields(values, where=where), where=where)
        return PluginSpec(
            operator=operator,
            activation_dtype=_context.activation_dtype,
            kv_cache_dtype=_context.kv_cache_dtype,
            attention_plan=_context.attention_plan,
            route=self._route,
        )


def decode_field(field: Any) -> FieldValue:
    """Value of a plugin field: one int32 or float32.

    Raises:
        SpecMismatchError: the field has another type or another length.
    """
    if field.type not in (api.PluginFieldType.INT32, api.PluginFieldType.FLOAT32):
        raise SpecMismatchError(field.name, "INT32 or FLOAT32", field.type, where="plugin fields")
    if field.size != 1:
        raise SpecMismatchError(field.name, "1 value", field.size, where="plugin fields")
    value: FieldValue = np.asarray(field.data).reshape(()).item()
    return value


@functools.cache
def register() -> None:
    """Make the plugin known to TensorRT's parser and runtime.

    Raises:
        UnsupportedError: another plugin has the name, or TensorRT refused.
    """
    kind = route()
    creator = _Creator(kind)
    registry = api.get_plugin_registry()
    name, namespace = PLUGIN_NAMES[kind]
    if registry.get_creator(name, OP_VERSION, namespace) is not None:
        raise UnsupportedError(
            f"a plugin `{name}` version {OP_VERSION} is registered already by other code in "
            "this process; load that plugin library in another process"
        )
    if not registry.register_creator(creator, namespace):
        raise UnsupportedError(f"{flavor()} {version()} refused the plugin creator `{name}`")
    _registered.append(creator)


_registered: Final[list[_Creator]] = []
"""TensorRT holds no reference to a Python creator."""
