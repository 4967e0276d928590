"""Rows of logits and parameters for the sampling kernel, wherever it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from paged_trt.plugins.dtypes import DType
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.sampler import sample


@dataclasses.dataclass(frozen=True)
class Spec:
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits `[rows, vocab]` in a type of their own, how each row draws, and what it draws."""

    logits: Any
    specs: list[Spec]
    steps: list[int]
    tokens: Any
    logprobs: Any


def make_case(dtype: DType, rows: int, vocab: int, *, seed: int = 0) -> Case:
    """Random rows; the first ones have ties, infinities, zeros of both signs and wide ranges."""
    random = np.random.default_rng([seed, vocab])
    logits = random.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[0] = np.round(logits[0])
    logits[1] = 0
    logits[2] *= np.float32(0) * -1
    logits[3] *= 10
    if vocab > 40:
        logits[4, 17] = np.inf
        logits[5, :20] = -np.inf
        logits[6, :-1] = -np.inf
    logits = logits.astype(dtype.numpy)
    choices = ([0, 0.3, 1, 2.5], [0, 1, 2, 5, 50, 10**6], [1, 0.9, 0.5, 1e-6, 0.999])
    specs = [
        Spec(float(random.choice(choices[0])), int(random.choice(choices[1])),
             float(random.choice(choices[2])), int(random.integers(0, 2**63)))
        for _ in range(rows)
    ]  # fmt: skip
    steps = [int(step) for step in random.integers(0, 5000, rows)]
    tokens, logprobs = sample(logits.astype(np.float32), specs, steps)
    return Case(logits, specs, steps, tokens, logprobs)


def step_inputs(tokens: Sequence[Sequence[int]], past: Sequence[int]) -> StepInputs:
    """A step of some sequences on two pages each, from `past` tokens to all that they have."""
    new = [mine[before:] for mine, before in zip(tokens, past, strict=True)]
    positions = [np.arange(len(mine))[before:] for mine, before in zip(tokens, past, strict=True)]
    return StepInputs(
        input_ids=np.concatenate(new).astype(np.int64),
        position_ids=np.concatenate(positions).astype(np.int64),
        page_table=np.arange(2 * len(tokens), dtype=np.int32).reshape(-1, 2),
        query_start_offsets=np.cumsum([0, *map(len, new)]).astype(np.int32),
        past_lens=np.array(past, np.int32),
    )
