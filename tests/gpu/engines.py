"""Toy engines for the tests of the executor, built once per process by the TensorRT in use."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from paged_trt.builder.config import BuildConfig
from paged_trt.builder.pipeline import BuildRequest, build_engine_directory
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.manifest import read_manifest
from paged_trt.plugins.tensors import EngineSpec, kv_scales_name
from paged_trt.runtime.comparison import tolerance_for
from paged_trt.runtime.executor import Executor
from paged_trt.runtime.results import Generation
from paged_trt.runtime.session import Session
from paged_trt.scripts.example_models.toy import TOY, write_toy

PROMPT_LENS = (1, 17, 127, 130, 255, 510)
NEW_TOKENS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyEngine:
    """What a toy engine is built for; the defaults make the smallest one."""

    activation: DType = DType.FLOAT16
    kv: DType | None = None
    plan: str | None = None
    dialect: str = "attention23-past"
    logits: str = "last"
    greedy: bool = False
    layer_outputs: bool = False
    window: int | None = None
    pool_pages: int | None = None
    max_batch_size: int = 4
    capacity: int = 1024

    @property
    def folder(self) -> Path:
        """The engine directory; built at the first use."""
        return _build(self)

    @property
    def spec(self) -> EngineSpec:
        return read_manifest(self.folder).spec

    def __str__(self) -> str:
        defaults = ToyEngine()
        return (
            "-".join(
                str(getattr(value, "value", value))
                for name, value in dataclasses.asdict(self).items()
                if value != getattr(defaults, name)
            )
            or "float16"
        )


@functools.cache
def _workspace() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _build(toy: ToyEngine) -> Path:
    source = _workspace() / f"{toy.dialect}-{toy.activation.value}-{toy.window}"
    if not source.exists():
        write_toy(source, toy.dialect, dtype=toy.activation, window=toy.window)
    scales = None
    if toy.kv is not None and toy.kv.is_quantised:
        scales = source / f"{toy.kv.value}.safetensors"
        # The values of the toy stay below 4: int8 takes 127 steps for them, float8 448.
        scale = 4 / 127 if toy.kv is DType.INT8 else 4 / 448
        shape = (2, TOY.num_kv_heads)
        names = [kv_scales_name(layer) for layer in range(TOY.num_layers)]
        save_file({name: np.full(shape, scale, np.float32) for name in names}, scales)
    target = _workspace() / f"engine-{_build.cache_info().misses}"
    config = BuildConfig(
        max_batch_size=toy.max_batch_size,
        max_input_len=512,
        max_kv_cache_capacity=toy.capacity,
        max_num_tokens=300,
        kv_pool_pages=toy.pool_pages,
        kv_cache_dtype=toy.kv or "auto",
        kv_scales=scales,
        logits=toy.logits,
        greedy_in_engine=toy.greedy,
        layer_outputs=toy.layer_outputs,
        attention_plan=toy.plan,
    )
    build_engine_directory(BuildRequest(model=source / "model.onnx", target=target, config=config))
    return target


def prompts(lengths: tuple[int, ...] = PROMPT_LENS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TOY.vocab_size, length).tolist() for length in lengths]


def generate(executor: Executor, given: list[list[int]], **options: Any) -> list[Generation]:
    """Continue prompts in a session of its own; the executor stays open."""
    count = options.pop("new_tokens", NEW_TOKENS)
    chunk = options.pop("prefill_chunk", None)
    session = Session(executor, **options)
    return session.generate(given, count, keep_logits=True, prefill_chunk=chunk)


def logits_of(generation: Generation) -> Any:
    assert generation.logits is not None
    return generation.logits


def check_agrees(spec: EngineSpec, reference: list[Generation], found: list[Generation]) -> None:
    """The project's rule: logits within tolerance up to a token that differs by a near tie."""
    tolerance = tolerance_for(spec)
    for index, (want, have) in enumerate(zip(reference, found, strict=True)):
        for step, (row, other) in enumerate(zip(logits_of(want), logits_of(have), strict=True)):
            difference = float(np.abs(row - other).max())
            limit = tolerance.limit(row)
            assert difference <= limit, f"prompt {index}, step {step}: {difference} > {limit}"
            if want.tokens[step] != have.tokens[step]:
                gap = float(row[want.tokens[step]] - row[have.tokens[step]])
                bound = tolerance.tie_rtol * float(np.abs(row).max())
                assert gap < bound, f"prompt {index}, step {step}: gap {gap} >= bound {bound}"
                break


def same_bits(one: list[Generation], two: list[Generation]) -> bool:
    return all(
        left.tokens == right.tokens and logits_of(left).tobytes() == logits_of(right).tobytes()
        for left, right in zip(one, two, strict=True)
    )
