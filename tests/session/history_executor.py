"""An executor whose pool holds token ids: it proves paging without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.kv import TOKENS_PER_PAGE
from paged_trt.plugins.tensors import EngineSpec, LogitsMode
from paged_trt.runtime.executor import StepInputs


def next_token(history: list[int], vocab_size: int) -> int:
    """A token that depends on every token before it and on their order."""
    value = 7
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return value % vocab_size


def continuation(prompt: list[int], count: int, vocab_size: int) -> tuple[int, ...]:
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, vocab_size))
    return tuple(history[len(prompt) :])


class HistoryExecutor:
    """Stores the token ids of each page and reads the history of a row back from them."""

    name = "history"
    notes: tuple[str, ...] = ()
    samples_on_device = False

    def __init__(self, spec: EngineSpec, *, bucketed: bool = False) -> None:
        self.spec = spec
        self.bucketed_shapes = bucketed
        self.pool: npt.NDArray[np.int64] = np.full((spec.pool.num_pages, TOKENS_PER_PAGE), -1)
        self.shapes: list[tuple[int, int, int]] = []
        self.failure: BaseException | None = None
        self.is_closed = False

    def step(self, inputs: StepInputs) -> npt.NDArray[Any]:
        num_tokens, (num_rows, width) = len(inputs.input_ids), inputs.page_table.shape
        self.shapes.append((num_tokens, num_rows, width))
        assert num_tokens <= self.spec.max_token_rows
        if self.failure is not None:
            raise self.failure
        offsets = inputs.query_start_offsets
        assert offsets[0] == 0
        assert offsets[-1] <= num_tokens
        rows = num_rows if self.spec.logits_mode is LogitsMode.LAST else num_tokens
        logits = np.zeros((rows, self.spec.vocab_size), np.float32)
        for row in range(num_rows):
            start, end = int(offsets[row]), int(offsets[row + 1])
            if num_tokens == num_rows:
                assert end - start == (row < offsets[-1])
            if start == end:
                assert inputs.past_lens[row] == 0
                assert (inputs.page_table[row] == -1).all()
                continue
            history = self._append(inputs, row, start, end)
            out = row if self.spec.logits_mode is LogitsMode.LAST else end - 1
            logits[out, next_token(history, self.spec.vocab_size)] = 1.0
        return logits

    def _append(self, inputs: StepInputs, row: int, start: int, end: int) -> list[int]:
        past = int(inputs.past_lens[row])
        pages = inputs.page_table[row]
        for index, position in enumerate(range(past, past + end - start), start):
            assert inputs.position_ids[index] == position
            page, place = divmod(position, TOKENS_PER_PAGE)
            assert pages[page] >= 0
            self.pool[pages[page], place] = inputs.input_ids[index]
        history = self.pool[pages[pages >= 0]].ravel()[: past + end - start].tolist()
        assert -1 not in history
        return [int(token) for token in history]

    def during_next_step(self, work: Callable[[], None]) -> None:
        work()

    def copy_pages(self, pages: Sequence[tuple[int, int]]) -> None:
        for source, target in pages:
            self.pool[target] = self.pool[source]

    def poison_pages(self, page_ids: Sequence[int]) -> None:
        self.pool[list(page_ids)] = -1

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
