"""One calibration: which prompts make the scales, and what the scales cost on the others."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from paged_trt.builder.config import BuildConfig
from paged_trt.builder.reference import write_reference
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ConfigError
from paged_trt.plugins.kv_scales import require_scales
from paged_trt.runtime.calibration import (
    HeadMaxima,
    HeldOut,
    collect_maxima,
    compare_held_out,
    run_held_out,
    scales_of,
)
from paged_trt.runtime.comparison import SequenceResult, Tolerance, tolerance_for
from paged_trt.runtime.reference_executor import ReferenceExecutor

HELD_OUT_EVERY: Final = 4
"""Every fourth prompt measures the scales and does not make them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything that a calibration gave.

    Attributes:
        scales: `kv_scales.{i}` -> `[2, num_kv_heads]` float32.
        maxima: what they were made from.
        num_prompts: prompts that made them.
        results: what quantising cost on each held-out prompt.
        tolerance: the project's, of such a pool.
        baseline_dtype: type of the pool that it was compared with.
        notes: what a report must say.
    """

    scales: dict[str, Any]
    maxima: HeadMaxima
    num_prompts: int
    results: list[SequenceResult]
    tolerance: Tolerance
    baseline_dtype: DType
    notes: tuple[str, ...]


def calibrate(
    model: Path,
    prompts: Sequence[Sequence[int]],
    kv_cache_dtype: DType,
    *,
    dtype: str | None,
    num_new_tokens: int,
) -> Calibration:
    """Scales from most of the prompts, and what they cost on the others.

    Args:
        model: the source model.
        prompts: token ids, at least two prompts.
        kv_cache_dtype: float8 or int8.
        dtype: as `--dtype`.
        num_new_tokens: greedy tokens of each prompt.

    Raises:
        ConfigError: there are too few prompts, or the model cannot be rewritten so.
        PagedTrtError: by its class.
    """
    seen, held_out = split_prompts(prompts)
    if not seen:
        raise ConfigError(
            f"{len(prompts)} prompt is too few: one is held out to measure the scales; pass two "
            "or more"
        )
    longest = max(map(len, prompts))
    config = BuildConfig(
        max_batch_size=1,
        max_input_len=longest,
        max_kv_cache_capacity=longest + num_new_tokens,
        dtype=dtype,
    )
    with _executor(model, config) as plain_pool:
        maxima = collect_maxima(plain_pool, seen, num_new_tokens=num_new_tokens)
        scales = scales_of(maxima, kv_cache_dtype)
        require_scales(scales, plain_pool.spec.layers, where="the calibrated scales")
        baseline = run_held_out(plain_pool, held_out, num_new_tokens=num_new_tokens)
        baseline_dtype, notes = plain_pool.spec.kv_cache_dtype, plain_pool.notes
    quantised, tolerance = _quantised(
        model, config, kv_cache_dtype, scales, held_out, num_new_tokens=num_new_tokens
    )
    return Calibration(
        scales=scales,
        maxima=maxima,
        num_prompts=len(seen),
        results=compare_held_out(baseline, quantised, held_out, tolerance=tolerance),
        tolerance=tolerance,
        baseline_dtype=baseline_dtype,
        notes=notes,
    )


def split_prompts(
    prompts: Sequence[Sequence[int]],
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Prompts that make the scales, and those that measure them: at least the last."""
    is_held_out = [index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index in range(len(prompts))]
    if prompts and not any(is_held_out):
        is_held_out[-1] = True
    pairs = list(zip(prompts, is_held_out, strict=True))
    return [each for each, out in pairs if not out], [each for each, out in pairs if out]


def _quantised(
    model: Path,
    config: BuildConfig,
    kv_cache_dtype: DType,
    scales: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    num_new_tokens: int,
) -> tuple[HeldOut, Tolerance]:
    quantised = dataclasses.replace(
        # The path only says that there are scales.
        config,
        kv_cache_dtype=kv_cache_dtype,
        kv_scales=Path("calibrated"),
    )
    with _executor(model, quantised, scales) as executor:
        found = run_held_out(executor, prompts, num_new_tokens=num_new_tokens)
        return found, tolerance_for(executor.spec)


@contextlib.contextmanager
def _executor(
    model: Path, config: BuildConfig, scales: dict[str, Any] | None = None
) -> Iterator[ReferenceExecutor]:
    with tempfile.TemporaryDirectory(prefix="paged-trt-") as folder:
        path, spec = write_reference(model, config, Path(folder))
        executor = ReferenceExecutor(path, spec, kv_scales=scales)
        try:
            yield executor
        finally:
            executor.close()
