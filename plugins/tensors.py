"""The tensors of an engine: one table, built from the specs, that all hops read.

The rewrite writes these names and dims into the model, the profiles take their bounds
from them, the manifest stores them, and the load check compares an engine with them.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from paged_trt.plugins.attention import FULL_WINDOW, AttentionSpec
from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, KV_CACHE_DTYPES, DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import INT32_MAX, KvPoolSpec

NUM_TOKENS: Final = "num_tokens"
"""T: token rows of a step over all sequences."""
NUM_SEQS: Final = "num_seqs"
"""N: sequence rows of a step."""
NUM_SEQS_PLUS_1: Final = "num_seqs_plus_1"
TABLE_WIDTH: Final = "table_width"
"""M: page-table width of a step."""

INPUT_IDS: Final = "input_ids"
POSITION_IDS: Final = "position_ids"
PAGE_TABLE: Final = "page_table"
QUERY_START_OFFSETS: Final = "query_start_offsets"
PAST_LENS: Final = "past_lens"
LOGITS: Final = "logits"
NEXT_TOKENS: Final = "next_tokens"
NO_NEXT_TOKEN: Final = -1
"""Entry of `next_tokens` whose row of logits holds NaN."""

Dim = int | str


class Role(enum.Enum):
    """What a tensor of the engine is for."""

    STEP_INPUT = "step_input"
    POOL_INPUT = "pool_input"
    SCALES = "scales"
    RESULT = "result"
    LAYER_OUTPUT = "layer_output"
    POOL_OUTPUT = "pool_output"

    @property
    def is_input(self) -> bool:
        """Whether the engine reads the tensor."""
        return self in {Role.STEP_INPUT, Role.POOL_INPUT, Role.SCALES}


class LogitsMode(enum.Enum):
    """Which token rows get logits."""

    LAST = "last"
    ALL = "all"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One engine tensor; a dim is a number or one of the symbols of this module."""

    name: str
    role: Role
    dtype: DType
    dims: tuple[Dim, ...]
    alias_of: str | None = None


def key_pool_name(layer: int) -> str:
    """Input that holds the keys of `layer`."""
    return f"key_pool.{layer}"


def value_pool_name(layer: int) -> str:
    """Input that holds the values of `layer`."""
    return f"value_pool.{layer}"


def pool_output_name(pool_input: str) -> str:
    """Output that aliases `pool_input`: `key_pool.3` -> `key_pool_out.3`."""
    kind, layer = pool_input.split(".")
    return f"{kind}_out.{layer}"


def attention_name(layer: int) -> str:
    """Output that holds what attention of `layer` gives: `[T, num_q_heads, value_head_dim]`."""
    return f"attention.{layer}"


def kv_scales_name(layer: int) -> str:
    """Input that holds the scales of `layer`, `[2, num_kv_heads]` float32."""
    return f"kv_scales.{layer}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything that fixes the interface of an engine; valid by construction.

    Attributes:
        pool: page geometry, one for all layers.
        layers: attention of each layer, in order.
        activation_dtype: type of query, key, value and output.
        kv_cache_dtype: type of the pools.
        vocab_size: last dim of the logits.
        logits_dtype: type of the logits.
        logits_mode: which rows get logits.
        max_input_len: longest prompt, tokens.
        max_num_tokens: most token rows of one step; longer prompts are prefilled in chunks.
        reads_position_ids: whether the model has a `position_ids` input.
        greedy_in_engine: whether the engine chooses the next tokens too, as `next_tokens`
            `[num_seqs]` int64 beside the logits of last tokens.
        layer_outputs: whether the engine also gives the attention output of each layer, for
            comparisons.

    Raises:
        ConfigError: a value is invalid or two do not fit together.
    """

    pool: KvPoolSpec
    layers: tuple[AttentionSpec, ...]
    activation_dtype: DType
    kv_cache_dtype: DType
    vocab_size: int
    logits_dtype: DType
    logits_mode: LogitsMode
    max_input_len: int
    max_num_tokens: int
    reads_position_ids: bool
    greedy_in_engine: bool = False
    layer_outputs: bool = False

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a paged model needs at least one attention layer, found 0")
        if self.activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(
                f"activations must be float16 or bfloat16, got {self.activation_dtype.value}"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                "the KV cache must be float16, bfloat16, float8 or int8, "
                f"got {self.kv_cache_dtype.value}"
            )
        for name in ("vocab_size", "max_input_len", "max_num_tokens"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= INT32_MAX:
                raise ConfigError(f"`{name}` must be a positive int32, got {value!r}")
        if self.max_token_rows > INT32_MAX:
            raise ConfigError(
                f"max_num_tokens={self.max_num_tokens} makes steps of {self.max_token_rows} token "
                f"rows, over int32's {INT32_MAX}; lower it"
            )
        if self.max_input_len > self.pool.max_kv_cache_capacity:
            raise ConfigError(
                f"max_input_len={self.max_input_len} is over "
                f"max_kv_cache_capacity={self.pool.max_kv_cache_capacity}; lower the first "
                "or raise the second"
            )
        if self.greedy_in_engine and self.logits_mode is not LogitsMode.LAST:
            raise ConfigError(
                "`next_tokens` come of the logits of last tokens, and the engine gives logits of "
                "all tokens; build with `--logits last`, or without `--greedy-in-engine`"
            )

    @property
    def max_token_rows(self) -> int:
        """Most rows of T: `max_num_tokens`, a decode step of every slot, and one row more.

        The extra row keeps a prefill step from looking like a decode step: T == N is the
        decode encoding, so a prefill step that would have T == N gets one padding row.
        """
        return max(self.max_num_tokens, self.pool.max_batch_size) + 1

    @property
    def widest_window(self) -> int:
        """Window of the layer that sees most; FULL_WINDOW where one layer sees everything."""
        windows = [layer.window for layer in self.layers]
        return FULL_WINDOW if FULL_WINDOW in windows else max(windows)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensor table: inputs in binding order, then outputs."""
        return (*self._step_inputs(), *self._layer_inputs(), *self._outputs())

    def pools(self) -> tuple[TensorSpec, ...]:
        """The pool inputs, keys before values, layer by layer."""
        return tuple(t for t in self._layer_inputs() if t.role is Role.POOL_INPUT)

    def pool_bytes(self) -> int:
        """Bytes of all pools of all layers."""
        total = 0
        for tensor in self.pools():
            size = tensor.dtype.itemsize
            for dim in tensor.dims:
                size *= int(dim)
            total += size
        return total

    def layer_output_bytes(self) -> int:
        """Bytes of the attention outputs of the largest step; 0 where the engine has none."""
        elements = sum(layer.num_q_heads * layer.value_head_dim for layer in self.layers)
        per_row = elements * self.activation_dtype.itemsize
        return self.max_token_rows * per_row if self.layer_outputs else 0

    def _step_inputs(self) -> list[TensorSpec]:
        def step(name: str, dtype: DType, *dims: Dim) -> TensorSpec:
            return TensorSpec(name=name, role=Role.STEP_INPUT, dtype=dtype, dims=dims)

        inputs = [step(INPUT_IDS, DType.INT64, 1, NUM_TOKENS)]
        if self.reads_position_ids:
            inputs.append(step(POSITION_IDS, DType.INT64, 1, NUM_TOKENS))
        return [
            *inputs,
            step(PAGE_TABLE, DType.INT32, NUM_SEQS, TABLE_WIDTH),
            step(QUERY_START_OFFSETS, DType.INT32, NUM_SEQS_PLUS_1),
            step(PAST_LENS, DType.INT32, NUM_SEQS),
        ]

    def _layer_inputs(self) -> list[TensorSpec]:
        tensors = []
        for index, layer in enumerate(self.layers):
            for name, head_dim in (
                (key_pool_name(index), layer.head_dim),
                (value_pool_name(index), layer.value_head_dim),
            ):
                tensors.append(
                    TensorSpec(
                        name=name,
                        role=Role.POOL_INPUT,
                        dtype=self.kv_cache_dtype,
                        dims=self.pool.pool_shape(layer.num_kv_heads, head_dim),
                    )
                )
            if self.kv_cache_dtype.is_quantised:
                tensors.append(
                    TensorSpec(
                        name=kv_scales_name(index),
                        role=Role.SCALES,
                        dtype=DType.FLOAT32,
                        dims=(2, layer.num_kv_heads),
                    )
                )
        return tensors

    def _outputs(self) -> list[TensorSpec]:
        rows: tuple[Dim, ...] = (
            (NUM_SEQS, self.vocab_size)
            if self.logits_mode is LogitsMode.LAST
            else (1, NUM_TOKENS, self.vocab_size)
        )
        logits = TensorSpec(name=LOGITS, role=Role.RESULT, dtype=self.logits_dtype, dims=rows)
        pools = [
            dataclasses.replace(
                pool,
                name=pool_output_name(pool.name),
                role=Role.POOL_OUTPUT,
                alias_of=pool.name,
            )
            for pool in self.pools()
        ]
        tokens = TensorSpec(name=NEXT_TOKENS, role=Role.RESULT, dtype=DType.INT64, dims=(NUM_SEQS,))
        results = [logits, tokens] if self.greedy_in_engine else [logits]
        return [*results, *self._layer_outputs(), *pools]

    def _layer_outputs(self) -> list[TensorSpec]:
        return [
            TensorSpec(
                name=attention_name(index),
                role=Role.LAYER_OUTPUT,
                dtype=self.activation_dtype,
                dims=(NUM_TOKENS, layer.num_q_heads, layer.value_head_dim),
            )
            for index, layer in enumerate(self.layers if self.layer_outputs else ())
        ]
