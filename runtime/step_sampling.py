"""The tokens of a step: drawn by the kernel where the logits are, or on the host from a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import KernelLaunch, Stream
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.launch.args import SampleArgs
from paged_trt.plugins.launch.sampling import SAMPLE_THREADS, TAKE_TOKENS, can_sample
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensors import EngineSpec, LogitsMode
from paged_trt.runtime.bindings import StepBuffers
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.sampler import Sampling, sample, sample_rows

Array = npt.NDArray[Any]
Sampled = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Tokens and logprobs of the rows that draw."""


def samples_on_device(spec: EngineSpec) -> bool:
    """Whether the kernel can choose the tokens of an engine: it reads logits of last tokens."""
    return spec.logits_mode is LogitsMode.LAST and can_sample(spec.logits_dtype, spec.vocab_size)


def last_token_logits(executor: Executor, inputs: StepInputs, logits: Array) -> Array:
    """Logits `[N, vocab_size]` of the last token of each sequence row.

    Args:
        executor: what gave them.
        inputs: of the step.
        logits: what `executor.step` gave.

    Raises:
        ExecutionError: they have another shape than the engine says.
    """
    spec = executor.spec
    is_last = spec.logits_mode is LogitsMode.LAST
    rows = len(inputs.past_lens) if is_last else len(inputs.input_ids)
    if logits.shape != (rows, spec.vocab_size):
        raise ExecutionError(
            f"the {executor.name} executor gave logits of shape {list(logits.shape)}, expected "
            f"{[rows, spec.vocab_size]}; rebuild the engine with `paged-trt build`"
        )
    return logits if is_last else logits[np.maximum(inputs.query_start_offsets[1:] - 1, 0)]


def sampled_on_host(
    executor: Executor,
    inputs: StepInputs,
    rows: Sequence[int],
    specs: Sequence[Sampling],
    steps: Sequence[int],
    *,
    with_logprobs: bool = False,
) -> Sampled:
    """Run a step and draw from its logits in NumPy: the same tokens as the kernel.

    Args:
        executor: runs the model.
        inputs: of the step.
        rows: sequence rows that draw.
        specs: how each of them draws.
        steps: index of the token that each of them draws.
        with_logprobs: as in `sample`.

    Raises:
        ExecutionError: the model failed.
        ConfigError: a row draws and has no seed.
    """
    logits = last_token_logits(executor, inputs, executor.step(inputs))
    return sample(logits[list(rows)], specs, steps, with_logprobs=with_logprobs)


class StepSampler:
    """Draws the tokens of a step on the device.

    Args:
        function: the loaded kernel.
        buffers: where logits, parameters and results lie.
        driver: module of driver calls.
    """

    def __init__(self, function: Any, buffers: StepBuffers, driver: Any) -> None:
        self._function, self._buffers, self._driver = function, buffers, driver
        self._launches: dict[tuple[int, bool], KernelLaunch] = {}
        self._with_logprobs = False

    def prepare(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        specs: Sequence[Sampling],
        steps: Sequence[int],
        *,
        with_logprobs: bool,
    ) -> None:
        """Put the parameters among the step's inputs.

        Args:
            inputs: of the step; rows that do not draw take their largest logit.
            rows: as in `sampled_on_host`.
            specs: likewise.
            steps: likewise.
            with_logprobs: whether somebody asks for them.
        """
        # Most rows of most steps are greedy, which a row of zeros says.
        drawing = [index for index, spec in enumerate(specs) if spec.temperature]
        drawn = sample_rows([specs[i] for i in drawing], [steps[i] for i in drawing])
        parameters = {rows[index]: row for index, row in zip(drawing, drawn, strict=True)}
        self._buffers.put_sample_rows(len(inputs.past_lens), parameters)
        self._with_logprobs = with_logprobs

    def download(self, step: StepShape, stream: Stream) -> None:
        """Launch the kernel behind the step, and ask for what it draws."""
        key = (step.num_seqs, self._with_logprobs)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._make(*key)
        launch(stream.handle)
        self._buffers.download_tokens(step, stream, with_logprobs=self._with_logprobs)

    def result(self, step: StepShape, rows: Sequence[int]) -> Sampled:
        """What the rows drew, once the stream is idle; `row_error` names those that could not."""
        staging = self._buffers.staging
        tokens = staging.next_tokens(step)[list(rows)]
        if not self._with_logprobs:
            return tokens, np.zeros(len(rows), np.float32)
        return tokens, staging.logprobs(step)[list(rows)]

    def _make(self, num_seqs: int, with_logprobs: bool) -> KernelLaunch:
        block: SampleArgs = self._buffers.sample_args(num_seqs, with_logprobs=with_logprobs)
        return KernelLaunch(
            self._function,
            block,
            grid=(num_seqs, 1, 1),
            threads=SAMPLE_THREADS,
            shared_bytes=0,
            overlaps=False,
            label=f"the sampling kernel of {num_seqs} rows",
            driver=self._driver,
        )


class TokenTaker:
    """Takes the tokens of the step before over on the device, where ids of a step say so.

    Args:
        function: the loaded kernel.
        buffers: where ids and tokens lie.
        driver: module of driver calls.
    """

    def __init__(self, function: Any, buffers: StepBuffers, driver: Any) -> None:
        self._function, self._buffers, self._driver = function, buffers, driver
        self._launches: dict[int, KernelLaunch] = {}

    def launch(self, num_tokens: int, stream: Stream) -> None:
        """Launch the kernel behind the copy of T ids, ahead of the engine."""
        launch = self._launches.get(num_tokens)
        if launch is None:
            launch = self._launches[num_tokens] = KernelLaunch(
                self._function,
                self._buffers.take_args(num_tokens),
                grid=(-(-num_tokens // TAKE_TOKENS.threads), 1, 1),
                threads=TAKE_TOKENS.threads,
                shared_bytes=0,
                overlaps=False,
                label=f"the kernel that takes over tokens among {num_tokens} ids",
                driver=self._driver,
            )
        launch(stream.handle)
