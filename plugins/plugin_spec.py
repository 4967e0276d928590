"""Everything that one plugin instance is built from, and its form inside a plan.

Each field of a plan is one number. Under NumPy 2 the Python bindings of TensorRT 10.13 read
every element of a field as its first, so an array or a text would not survive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, KV_CACHE_DTYPES, DType
from paged_trt.plugins.errors import ConfigError, SpecMismatchError
from paged_trt.plugins.fields import (
    ABI_VERSION,
    FLOAT_ATTRIBUTES,
    INT_ATTRIBUTES,
    OperatorSpec,
)
from paged_trt.plugins.launch.plans import (
    AttentionPlan,
    Balanced,
    Cluster,
    Counter,
    Direct,
    Gather,
    SplitKv,
)
from paged_trt.plugins.operands import LAYOUTS, InputLayout
from paged_trt.plugins.trt import Route

ABI_FIELD: Final = "abi_version"
PLAN_FIELDS: Final = ("attention_plan", "partition_tokens", "threshold_tokens")
CODE_FIELDS: Final = ("activation_dtype", "kv_cache_dtype", "route", *PLAN_FIELDS)
SERIALIZED_FIELDS: Final = (ABI_FIELD, *INT_ATTRIBUTES, *FLOAT_ATTRIBUTES, *CODE_FIELDS)
"""Names of the fields in a plan; a change needs a new ABI_VERSION."""

_ROUTE_CODES: Final = {Route.PLUGIN: 0, Route.GQA: 1}
_AUTO, _DIRECT, _SPLIT, _CLUSTER, _COUNTER, _BALANCED, _GATHER = range(7)
"""Codes of `attention_plan`; append only, as all codes of a plan. What shares keys among blocks
has their number in `partition_tokens`."""
_BLOCK_CODES: Final[dict[int, type[Cluster] | type[Counter]]] = {
    _CLUSTER: Cluster,
    _COUNTER: Counter,
}
_PLAIN_CODES: Final[dict[int, AttentionPlan | None]] = {
    _AUTO: None,
    _DIRECT: Direct(),
    _BALANCED: Balanced(),
    _GATHER: Gather(),
}

FieldArray = npt.NDArray[np.int32] | npt.NDArray[np.float32]
FieldValue = int | float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One plugin instance; valid by construction.

    Attributes:
        operator: pool and attention of the node.
        activation_dtype: type of query, key, value and output.
        kv_cache_dtype: type of both pools.
        attention_plan: the user's plan; None leaves the choice to the planner.
        route: how the parser found the plugin, which fixes the input layout.

    Raises:
        ConfigError: a type cannot serve its purpose.
    """

    operator: OperatorSpec
    activation_dtype: DType
    kv_cache_dtype: DType
    attention_plan: AttentionPlan | None
    route: Route

    def __post_init__(self) -> None:
        if self.activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(f"no kernel computes in {self.activation_dtype.value}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"no KV pool holds {self.kv_cache_dtype.value}")

    @property
    def layout(self) -> InputLayout:
        """Which plugin input carries each operand."""
        return LAYOUTS[self.route]

    def to_fields(self) -> dict[str, FieldArray]:
        """Arrays of SERIALIZED_FIELDS, one element each."""
        values: dict[str, FieldValue] = {
            ABI_FIELD: ABI_VERSION,
            **self.operator.to_fields(),
            "activation_dtype": self.activation_dtype.onnx,
            "kv_cache_dtype": self.kv_cache_dtype.onnx,
            "route": _ROUTE_CODES[self.route],
            **dict(zip(PLAN_FIELDS, _plan_codes(self.attention_plan), strict=True)),
        }
        return {name: _to_array(values[name]) for name in SERIALIZED_FIELDS}

    @classmethod
    def from_fields(cls, values: Mapping[str, FieldValue], *, where: str) -> PluginSpec:
        """Inverse of `to_fields`, from decoded values.

        Raises:
            SpecMismatchError: a name is missing or unknown, or the plan has another ABI.
            ConfigError: a value is invalid.
        """
        if set(SERIALIZED_FIELDS) != values.keys():
            missing = sorted(set(SERIALIZED_FIELDS) - values.keys())
            unknown = sorted(values.keys() - set(SERIALIZED_FIELDS))
            raise SpecMismatchError(
                "fields",
                f"the {len(SERIALIZED_FIELDS)} fields of ABI {ABI_VERSION}",
                f"missing {missing}, unknown {unknown}",
                where=where,
            )
        if values[ABI_FIELD] != ABI_VERSION:
            raise SpecMismatchError(ABI_FIELD, ABI_VERSION, values[ABI_FIELD], where=where)
        numbers = {name: values[name] for name in (*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES)}
        codes = {name: int(values[name]) for name in CODE_FIELDS}
        routes = {code: route for route, code in _ROUTE_CODES.items()}
        if codes["route"] not in routes:
            raise SpecMismatchError("route", f"one of {[*routes]}", codes["route"], where=where)
        return cls(
            operator=OperatorSpec.from_fields(numbers, where=where),
            activation_dtype=_dtype(codes, "activation_dtype", where),
            kv_cache_dtype=_dtype(codes, "kv_cache_dtype", where),
            attention_plan=_plan(codes, where),
            route=routes[codes["route"]],
        )


def _to_array(value: FieldValue) -> FieldArray:
    if isinstance(value, float):
        return np.array([value], dtype=np.float32)
    return np.array([value], dtype=np.int32)


def _plan_codes(plan: AttentionPlan | None) -> tuple[int, int, int]:
    if isinstance(plan, SplitKv):
        return _SPLIT, plan.partition_tokens, plan.threshold_tokens
    if isinstance(plan, Cluster | Counter):
        codes = {kind: code for code, kind in _BLOCK_CODES.items()}
        return codes[type(plan)], plan.blocks, 0
    return next(code for code, plain in _PLAIN_CODES.items() if plain == plan), 0, 0


def _plan(codes: Mapping[str, int], where: str) -> AttentionPlan | None:
    kind, partition, threshold = (codes[name] for name in PLAN_FIELDS)
    if kind == _SPLIT:
        return SplitKv(partition_tokens=partition, threshold_tokens=threshold)
    if kind in _BLOCK_CODES:
        return _BLOCK_CODES[kind](blocks=partition)
    if kind not in _PLAIN_CODES:
        known = sorted({_SPLIT, *_BLOCK_CODES, *_PLAIN_CODES})
        raise SpecMismatchError("attention_plan", f"one of {known}", kind, where=where)
    return _PLAIN_CODES[kind]


def _dtype(codes: Mapping[str, int], name: str, where: str) -> DType:
    try:
        return DType.from_onnx(codes[name])
    except KeyError:
        known = [dtype.onnx for dtype in DType]
        raise SpecMismatchError(name, f"one of {known}", codes[name], where=where) from None
