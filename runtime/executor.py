"""The seam between the page runtime and whatever runs the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.errors import UnsupportedError
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.sampler import Sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Host arrays of one step: T token rows, N sequence rows, page-table width M.

    The arrays are views of buffers that the next step overwrites: an executor copies what
    it keeps. The runtime has validated them: every page id on a needed position is in the
    pool, every sequence fits its row, `query_start_offsets` is non-decreasing from 0 to at
    most T.

    Attributes:
        input_ids: `[T]` int64; in a step that is launched, `token_of_row(row)` stands for what
            that row of the step launched before it chooses.
        position_ids: `[T]` int64, position of each token in its sequence; 0 on padding.
        page_table: `[N, M]` int32, UNUSED_PAGE_ENTRY where no page is.
        query_start_offsets: `[N + 1]` int32.
        past_lens: `[N]` int32, tokens in the pool before this step.
    """

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    page_table: npt.NDArray[np.int32]
    query_start_offsets: npt.NDArray[np.int32]
    past_lens: npt.NDArray[np.int32]


PIPELINES_BY_DEFAULT: Final = True
"""Whether an engine on a GPU is loaded with what steps need to overlap, where nobody says so."""
Choices = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Tokens of sequence rows, an id outside the vocabulary where a row has no largest logit, and
their logprobs."""


def token_of_row(row: int) -> int:
    """A token id that stands for what a row of the step before chooses: negative, as no id is."""
    return -1 - row


def row_of_token(token: int) -> int:
    """The row that a negative token id stands for."""
    return -1 - token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How the tokens of the first rows of a step are drawn from the logits.

    Attributes:
        specs: for each row that holds a sequence, with a seed where its temperature is not 0.
        steps: index of the token that each of them draws, from 0.
        with_logprobs: whether somebody reads the logprobs.
    """

    specs: Sequence[Sampling]
    steps: Sequence[int]
    with_logprobs: bool


class StepLauncher(Protocol):
    """Steps in two halves, so that a step is handed over before the one before it has ended.

    Steps, copies of pages and poison run in the order of the calls. A step is collected before the
    second one behind it is launched.
    """

    @property
    def draws(self) -> bool:
        """Whether `launch` takes a `Draw`; otherwise the engine must choose by itself."""
        ...

    def launch(self, inputs: StepInputs, draw: Draw | None) -> object:
        """Hand a step over.

        Args:
            inputs: of the step; its arrays may be overwritten right after the call.
            draw: how tokens are chosen; None for the greedy choices of an engine that gives them.

        Returns:
            The step, for `collect`.

        Raises:
            Exception: it was not handed over, or only a part of it.
        """
        ...

    def collect(self, step: Any) -> Choices:
        """Wait for a step.

        Args:
            step: what `launch` returned.

        Returns:
            At least the rows that hold a sequence.

        Raises:
            Exception: it failed.
        """
        ...


def require_next_tokens(spec: EngineSpec) -> None:
    """Refuse an engine that gives no `next_tokens`.

    Raises:
        UnsupportedError: it was built without `--greedy-in-engine`.
    """
    if not spec.greedy_in_engine:
        raise UnsupportedError(
            "the engine gives logits and no `next_tokens`; read the logits, or rebuild it with "
            "`paged-trt build --greedy-in-engine`"
        )


class Executor(Protocol):
    """Runs one step of a paged model and owns its KV pools.

    A step either updates the pools and returns logits, or raises and the sequences of that
    step are lost: the session releases their pages. One that can hand steps over before others
    have ended has a `StepLauncher` as its attribute `launcher`.
    """

    @property
    def name(self) -> str:
        """Short name for reports: `reference` or `tensorrt`."""
        ...

    @property
    def spec(self) -> EngineSpec:
        """The interface of the engine that this executor runs."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report must say about this executor, such as an upcast of bfloat16."""
        ...

    @property
    def bucketed_shapes(self) -> bool:
        """Whether N and M come from the fixed bucket lists; otherwise they are exact."""
        ...

    @property
    def samples_on_device(self) -> bool:
        """Whether `step_sampled` copies tokens in place of logits."""
        ...

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        """Append keys and values of T tokens to the pools, attend, and return logits.

        Returns:
            `[N, vocab_size]`, the last token of each sequence row, under LogitsMode.LAST, or
            `[T, vocab_size]` under LogitsMode.ALL; float16 or float32 (bfloat16 is upcast).

        Raises:
            ExecutionError: the model failed.
        """
        ...

    def step_tokens(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """As `step`, for the greedy choices of the engine instead of the logits.

        Returns:
            `[N]`, the lowest id of the largest logit of each sequence row; an id outside the
            vocabulary where a row has no largest logit.

        Raises:
            ExecutionError: the model failed.
            UnsupportedError: the engine was built without `--greedy-in-engine`.
        """
        ...

    def step_sampled(
        self,
        inputs: StepInputs,
        rows: Sequence[int],
        specs: Sequence[Sampling],
        steps: Sequence[int],
        *,
        with_logprobs: bool = False,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """As `step`, for tokens that are drawn from the logits.

        Args:
            inputs: of the step.
            rows: sequence rows that draw; what the others hold is not looked at.
            specs: how each of them draws, with a seed where its temperature is not 0.
            steps: index of the token that each of them draws, from 0.
            with_logprobs: whether somebody reads the logprobs.

        Returns:
            Tokens `[len(rows)]`, an id outside the vocabulary where a row has no largest logit;
            and their logprobs `[len(rows)]` where they are asked for.

        Raises:
            ExecutionError: the model failed.
            ConfigError: a row draws and has no seed.
        """
        ...

    def during_next_step(self, work: Callable[[], None]) -> None:
        """Do some work while the device runs the next step, or at once where there is none.

        Args:
            work: must not raise; the last one counts.
        """
        ...

    def copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of whole pages in every layer, before the next step reads them.

        Args:
            pages: `(source, target)` page ids; no target is a source.

        Raises:
            ExecutionError: the device failed.
        """
        ...

    def poison_pages(self, page_ids: Sequence[int]) -> None:
        """Fill pages with what no step may read: bytes of 0xFF, NaN in every float type.

        Raises:
            ExecutionError: the device failed.
        """
        ...

    def warm_up(self) -> None:
        """Make what the first steps would make; a server calls it before its first request.

        Raises:
            ExecutionError: as `step`.
        """
        ...

    def close(self) -> None:
        """Release the pools and the model; a second call does nothing."""
        ...
