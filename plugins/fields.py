"""Specs to and from the op's attributes: ONNX node attributes and plugin fields alike.

One table names every attribute, so that an attribute is never dropped on one side only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from paged_trt.plugins.attention import AttentionSpec, Rope
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.kv import KvPoolSpec

OP_DOMAIN: Final = "paged_trt"
"""ONNX domain and plugin namespace."""
OP_TYPE: Final = "PagedAttention"
OP_VERSION: Final = "1"
ABI_VERSION: Final = 3
"""Version of the plugin's serialized fields, its input order and its workspace."""

INT_ATTRIBUTES: Final = (
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "value_head_dim",
    "num_pages",
    "max_pages_per_seq",
    "max_batch_size",
    "window",
    "rope",
    "rotary_dim",
)
FLOAT_ATTRIBUTES: Final = ("softmax_scale", "softcap")
STRING_ATTRIBUTES: Final = ("plugin_version", "plugin_namespace")
"""The ONNX parser finds the plugin by these two; without them it inlines the function."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """What one PagedAttention node knows: the pool it works on and its attention.

    `pool` is padded: the op knows the table width, not the user's exact capacity.
    """

    pool: KvPoolSpec
    attention: AttentionSpec

    def __post_init__(self) -> None:
        if self.pool != self.pool.padded():
            object.__setattr__(self, "pool", self.pool.padded())

    def to_fields(self) -> dict[str, int | float]:
        """Numeric attributes in the order of INT_ATTRIBUTES, then FLOAT_ATTRIBUTES."""
        source = {name: getattr(self.attention, name, None) for name in INT_ATTRIBUTES}
        for name in ("num_pages", "max_pages_per_seq", "max_batch_size"):
            source[name] = getattr(self.pool, name)
        fields: dict[str, int | float] = {name: int(source[name]) for name in INT_ATTRIBUTES}  # type: ignore[arg-type]
        fields |= {name: float(getattr(self.attention, name)) for name in FLOAT_ATTRIBUTES}
        return fields

    def to_attributes(self) -> dict[str, int | float | str]:
        """Attributes of the ONNX node."""
        return {
            **self.to_fields(),
            "plugin_version": OP_VERSION,
            "plugin_namespace": OP_DOMAIN,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, int | float], *, where: str) -> OperatorSpec:
        """Inverse of `to_fields`.

        Args:
            fields: exactly the numeric attributes.
            where: who asks, for the message.

        Raises:
            SpecMismatchError: a name is missing or unknown.
            ConfigError: a value is invalid.
        """
        names = {*INT_ATTRIBUTES, *FLOAT_ATTRIBUTES}
        if names != fields.keys():
            missing, unknown = sorted(names - fields.keys()), sorted(fields.keys() - names)
            raise SpecMismatchError(
                "attributes",
                f"the {len(names)} attributes of {OP_TYPE}",
                f"missing {missing}, unknown {unknown}",
                where=where,
            )
        ints = {name: int(fields[name]) for name in INT_ATTRIBUTES}
        pool = KvPoolSpec.from_table_width(
            num_pages=ints["num_pages"],
            max_batch_size=ints["max_batch_size"],
            max_pages_per_seq=ints["max_pages_per_seq"],
        )
        attention = AttentionSpec(
            num_q_heads=ints["num_q_heads"],
            num_kv_heads=ints["num_kv_heads"],
            head_dim=ints["head_dim"],
            value_head_dim=ints["value_head_dim"],
            softmax_scale=float(fields["softmax_scale"]),
            window=ints["window"],
            softcap=float(fields["softcap"]),
            rope=_rope(ints["rope"], where),
            rotary_dim=ints["rotary_dim"],
        )
        return cls(pool=pool, attention=attention)

    def require_equal(self, other: OperatorSpec, *, where: str) -> None:
        """Raise with the first field in which `other` differs.

        Raises:
            SpecMismatchError: the two differ.
        """
        mine, theirs = self.to_fields(), other.to_fields()
        for name, value in mine.items():
            if value != theirs[name]:
                raise SpecMismatchError(name, value, theirs[name], where=where)


def _rope(value: int, where: str) -> Rope:
    try:
        return Rope(value)
    except ValueError:
        raise SpecMismatchError("rope", [rope.value for rope in Rope], value, where=where) from None
