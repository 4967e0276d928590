"""What a user asks for, and how it becomes the specs that every later stage reads.

`BuildConfig` is the only place that holds "not given". `resolve` ends that: what comes out is
an `EngineSpec`, valid by construction.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from paged_trt.builder.onnx.facts import ModelFacts
from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, KV_CACHE_DTYPES, DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import INT32_MAX, MAX_KV_CACHE_CAPACITY, KvPoolSpec
from paged_trt.plugins.tensors import EngineSpec, LogitsMode, kv_scales_name

AUTO: Final = "auto"
"""KV cache type of the model's own activations."""


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """User input of a build; `resolve` checks it.

    Attributes:
        max_batch_size: sequence rows of one step.
        max_input_len: longest prompt, tokens.
        max_kv_cache_capacity: tokens that one sequence may hold, prompt and answer.
        max_num_tokens: most token rows of one step; None for `max_input_len`.
        retained_pages: pages on top of the minimum, for reuse across requests.
        kv_pool_pages: the whole page count, instead of `retained_pages`.
        kv_cache_dtype: `auto`, or the type of the pools.
        kv_scales: safetensors file of the scales, for a quantised pool.
        logits: which token rows get logits.
        dtype: type to convert the model to; None keeps its own.
        attention_plan: explicit plan of the attention kernels; None lets the planner decide.
        greedy_in_engine: let the engine choose the next tokens too.
        layer_outputs: also give the attention output of each layer, for comparisons.
        float16_sums: let TensorRT sum float16 products in float16, which is its own choice.
    """

    max_batch_size: int
    max_input_len: int
    max_kv_cache_capacity: int
    max_num_tokens: int | None = None
    retained_pages: int | None = None
    kv_pool_pages: int | None = None
    kv_cache_dtype: DType | str = AUTO
    kv_scales: Path | None = None
    logits: LogitsMode | str = LogitsMode.LAST
    dtype: DType | str | None = None
    attention_plan: str | None = None
    greedy_in_engine: bool = False
    layer_outputs: bool = False
    float16_sums: bool = False


def resolve(config: BuildConfig, facts: ModelFacts) -> EngineSpec:
    """The engine that `config` asks for, of the model that `facts` describe.

    Raises:
        ConfigError: a value is invalid, or does not fit the model or another value.
    """
    for name in ("max_batch_size", "max_input_len", "max_kv_cache_capacity"):
        _require_count(name, getattr(config, name))
    for name in ("retained_pages", "kv_pool_pages", "max_num_tokens"):
        if getattr(config, name) is not None:
            _require_count(name, getattr(config, name), 0 if name == "retained_pages" else 1)
    _check_capacity(config, facts)
    activation = _activation_dtype(config, facts)
    return EngineSpec(
        pool=KvPoolSpec.plan(
            max_batch_size=config.max_batch_size,
            max_kv_cache_capacity=config.max_kv_cache_capacity,
            retained_pages=config.retained_pages,
            kv_pool_pages=config.kv_pool_pages,
        ),
        layers=facts.layers,
        activation_dtype=activation,
        kv_cache_dtype=_kv_cache_dtype(config, facts, activation),
        vocab_size=facts.vocab_size,
        # Logits that the model casts to another type on purpose keep that type.
        logits_dtype=(
            activation if facts.logits_dtype is facts.activation_dtype else facts.logits_dtype
        ),
        logits_mode=_logits_mode(config, facts),
        max_input_len=config.max_input_len,
        max_num_tokens=(
            config.max_input_len if config.max_num_tokens is None else config.max_num_tokens
        ),
        reads_position_ids=facts.reads_position_ids,
        greedy_in_engine=config.greedy_in_engine,
        layer_outputs=config.layer_outputs,
    )


def _require_count(name: str, value: object, minimum: int = 1) -> None:
    # bool and NumPy integers are refused: the first is a slip, the second wraps around.
    if type(value) is not int or not minimum <= value <= INT32_MAX:
        option = "--" + name.replace("_", "-")
        raise ConfigError(
            f"`{option}` must be an int from {minimum} to {INT32_MAX}, got {value!r} "
            f"({type(value).__name__})"
        )


def _check_capacity(config: BuildConfig, facts: ModelFacts) -> None:
    capacity = config.max_kv_cache_capacity
    if capacity > MAX_KV_CACHE_CAPACITY:
        raise ConfigError(
            f"`--max-kv-cache-capacity` {capacity} is over the limit of {MAX_KV_CACHE_CAPACITY}; "
            "lower it"
        )
    if config.max_input_len > capacity:
        raise ConfigError(
            f"`--max-input-len` {config.max_input_len} is over `--max-kv-cache-capacity` "
            f"{capacity}; lower the first or raise the second"
        )
    for limit in facts.position_limits:
        if limit.positions < capacity:
            raise ConfigError(
                f"`--max-kv-cache-capacity` {capacity} is over the {limit.positions} positions of "
                f"`{limit.name}`; lower it to {limit.positions}, or export the model for longer "
                "sequences"
            )


def _activation_dtype(config: BuildConfig, facts: ModelFacts) -> DType:
    if config.dtype is None:
        if facts.activation_dtype not in ACTIVATION_DTYPES:
            raise ConfigError(
                f"the model is {facts.activation_dtype.value}, and an engine computes in float16 "
                "or bfloat16; pass `--dtype float16` or `--dtype bfloat16`"
            )
        return facts.activation_dtype
    return _choice("--dtype", config.dtype, ACTIVATION_DTYPES)


def _kv_cache_dtype(config: BuildConfig, facts: ModelFacts, activation: DType) -> DType:
    if config.kv_cache_dtype == AUTO:
        # A paged model has chosen already; a cache in the model's own type follows `--dtype`.
        own = facts.kv_cache_dtype
        dtype = activation if own is facts.activation_dtype else own
    else:
        dtype = _choice("--kv-cache-dtype", config.kv_cache_dtype, KV_CACHE_DTYPES)
    if dtype.is_quantised and config.kv_scales is None:
        raise ConfigError(
            f"the {dtype.value} KV cache needs scales; make them with `paged-trt calibrate "
            f"MODEL.onnx -o FILE --kv-cache-dtype {dtype.value}` and pass `--kv-scales FILE` (one "
            f"tensor `{kv_scales_name(0)}` `[2, num_kv_heads]` per layer)"
        )
    if not dtype.is_quantised and config.kv_scales is not None:
        raise ConfigError(
            f"`--kv-scales` belongs to a float8 or int8 KV cache and this one is {dtype.value}; "
            "leave it out, or pass `--kv-cache-dtype float8`"
        )
    return dtype


def _logits_mode(config: BuildConfig, facts: ModelFacts) -> LogitsMode:
    mode = _choice("--logits", config.logits, frozenset(LogitsMode))
    if facts.last_tokens_only and mode is not LogitsMode.LAST:
        raise ConfigError(
            "the model itself keeps the logits of last tokens only; pass `--logits last`, or "
            "export it with all logits"
        )
    return mode


_Choice = TypeVar("_Choice", bound=enum.Enum)


def _choice(option: str, given: object, choices: frozenset[_Choice]) -> _Choice:
    for choice in choices:
        if given is choice or (isinstance(given, str) and given == choice.value):
            return choice
    names = ", ".join(sorted(choice.value for choice in choices))
    text = given.value if isinstance(given, enum.Enum) else given
    raise ConfigError(f"`{option}` must be one of {names}, got {text!r}")
