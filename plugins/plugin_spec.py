"""Everything that one plugin instance is built from, and its form inside a plan."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Final, TypeVar

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
from paged_trt.plugins.launch.plans import parse_attention_plan
from paged_trt.plugins.operands import LAYOUTS, InputLayout
from paged_trt.plugins.trt import Route

ABI_FIELD: Final = "abi_version"
STRING_FIELDS: Final = ("activation_dtype", "kv_cache_dtype", "attention_plan", "route")
SERIALIZED_FIELDS: Final = (ABI_FIELD, *INT_ATTRIBUTES, *FLOAT_ATTRIBUTES, *STRING_FIELDS)
"""Names of the fields in a plan; a change needs a new ABI_VERSION."""

FieldArray = npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.int8]
FieldValue = int | float | str
_E = TypeVar("_E", bound=enum.Enum)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One plugin instance; valid by construction.

    Attributes:
        operator: pool and attention of the node.
        activation_dtype: type of query, key, value and output.
        kv_cache_dtype: type of both pools.
        attention_plan: text of `--attention-plan`; `auto` leaves the choice to the planner.
        route: how the parser found the plugin, which fixes the input layout.

    Raises:
        ConfigError: a value is invalid.
    """

    operator: OperatorSpec
    activation_dtype: DType
    kv_cache_dtype: DType
    attention_plan: str
    route: Route

    def __post_init__(self) -> None:
        if self.activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(f"no kernel computes in {self.activation_dtype.value}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"no KV pool holds {self.kv_cache_dtype.value}")
        parse_attention_plan(self.attention_plan)

    @property
    def layout(self) -> InputLayout:
        """Which plugin input carries each operand."""
        return LAYOUTS[self.route]

    def to_fields(self) -> dict[str, FieldArray]:
        """Arrays of SERIALIZED_FIELDS; a string is NUL-terminated int8."""
        values: dict[str, FieldValue] = {
            ABI_FIELD: ABI_VERSION,
            **self.operator.to_fields(),
            "activation_dtype": self.activation_dtype.value,
            "kv_cache_dtype": self.kv_cache_dtype.value,
            "attention_plan": self.attention_plan,
            "route": self.route.value,
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
        numbers = {
            name: value
            for name, value in values.items()
            if name in (*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES) and not isinstance(value, str)
        }
        return cls(
            operator=OperatorSpec.from_fields(numbers, where=where),
            activation_dtype=_enum(DType, values, "activation_dtype", where),
            kv_cache_dtype=_enum(DType, values, "kv_cache_dtype", where),
            attention_plan=str(values["attention_plan"]),
            route=_enum(Route, values, "route", where),
        )


def _to_array(value: FieldValue) -> FieldArray:
    if isinstance(value, str):
        return np.frombuffer(value.encode() + b"\0", dtype=np.int8)
    if isinstance(value, float):
        return np.array([value], dtype=np.float32)
    return np.array([value], dtype=np.int32)


def _enum(kind: type[_E], values: Mapping[str, FieldValue], name: str, where: str) -> _E:
    try:
        return kind(values[name])
    except ValueError:
        known = [member.value for member in kind]
        raise SpecMismatchError(name, f"one of {known}", values[name], where=where) from None
