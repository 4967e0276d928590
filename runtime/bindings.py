"""Step inputs on their way to the device, logits on their way back, and what TensorRT is told.

T token rows, N sequence rows, M page-table width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.device import Event, Stream
from paged_trt.plugins.dtypes import DType
from paged_trt.plugins.errors import ExecutionError
from paged_trt.plugins.launch.args import SampleArgs, TakeTokensArgs
from paged_trt.plugins.launch.sampling import SampleRow
from paged_trt.plugins.operands import StepShape
from paged_trt.plugins.tensors import (
    INPUT_IDS,
    LOGITS,
    NEXT_TOKENS,
    PAGE_TABLE,
    PAST_LENS,
    POSITION_IDS,
    QUERY_START_OFFSETS,
    EngineSpec,
    LogitsMode,
)
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.pool import DeviceArena, aligned

Binding = tuple[int, tuple[int, ...] | None]
"""Address, and dims of an input."""
_ROW_BYTES: Final = ctypes.sizeof(SampleRow)


class Staging:
    """Page-locked memory of one step: what it sends, and the tokens that come back.

    Args:
        arena: owner of the memory.
        driver: module of driver calls.
        input_bytes: of everything but the page table.
        table_entries: of the page table.
        batch: most sequence rows.

    Attributes:
        inputs: ids, positions, offsets, lengths and sampling parameters.
        table: rows of the page table that changed, each at its place.
        tokens: `[N]` int64, and right behind them their logprobs `[N]` float32.
        done: marks the end of the step; only then may another one use this memory.
    """

    def __init__(
        self, arena: DeviceArena, driver: Any, *, input_bytes: int, table_entries: int, batch: int
    ) -> None:
        self.inputs = arena.allocate_pinned(input_bytes)
        self.table = arena.allocate_pinned(4 * table_entries).view(np.int32)
        self.tokens = arena.allocate_pinned(12 * batch)
        self.done = Event(driver)

    def next_tokens(self, step: StepShape) -> npt.NDArray[np.int64]:
        """A copy of the next tokens, `[N]`."""
        return self.tokens[: 8 * step.num_seqs].view(np.int64).copy()

    def logprobs(self, step: StepShape) -> npt.NDArray[np.float32]:
        """A copy of the logprobs of the next tokens, `[N]`."""
        raw = self.tokens[8 * step.num_seqs : 12 * step.num_seqs]
        return raw.view(np.float32).copy()


class StepBuffers:
    """Page-locked and device memory of steps.

    Ids, positions, offsets, lengths and sampling parameters lie in one block, so that one copy
    brings them all. The
    page table has its own block and travels only when it changed.

    The page-locked memory is there twice: one step is put into the one while the copies of the
    step before it may still read the other one. Device memory is there once: everything runs on
    one stream.

    Args:
        arena: owner of the memory.
        spec: interface of the engine.
        driver: module of driver calls.

    Attributes:
        staging: of the step that is being made.
    """

    def __init__(self, arena: DeviceArena, spec: EngineSpec, driver: Any) -> None:
        self._spec = spec
        rows, batch = spec.max_token_rows, spec.pool.max_batch_size
        self._lens_at = aligned(4 * (batch + 1))
        self._rows_at = self._lens_at + aligned(4 * batch)
        self._ids_at = self._rows_at + aligned(_ROW_BYTES * batch)
        parts = 2 if spec.reads_position_ids else 1
        size = self._ids_at + parts * aligned(8 * rows)
        self._device = arena.allocate(size, "the inputs of a step")
        table_entries = spec.pool.table_entries()
        self._table_device = arena.allocate(4 * table_entries, "the page table")
        # What the device holds.
        self._table_sent: npt.NDArray[np.int32] = np.zeros(table_entries, np.int32)
        self._table_shape: tuple[int, ...] | None = None
        self._num_logits = batch if spec.logits_mode is LogitsMode.LAST else rows
        logits_bytes = self._num_logits * spec.vocab_size * spec.logits_dtype.itemsize
        self._logits_host = arena.allocate_pinned(logits_bytes)
        self._logits_device = arena.allocate(logits_bytes, "the logits")
        self._tokens_device = arena.allocate(12 * batch, "the next tokens")
        self._stagings = [
            Staging(arena, driver, input_bytes=size, table_entries=table_entries, batch=batch)
            for _ in range(2)
        ]
        self.staging = self._stagings[0]
        self.num_copies = 0
        self.num_table_copies = 0

    def turn(self) -> Staging:
        """Make the next step in the other page-locked memory; its last step is done."""
        self._stagings.reverse()
        self.staging = self._stagings[0]
        return self.staging

    def close(self) -> None:
        """Destroy the events; a second call does nothing."""
        for staging in self._stagings:
            staging.done.close()

    def upload(self, inputs: StepInputs, stream: Stream) -> None:
        """Send a step's inputs: one copy, and one more where the page table changed.

        No step that is not done may use the same `staging`: its copies read the same blocks.
        """
        num_tokens = len(inputs.input_ids)
        self._put(0, inputs.query_start_offsets)
        self._put(self._lens_at, inputs.past_lens)
        self._put(self._ids_at, inputs.input_ids)
        end = self._ids_at + 8 * num_tokens
        if self._spec.reads_position_ids:
            start = self._positions_at(num_tokens)
            self._put(start, inputs.position_ids)
            end = start + 8 * num_tokens
        stream.upload(self._device, self.staging.inputs.ctypes.data, end)
        self.num_copies += 1
        self._upload_table(inputs.page_table, stream)

    def forget_table(self) -> None:
        """Send the table with the next step: what the device holds is not known."""
        self._table_shape = None

    def bindings(self, step: StepShape) -> dict[str, Binding]:
        """Address and dims of every tensor of a step; None for the dims of a result."""
        tokens, seqs, width = step.num_tokens, step.num_seqs, step.table_width
        bindings: dict[str, Binding] = {
            INPUT_IDS: (self._device + self._ids_at, (1, tokens)),
            PAGE_TABLE: (self._table_device, (seqs, width)),
            QUERY_START_OFFSETS: (self._device, (seqs + 1,)),
            PAST_LENS: (self._device + self._lens_at, (seqs,)),
            LOGITS: (self._logits_device, None),
        }
        if self._spec.greedy_in_engine:
            bindings[NEXT_TOKENS] = (self._tokens_device, None)
        if self._spec.reads_position_ids:
            bindings[POSITION_IDS] = (self._device + self._positions_at(tokens), (1, tokens))
        return bindings

    def download(self, step: StepShape, stream: Stream) -> None:
        """Ask for the logits of a step; `logits` has them once the stream is idle."""
        size = self._rows(step) * self._spec.vocab_size * self._spec.logits_dtype.itemsize
        stream.download(self._logits_host.ctypes.data, self._logits_device, size)

    def logits(self, step: StepShape) -> npt.NDArray[Any]:
        """A copy of the logits, `[N or T, vocab_size]`; bfloat16 becomes float32."""
        dtype = self._spec.logits_dtype
        rows, vocab = self._rows(step), self._spec.vocab_size
        raw = self._logits_host[: rows * vocab * dtype.itemsize]
        logits = raw.view(dtype.numpy).reshape(rows, vocab)
        return logits.astype(np.float32 if dtype is DType.BFLOAT16 else logits.dtype)

    def put_sample_rows(self, num_seqs: int, rows: Mapping[int, SampleRow]) -> None:
        """Put the sampling parameters of N rows where the next upload takes them along.

        Args:
            num_seqs: N.
            rows: those that draw; the others take their largest logit.
        """
        block = (SampleRow * num_seqs)()
        for row, parameters in rows.items():
            block[row] = parameters
        self._put(self._rows_at, np.frombuffer(bytes(block), np.uint8))

    def sample_args(self, num_seqs: int, *, with_logprobs: bool) -> SampleArgs:
        """Argument block of the sampling kernel for N rows."""
        vocab = self._spec.vocab_size
        return SampleArgs(
            logits=self._logits_device,
            rows=self._device + self._rows_at,
            tokens=self._tokens_device,
            logprobs=self._tokens_device + 8 * num_seqs if with_logprobs else 0,
            row_stride=vocab,
            num_seqs=num_seqs,
            vocab_size=vocab,
        )

    def download_tokens(
        self, step: StepShape, stream: Stream, *, with_logprobs: bool = False
    ) -> None:
        """Ask for the next tokens of a step; `staging` has them once the step is done."""
        size = (12 if with_logprobs else 8) * step.num_seqs
        stream.download(self.staging.tokens.ctypes.data, self._tokens_device, size)

    def take_args(self, num_tokens: int) -> TakeTokensArgs:
        """Argument block of the kernel that takes tokens of the step before among T ids."""
        return TakeTokensArgs(
            ids=self._device + self._ids_at,
            tokens=self._tokens_device,
            num_tokens=num_tokens,
            num_seqs=self._spec.pool.max_batch_size,
            vocab_size=self._spec.vocab_size,
        )

    def _rows(self, step: StepShape) -> int:
        return step.num_seqs if self._spec.logits_mode is LogitsMode.LAST else step.num_tokens

    def _positions_at(self, num_tokens: int) -> int:
        return self._ids_at + aligned(8 * num_tokens)

    def _put(self, place: int, array: npt.NDArray[Any]) -> None:
        self.staging.inputs[place : place + array.nbytes].view(array.dtype)[:] = array

    def _upload_table(self, table: npt.NDArray[np.int32], stream: Stream) -> None:
        sent = self._table_sent[: table.size].reshape(table.shape)
        first, end = 0, len(table)
        if self._table_shape == table.shape:
            changed = np.flatnonzero((sent != table).any(axis=1))
            if not len(changed):
                return
            first, end = int(changed[0]), int(changed[-1]) + 1
        self._table_shape = None
        sent[first:end] = table[first:end]
        # From the first row that changed to the last one, in one copy.
        width = table.shape[1]
        rows = self.staging.table[first * width : end * width]
        rows[:] = table[first:end].reshape(-1)
        stream.upload(self._table_device + 4 * first * width, rows.ctypes.data, rows.nbytes)
        self.num_table_copies += 1
        self._table_shape = table.shape


class BoundContext:
    """An execution context that is told what changed.

    Args:
        context: of TensorRT, with its profile chosen.
        fixed: tensors that stay where they are.

    Raises:
        ExecutionError: TensorRT refused a binding.
    """

    def __init__(self, context: Any, fixed: dict[str, Binding]) -> None:
        self._context = context
        self._bound: dict[str, Binding] = {}
        self.bind(fixed)

    def bind(self, bindings: dict[str, Binding]) -> None:
        """Set the addresses and dims that differ from the last ones.

        Raises:
            ExecutionError: TensorRT refused one.
        """
        for name, binding in bindings.items():
            if self._bound.get(name) == binding:
                continue
            self._bound.pop(name, None)
            address, dims = binding
            accepted = dims is None or self._context.set_input_shape(name, dims)
            if not accepted or not self._context.set_tensor_address(name, address):
                raise ExecutionError(
                    f"TensorRT refused `{name}` with dims {dims} at {address:#x}; the step is "
                    "outside the engine's profile"
                )
            self._bound[name] = binding

    def signature(self) -> frozenset[tuple[str, Binding]]:
        """Everything that is bound: a graph fits only what it was captured with."""
        return frozenset(self._bound.items())

    def execute(self, stream: int) -> bool:
        """Put the engine's work on a stream; False where TensorRT failed."""
        return bool(self._context.execute_async_v3(stream))
