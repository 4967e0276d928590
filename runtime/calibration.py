"""Scales of a quantised pool, from the keys and values that prompts really leave in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError, ExecutionError
from paged_trt.plugins.tensors import key_pool_name, kv_scales_name, value_pool_name
from paged_trt.runtime.comparison import SequenceResult, Tolerance, compare_sequence
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.session import Session

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
LARGEST: Final = {DType.FLOAT8: 448.0, DType.INT8: 127.0}
"""Largest number that a type stores."""
SILENT_MAXIMUM: Final = 1.0
"""Taken for a head that never held anything but zeros: its scale must be positive."""


class ReadableExecutor(Executor, Protocol):
    """An executor whose pools the host can read."""

    def pool(self, name: str) -> Array:
        """A pool `[num_pages, num_kv_heads, 128, head_dim]` by its input name."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadMaxima:
    """Largest magnitudes that were stored, per layer.

    Attributes:
        layers: `[2, num_kv_heads]` float32 of each layer: keys, values.
        num_tokens: tokens that were stored.
    """

    layers: tuple[Floats, ...]
    num_tokens: int


def collect_maxima(
    executor: ReadableExecutor, prompts: Sequence[Sequence[int]], *, num_new_tokens: int
) -> HeadMaxima:
    """Run prompts and their greedy continuations, and look into the pools after each.

    Keys are read as they are stored: after rope, wherever the model applies it.

    Args:
        executor: with pools that are not quantised.
        prompts: token ids of each prompt.
        num_new_tokens: tokens to generate for each.

    Raises:
        ConfigError: the pools are quantised.
        SequenceError: a prompt does not fit.
        ExecutionError: the model failed, or stored a number that is none.
    """
    spec = executor.spec
    if spec.kv_cache_dtype.is_quantised:
        raise ConfigError(
            f"maxima are read from a pool that is not quantised, and this one is "
            f"{spec.kv_cache_dtype.value}; pass the model that the engine was built from"
        )
    found = [np.zeros((2, layer.num_kv_heads), np.float32) for layer in spec.layers]
    num_tokens = 0
    for prompt in prompts:
        # Pages of earlier prompts may be written over: nothing of them is lost by now.
        session = Session(executor)
        (generation,) = session.generate([prompt], num_new_tokens)
        # The last token is never fed back.
        num_tokens += len(prompt) + len(generation.tokens) - 1
        for index, maxima in enumerate(found):
            for row, name in enumerate((key_pool_name(index), value_pool_name(index))):
                np.maximum(maxima[row], _head_maxima(executor.pool(name), name), out=maxima[row])
    return HeadMaxima(layers=tuple(found), num_tokens=num_tokens)


def _head_maxima(pool: Array, name: str) -> Floats:
    """Largest magnitude of each head, `[num_kv_heads]`."""
    maxima: Floats = np.abs(pool.astype(np.float32)).max(axis=(0, 2, 3))
    if not np.isfinite(maxima).all():
        head = int(np.flatnonzero(~np.isfinite(maxima))[0])
        raise ExecutionError(
            f"`{name}` holds {maxima[head]} in head {head}, and no scale covers that; the model "
            "overflows its type: convert it with `--dtype bfloat16`"
        )
    return maxima


def scales_of(maxima: HeadMaxima, kv_cache_dtype: DType) -> dict[str, Floats]:
    """Scales under which each head's largest magnitude is the largest number of the type.

    Args:
        maxima: of every layer.
        kv_cache_dtype: float8 or int8.

    Returns:
        `kv_scales.{i}` -> `[2, num_kv_heads]` float32.

    Raises:
        ConfigError: the type needs no scales.
    """
    if kv_cache_dtype not in LARGEST:
        raise ConfigError(
            f"a {kv_cache_dtype.value} pool needs no scales; pass `--kv-cache-dtype float8` or int8"
        )
    largest = np.float32(LARGEST[kv_cache_dtype])
    tiny = np.finfo(np.float32).tiny
    return {
        # Subnormal scales would lose the bits that they are there to keep.
        kv_scales_name(index): np.maximum(
            np.where(layer > 0, layer, SILENT_MAXIMUM) / largest, tiny
        ).astype(np.float32)
        for index, layer in enumerate(maxima.layers)
    }


def silent_heads(maxima: HeadMaxima) -> list[str]:
    """Heads that never held anything but zeros, by name."""
    return [
        f"layer {index} {kind} head {head}"
        for index, layer in enumerate(maxima.layers)
        for row, kind in enumerate(("key", "value"))
        for head in np.flatnonzero(layer[row] == 0)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Greedy tokens and logits of prompts that the scales have not seen.

    Attributes:
        tokens: `[num_new_tokens]` int64 of each prompt.
        logits: `[num_new_tokens, vocab_size]` float32 of each prompt.
    """

    tokens: list[npt.NDArray[np.int64]]
    logits: list[Floats]


def run_held_out(
    executor: Executor, prompts: Sequence[Sequence[int]], *, num_new_tokens: int
) -> HeldOut:
    """Greedy continuations of prompts with all their logits.

    Raises:
        SequenceError: a prompt does not fit.
        ExecutionError: the model failed.
    """
    generations = Session(executor).generate(prompts, num_new_tokens, keep_logits=True)
    return HeldOut(
        tokens=[np.asarray(each.tokens, np.int64) for each in generations],
        logits=[np.asarray(each.logits, np.float32) for each in generations],
    )


def compare_held_out(
    baseline: HeldOut,
    quantised: HeldOut,
    prompts: Sequence[Sequence[int]],
    *,
    tolerance: Tolerance,
) -> list[SequenceResult]:
    """What quantising cost, per prompt: logits up to the first different token, and the token."""
    return [
        compare_sequence(
            (baseline.tokens[index], baseline.logits[index]),
            (quantised.tokens[index], quantised.logits[index]),
            prompt_len=len(prompt),
            tolerance=tolerance,
        )
        for index, prompt in enumerate(prompts)
    ]
