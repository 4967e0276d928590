"""What a survey finds in a model: the input of `resolve` and of the rewrite."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import onnx_ir as ir

from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import DType


class Dialect(enum.Enum):
    """How a model spells attention over a KV cache."""

    PAGED_ATTENTION = "paged_trt::PagedAttention"
    ATTENTION = "ai.onnx::Attention"
    GROUP_QUERY_ATTENTION = "com.microsoft::GroupQueryAttention"
    MULTI_HEAD_ATTENTION = "com.microsoft::MultiHeadAttention"
    RUNTIME_PAGED_ATTENTION = "com.microsoft::PagedAttention"


class Layout(enum.Enum):
    """How query, key, value and output are laid out; T tokens, H heads, D head size."""

    TOKENS = "tokens"
    """`[T, H, D]`, as PagedAttention takes them."""
    HEADS = "heads"
    """`[1, H, T, D]`."""
    FLAT = "flat"
    """`[1, T, H * D]`."""
    PACKED = "packed"
    """Query, key and value side by side, `[1, T, (H + 2 * H_kv) * D]`; output FLAT."""


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMS norm of each head before the rotary embedding.

    Attributes:
        weight: `[head_dim]`.
        epsilon: added to the mean square.
    """

    weight: ir.Value
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class LayerMatch:
    """One attention layer of a model.

    Attributes:
        node: the node that PagedAttention replaces.
        attention: its geometry.
        layout: of `query`, `key`, `value` and of the node's first output.
        query: of the new tokens; all three of them with Layout.PACKED.
        key: of the new tokens; `query` with Layout.PACKED.
        value: likewise.
        caches: graph inputs that hold past keys and past values.
        presents: values that hold past and new keys, and values; graph outputs, if at all.
        rope_tables: cosine and sine, `[max_positions, rotary_dim / 2]` each, or the one table
            of a PagedAttention node.
        sinks: `[num_q_heads]`, a constant.
        kv_layout: of `key` and `value`, where it is another than `layout`.
        head_norms: of query and key, where the node norms them itself.
        step_inputs: graph inputs that only this dialect's attention reads: they go with it.
        has_batch_axis: whether the model's activations lead with a batch axis; without it,
            FLAT and PACKED are `[T, width]`.
    """

    node: ir.Node
    attention: AttentionSpec
    layout: Layout
    query: ir.Value
    key: ir.Value
    value: ir.Value
    caches: tuple[ir.Value, ir.Value]
    presents: tuple[ir.Value, ir.Value]
    rope_tables: tuple[ir.Value, ...] = ()
    sinks: ir.Value | None = None
    kv_layout: Layout | None = None
    head_norms: tuple[HeadNorm, HeadNorm] | None = None
    step_inputs: tuple[ir.Value, ...] = ()
    has_batch_axis: bool = True


class IndexKind(enum.Enum):
    """What a value computed from cache lengths turned out to be for a batch of one."""

    CONSTANT = "constant"
    NUM_TOKENS = "num_tokens"
    POSITIONS = "positions"


@dataclass(frozen=True, kw_only=True)
class IndexValue:
    """A value computed from the cache length, whose meaning was found by evaluation.

    Attributes:
        value: the value in the model.
        kind: what it is.
        array: the constant, or an array that shows shape and type.
        token_axis: axis of the tokens with IndexKind.POSITIONS.
    """

    value: ir.Value
    kind: IndexKind
    array: object
    token_axis: int = 0


@dataclass(frozen=True, kw_only=True)
class PositionLimit:
    """Positions that a table of the model, or a proof about it, reaches.

    Attributes:
        name: the table, or the mask that was proved.
        positions: how many, from 0.
    """

    name: str
    positions: int


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What `survey` found out about a model.

    Attributes:
        dialect: how attention is spelt.
        layers: attention of each layer, in graph order.
        activation_dtype: type of the KV cache, so of query, key and value.
        kv_cache_dtype: type of the pools of a paged model, `activation_dtype` of any other.
        vocab_size: last dim of the logits.
        logits_dtype: type of the logits.
        reads_position_ids: whether the paged model needs `position_ids`.
        position_limits: tables that end, and lengths up to which masks were proved.
        last_tokens_only: whether the model itself keeps one row per sequence.
        matches: where the layers are.
        index_values: what to put in place of values computed from the cache length.
        logits: the value that becomes the output `logits`.
    """

    dialect: Dialect
    layers: tuple[AttentionSpec, ...]
    activation_dtype: DType
    kv_cache_dtype: DType
    vocab_size: int
    logits_dtype: DType
    reads_position_ids: bool
    position_limits: tuple[PositionLimit, ...] = ()
    last_tokens_only: bool = False
    matches: tuple[LayerMatch, ...] = ()
    index_values: tuple[IndexValue, ...] = ()
    logits: ir.Value | None = None

    @property
    def has_batch_axis(self) -> bool:
        """Whether token ids and logits of the model lead with a batch axis."""
        return all(found.has_batch_axis for found in self.matches)
