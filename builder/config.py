"""What a user asks for, and how it becomes the specs that every later stage reads.

`BuildConfig` is the only place that holds "not given". `resolve` ends that: what comes out is
an `EngineSpec`, valid by construction.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from paged_trt.builder.onnx.facts import ModelFacts
from paged_trt.plugins.attention import AttentionSpec
from paged_trt.plugins.dtypes import ACTIVATION_DTYPES, KV_CACHE_DTYPES, DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv import INT32_MAX, MAX_KV_CACHE_CAPACITY, KvPoolSpec
from paged_trt.plugins.tensors import EngineSpec, LogitsMode, kv_scales_name

AUTO: Final = "auto"
"""KV cache type of the model's own activations."""
_MAX_SCALES_BYTES: Final = 2**26


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
        kv_cache_dtype=_kv_cache_dtype(config, activation),
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
    )


def read_kv_scales(path: Path, layers: tuple[AttentionSpec, ...]) -> list[npt.NDArray[np.float32]]:
    """Scales of a quantised pool, `[2, num_kv_heads]` float32 per layer: key row, value row.

    Args:
        path: a safetensors file with one float32 tensor `kv_scales.{i}` per layer.
        layers: attention of each layer.

    Raises:
        ConfigError: the file cannot be read, or a tensor is missing, unknown, misshapen, of
            another type, or not positive and finite.
    """
    tensors = _read_safetensors(Path(path))
    names = [kv_scales_name(index) for index in range(len(layers))]
    missing = [name for name in names if name not in tensors]
    unknown = sorted(tensors.keys() - set(names))
    if missing or unknown:
        raise ConfigError(
            f"`{path}` must hold {len(names)} tensors, {names[0]} to {names[-1]}; missing "
            f"{missing[:3]}, unknown {unknown[:3]}; write one tensor per attention layer"
        )
    for name, layer in zip(names, layers, strict=True):
        _check_scales(path, name, tensors[name], layer)
    return [np.ascontiguousarray(tensors[name], np.float32) for name in names]


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


def _kv_cache_dtype(config: BuildConfig, activation: DType) -> DType:
    if config.kv_cache_dtype == AUTO:
        dtype = activation
    else:
        dtype = _choice("--kv-cache-dtype", config.kv_cache_dtype, KV_CACHE_DTYPES)
    if dtype.is_quantised and config.kv_scales is None:
        raise ConfigError(
            f"a {dtype.value} KV cache needs scales; pass `--kv-scales FILE.safetensors` with one "
            f"tensor `{kv_scales_name(0)}` `[2, num_kv_heads]` per layer"
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


def _read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    import safetensors
    import safetensors.numpy

    if not path.is_file():
        raise ConfigError(f"there is no file of KV scales at `{path}`; pass `--kv-scales FILE`")
    if path.stat().st_size > _MAX_SCALES_BYTES:
        raise ConfigError(
            f"`{path}` has {path.stat().st_size} bytes and scales need fewer than "
            f"{_MAX_SCALES_BYTES}; pass the file of the scales, not of the weights"
        )
    try:
        return dict(safetensors.numpy.load_file(path))
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise ConfigError(
            f"`{path}` is no safetensors file of float32 tensors ({error}); write it again"
        ) from error


def _check_scales(path: Path, name: str, scales: npt.NDArray[Any], layer: AttentionSpec) -> None:
    expected = (2, layer.num_kv_heads)
    if scales.dtype != np.float32 or scales.shape != expected:
        raise ConfigError(
            f"`{name}` in `{path}` must be float32 {list(expected)}, found {scales.dtype} "
            f"{list(scales.shape)}; write one key row and one value row of all KV heads"
        )
    if not (np.isfinite(scales) & (scales > 0)).all():
        odd = float(scales[~(np.isfinite(scales) & (scales > 0))][0])
        raise ConfigError(
            f"`{name}` in `{path}` holds {odd}, and scales must be positive and finite; "
            "calibrate them again"
        )
