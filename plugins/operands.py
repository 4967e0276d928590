"""The op's eleven inputs as a plugin receives them, and the check of their dims.

T token rows, N sequence rows, M page-table width; Hq query heads, Hkv key heads, D and Dv
elements of a key and a value head.

On the plugin route the eleven inputs arrive as they are. On the GQA route nine arrive: query,
key and value have rank 3 `[1, T, heads * dim]` with key and value padded to one width, and two
inputs carry two operands each, one behind the other: `[past_lens | query_start_offsets]`
`[2N+1]` and `[kv_scales | sinks]` `[2*Hkv + Hq]`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from paged_trt.plugins.attention import Rope
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.plugins.fields import OperatorSpec
from paged_trt.plugins.trt import Route

Dims = tuple[int, ...]


class Operand(enum.IntEnum):
    """Inputs of the op, in the order of the contract."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    KEY_POOL = 3
    VALUE_POOL = 4
    PAGE_TABLE = 5
    QUERY_START_OFFSETS = 6
    PAST_LENS = 7
    ROPE_COS_SIN = 8
    KV_SCALES = 9
    SINKS = 10


class Output(enum.IntEnum):
    """Outputs of the op; the two pools alias the inputs of `ALIASES`."""

    OUTPUT = 0
    KEY_POOL = 1
    VALUE_POOL = 2


ALIASES: Final = {
    Output.KEY_POOL: Operand.KEY_POOL,
    Output.VALUE_POOL: Operand.VALUE_POOL,
}
"""Both layouts keep the pools at the places of the contract."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of one step: the only thing that the host knows about it.

    Attributes:
        num_tokens: T.
        num_seqs: N.
        table_width: M.
    """

    num_tokens: int
    num_seqs: int
    table_width: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputLayout:
    """Which plugin input carries each operand.

    Attributes:
        names: what each plugin input carries, for messages.
        index: plugin input of each operand, in the order of `Operand`.
        is_packed: whether query, key and value have rank 3 and small operands share an input.
    """

    names: tuple[str, ...]
    index: tuple[int, ...]
    is_packed: bool

    def element_offset(self, operand: Operand, spec: OperatorSpec, num_seqs: int) -> int:
        """Elements between the start of the plugin input and the operand."""
        if not self.is_packed:
            return 0
        if operand is Operand.QUERY_START_OFFSETS:
            return num_seqs
        return 2 * spec.attention.num_kv_heads if operand is Operand.SINKS else 0

    def token_stride(self, operand: Operand, spec: OperatorSpec) -> int:
        """Elements between two token rows of query, key or value."""
        attention = spec.attention
        if operand is Operand.QUERY:
            return attention.num_q_heads * attention.head_dim
        key_width, value_width = attention.head_dim, attention.value_head_dim
        if self.is_packed:
            key_width = value_width = max(key_width, value_width)
        return attention.num_kv_heads * (key_width if operand is Operand.KEY else value_width)


_ALL_NAMES: Final = tuple(operand.name.lower() for operand in Operand)
LAYOUTS: Final = {
    Route.PLUGIN: InputLayout(names=_ALL_NAMES, index=tuple(Operand), is_packed=False),
    Route.GQA: InputLayout(
        names=(
            *_ALL_NAMES[: Operand.PAGE_TABLE],
            "past_lens+query_start_offsets",
            "page_table",
            "rope_cos_sin",
            "kv_scales+sinks",
        ),
        index=(0, 1, 2, 3, 4, 6, 5, 5, 7, 8, 8),
        is_packed=True,
    ),
}
"""Layout of each route; a change needs a new ABI_VERSION."""


def input_dtypes(layout: InputLayout, activation: DType, kv_cache: DType) -> tuple[DType, ...]:
    """Element type of each plugin input."""
    by_operand = (
        *(activation,) * 3,
        *(kv_cache,) * 2,
        *(DType.INT32,) * 3,
        *(DType.FLOAT32,) * 3,
    )
    found = dict(zip(layout.index, by_operand, strict=True))
    return tuple(found[index] for index in range(len(layout.names)))


def output_dims(layout: InputLayout, spec: OperatorSpec, num_tokens: int) -> Dims:
    """Dims of output 0: `[T, Hq, Dv]`, or `[1, T, Hq*Dv]` where inputs are packed."""
    attention = spec.attention
    if layout.is_packed:
        return (1, num_tokens, attention.num_q_heads * attention.value_head_dim)
    return (num_tokens, attention.num_q_heads, attention.value_head_dim)


def check_input_dims(
    layout: InputLayout, spec: OperatorSpec, dims: Sequence[Dims], *, where: str
) -> StepShape:
    """Check the dims of every plugin input and give the sizes of the step.

    Args:
        layout: which input carries what.
        spec: geometry of the node.
        dims: actual dims, or one bound of a profile, of each plugin input.
        where: the hop and the node, for messages.

    Raises:
        SpecMismatchError: an input does not have the dims that the spec asks for.
    """
    if len(dims) != len(layout.names):
        raise SpecMismatchError("inputs", len(layout.names), len(dims), where=where)
    step = _step_shape(layout, dims, where)
    for name, limit, value in (
        ("num_seqs", spec.pool.max_batch_size, step.num_seqs),
        ("table_width", spec.pool.max_pages_per_seq, step.table_width),
    ):
        if not 1 <= value <= limit:
            raise SpecMismatchError(name, f"from 1 to {limit}", value, where=where)
    _check_rope(spec, dims[layout.index[Operand.ROPE_COS_SIN]], where)
    for index, want in _expected_dims(layout, spec, step).items():
        if dims[index] != want:
            raise SpecMismatchError(f"{layout.names[index]}.dims", want, dims[index], where=where)
    return step


def _step_shape(layout: InputLayout, dims: Sequence[Dims], where: str) -> StepShape:
    query, table = dims[0], dims[layout.index[Operand.PAGE_TABLE]]
    if len(query) != 3:
        raise SpecMismatchError("query.rank", 3, len(query), where=where)
    if len(table) != 2:
        raise SpecMismatchError("page_table.rank", 2, len(table), where=where)
    return StepShape(
        num_tokens=query[1 if layout.is_packed else 0], num_seqs=table[0], table_width=table[1]
    )


def _expected_dims(layout: InputLayout, spec: OperatorSpec, step: StepShape) -> dict[int, Dims]:
    """Dims of every plugin input but the rope table, by index."""
    attention, pool = spec.attention, spec.pool
    tokens, num_seqs = step.num_tokens, step.num_seqs
    num_kv_heads, num_q_heads = attention.num_kv_heads, attention.num_q_heads
    by_operand: dict[Operand, Dims] = {
        Operand.KEY_POOL: pool.pool_shape(num_kv_heads, attention.head_dim),
        Operand.VALUE_POOL: pool.pool_shape(num_kv_heads, attention.value_head_dim),
        Operand.PAGE_TABLE: (num_seqs, step.table_width),
    }
    if layout.is_packed:
        for operand in (Operand.QUERY, Operand.KEY, Operand.VALUE):
            by_operand[operand] = (1, tokens, layout.token_stride(operand, spec))
        by_operand[Operand.PAST_LENS] = (2 * num_seqs + 1,)
        by_operand[Operand.KV_SCALES] = (2 * num_kv_heads + num_q_heads,)
    else:
        by_operand[Operand.QUERY] = (tokens, num_q_heads, attention.head_dim)
        by_operand[Operand.KEY] = (tokens, num_kv_heads, attention.head_dim)
        by_operand[Operand.VALUE] = (tokens, num_kv_heads, attention.value_head_dim)
        by_operand[Operand.QUERY_START_OFFSETS] = (num_seqs + 1,)
        by_operand[Operand.PAST_LENS] = (num_seqs,)
        by_operand[Operand.KV_SCALES] = (2, num_kv_heads)
        by_operand[Operand.SINKS] = (num_q_heads,)
    return {layout.index[operand]: dims for operand, dims in by_operand.items()}


def _check_rope(spec: OperatorSpec, dims: Dims, where: str) -> None:
    attention = spec.attention
    if attention.rope is Rope.NONE:
        if dims != (1, 2, 1):
            raise SpecMismatchError("rope_cos_sin.dims", (1, 2, 1), dims, where=where)
        return
    if len(dims) != 3 or dims[1:] != (2, attention.rotary_dim // 2):
        want = ("max_positions", 2, attention.rotary_dim // 2)
        raise SpecMismatchError("rope_cos_sin.dims", want, dims, where=where)
    # The node knows its capacity in whole pages: a table that ends inside the last one is fine.
    if not spec.pool.covers_table(dims[0]):
        want_pages = f"positions of at least {spec.pool.max_pages_per_seq} pages"
        raise SpecMismatchError(
            "rope_cos_sin.dims", want_pages, f"{dims[0]} positions", where=where
        )


def operand_places(
    layout: InputLayout, operator: OperatorSpec, dtypes: Sequence[DType], num_seqs: int
) -> list[tuple[int, int]]:
    """Plugin input and byte offset of each operand, in the order of `Operand`.

    Args:
        layout: which input carries which operand.
        operator: geometry of the layer.
        dtypes: of the inputs.
        num_seqs: N of the step.
    """
    places = []
    for operand in Operand:
        index = layout.index[operand]
        offset = layout.element_offset(operand, operator, num_seqs)
        places.append((index, offset * dtypes[index].itemsize if offset else 0))
    return places
