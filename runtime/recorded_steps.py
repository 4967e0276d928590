"""The steps of a scenario, fixed before a model has run: next tokens are random."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.tensors import EngineSpec, LogitsMode
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.paged_generation import PagedGenerator
from paged_trt.runtime.sampler import Sampling
from paged_trt.runtime.scenarios import Scenario
from paged_trt.runtime.step_sampling import Sampled, sampled_on_host


def record_steps(spec: EngineSpec, scenario: Scenario, *, seed: int) -> list[StepInputs]:
    """What the runtime's scheduler makes of a scenario: ragged batches on shuffled pages.

    Args:
        spec: limits and vocabulary of the engine.
        scenario: prompts, tokens to add and the size of a prefill step.
        seed: of the tokens and of the page order.

    Returns:
        Copies; N and M come from the bucket lists, as a TensorRT engine wants them.
    """
    recorder = _Recorder(spec, seed=seed)
    # Pages hold nothing here that a prefix could be found in.
    PagedGenerator(recorder, seed=seed, reuses_prefixes=False)(scenario)
    return recorder.steps


class _Recorder:
    """An executor that computes nothing: it keeps the steps and picks random tokens."""

    name = "recorder"
    notes: tuple[str, ...] = ()
    bucketed_shapes = True
    samples_on_device = False

    def __init__(self, spec: EngineSpec, *, seed: int) -> None:
        self._spec = spec
        self._random = np.random.default_rng(seed)
        self.steps: list[StepInputs] = []

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        copies = {
            field.name: getattr(inputs, field.name).copy() for field in dataclasses.fields(inputs)
        }
        self.steps.append(StepInputs(**copies))
        is_last = self._spec.logits_mode is LogitsMode.LAST
        rows = len(inputs.past_lens if is_last else inputs.input_ids)
        logits = np.zeros((rows, self._spec.vocab_size), np.float16)
        logits[np.arange(rows), self._random.integers(0, self._spec.vocab_size, rows)] = 1
        return logits

    def step_tokens(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = self.step(inputs).argmax(axis=-1)
        return tokens

    def step_sampled(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        specs: Sequence[Sampling],
        steps: Sequence[int],
        *,
        with_logprobs: bool = False,
    ) -> Sampled:
        return sampled_on_host(self, inputs, rows, specs, steps, with_logprobs=with_logprobs)

    def during_next_step(self, work: Callable[[], None]) -> None:
        work()

    def warm_up(self) -> None:
        """Nothing is made at a first step."""

    def copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        """Pages hold nothing here."""

    def poison_pages(self, page_ids: Sequence[int]) -> None:
        """Pages hold nothing here."""

    def close(self) -> None:
        """Nothing to release."""
