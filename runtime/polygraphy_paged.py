"""Polygraphy runners of an engine directory: one step per iteration, pools kept in between.

Imported by the script that `polygraphy run --paged-trt --paged-ref` makes; see
`polygraphy_extension`.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy import util
from polygraphy.backend.base import BaseLoader, BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.logger import G_LOGGER

from paged_trt.plugins.errors import KvPoolError, PagedTrtError, SequenceError
from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, pages_for_tokens
from paged_trt.plugins.tensors import (
    INPUT_IDS,
    LOGITS,
    PAGE_TABLE,
    PAST_LENS,
    POSITION_IDS,
    QUERY_START_OFFSETS,
    EngineSpec,
    Role,
)
from paged_trt.runtime.engine import load_engine, open_plan
from paged_trt.runtime.executor import Executor, StepInputs
from paged_trt.runtime.logical_kv import PagedExecutor, gather_kv, last_logits, poison_byte

Array = npt.NDArray[Any]
_OWN_STEPS = (
    "feed steps of this engine: `paged-trt polygraphy ENGINE_DIR -o FOLDER`, then "
    "`--data-loader-script FOLDER/load_data.py`"
)
"""What to do about a feed that is no step, such as one that Polygraphy made up."""


class LoadPagedEngine(BaseLoader):  # type: ignore[misc] # Polygraphy has no types
    """Functor that opens an engine directory.

    Args:
        engine_dir: what `paged-trt build` wrote.
        executor: as in `load_engine`.
        device: number of the CUDA device; only the plan needs one.
    """

    def __init__(self, engine_dir: str, *, executor: str, device: int = 0) -> None:
        self._engine_dir, self._executor, self._device = engine_dir, executor, device

    @util.check_called_by("__call__")  # type: ignore[untyped-decorator]
    def call_impl(self) -> Executor:
        """The executor; who calls closes it."""
        if self._executor == "tensorrt":
            # `load_engine` would tell of an option of another command.
            return open_plan(self._engine_dir, device=self._device)
        return load_engine(self._engine_dir, self._executor)


class PagedRunner(BaseRunner):  # type: ignore[misc] # Polygraphy has no types
    """One step per iteration.

    The pools begin as poison and are the runner's own: an iteration reads what the ones before
    it wrote, as in decoding, and never what a feed holds.

    Args:
        load: gives the executor, such as LoadPagedEngine; the runner closes it.
        with_kv: also give keys and values, gathered in the order of the tokens.
        name: of the runner; made from `prefix` and the time if left out.
        prefix: of that name.
    """

    def __init__(
        self,
        load: Callable[[], Executor],
        *,
        with_kv: bool = True,
        name: str | None = None,
        prefix: str = "paged",
    ) -> None:
        super().__init__(name=name, prefix=prefix)
        self._load, self._with_kv = load, with_kv

    @util.check_called_by("activate")  # type: ignore[untyped-decorator]
    def activate_impl(self) -> None:
        """Open the engine directory and poison its pools."""
        with _polygraphy_errors():
            executor: Any = self._load()
            executor.fill_pools(poison_byte(executor.spec.kv_cache_dtype))
        for note in executor.notes:
            G_LOGGER.warning(f"{self.name}: {note}")
        self._executor: PagedExecutor = executor

    @util.check_called_by("get_input_metadata")  # type: ignore[untyped-decorator]
    def get_input_metadata_impl(self) -> Any:
        """The step inputs of the engine: no pools and no scales."""
        metadata = TensorMetadata()
        for tensor in self._executor.spec.tensors():
            if tensor.role is Role.STEP_INPUT:
                shape = [dim if isinstance(dim, int) else None for dim in tensor.dims]
                metadata.add(tensor.name, np.dtype(tensor.dtype.numpy), shape)
        return metadata

    @util.check_called_by("infer")  # type: ignore[untyped-decorator]
    def infer_impl(self, feed_dict: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step.

        Returns:
            `logits` `[N, vocab_size]` float32 of the last token of each sequence row, 0 where
            the row is padding, and the arrays of `gather_kv`.
        """
        spec = self._executor.spec
        with _polygraphy_errors(remedy=_OWN_STEPS):
            inputs = step_inputs(spec, feed_dict)
        with _polygraphy_errors():
            start = time.perf_counter()
            logits = self._executor.step(inputs)
            self.inference_time = time.perf_counter() - start
            outputs = OrderedDict([(LOGITS, last_logits(spec, logits, inputs))])
            if self._with_kv:
                outputs.update(gather_kv(self._executor, inputs))
        return outputs

    @util.check_called_by("deactivate")  # type: ignore[untyped-decorator]
    def deactivate_impl(self) -> None:
        """Free everything."""
        self._executor.close()
        del self._executor


@contextlib.contextmanager
def _polygraphy_errors(*, remedy: str = "") -> Iterator[None]:
    """Our errors as Polygraphy reports its own: a message, with `remedy`, and no traceback."""
    try:
        yield
    except PagedTrtError as error:
        G_LOGGER.critical(f"{error}; {remedy}" if remedy else str(error))


def step_inputs(spec: EngineSpec, feeds: Mapping[str, Array]) -> StepInputs:
    """A feed as a step, once it is known that no kernel would leave its pool.

    Raises:
        SequenceError: lengths, offsets or ids are impossible.
        KvPoolError: a page is outside the pool.
    """
    ids = np.asarray(feeds[INPUT_IDS])[0]
    inputs = StepInputs(
        input_ids=ids,
        position_ids=np.asarray(feeds.get(POSITION_IDS, feeds[INPUT_IDS]))[0],
        page_table=np.asarray(feeds[PAGE_TABLE]),
        query_start_offsets=np.asarray(feeds[QUERY_START_OFFSETS]),
        past_lens=np.asarray(feeds[PAST_LENS]),
    )
    _check_shapes(spec, inputs)
    num_seqs, offsets = len(inputs.past_lens), inputs.query_start_offsets
    if num_seqs > spec.pool.max_batch_size or len(ids) > spec.max_token_rows:
        raise SequenceError(
            f"a step of {len(ids)} tokens and {num_seqs} sequence rows does not fit the engine's "
            f"{spec.max_token_rows} and {spec.pool.max_batch_size}"
        )
    if len(ids) and not 0 <= ids.min() <= ids.max() < spec.vocab_size:
        raise SequenceError(f"a token is outside the vocabulary of {spec.vocab_size}")
    is_ordered = len(offsets) == num_seqs + 1 and (np.diff(offsets) >= 0).all()
    if not is_ordered or offsets[0] != 0 or offsets[-1] > len(ids):
        raise SequenceError(
            f"`{QUERY_START_OFFSETS}` {offsets.tolist()} must rise from 0 to at most "
            f"{len(ids)} in {num_seqs + 1} entries"
        )
    _check_pages(spec, inputs)
    return inputs


def _check_shapes(spec: EngineSpec, inputs: StepInputs) -> None:
    rows, width = inputs.page_table.shape
    num_tokens, num_seqs = len(inputs.input_ids), len(inputs.past_lens)
    widest = spec.pool.max_pages_per_seq
    if (rows, len(inputs.position_ids)) != (num_seqs, num_tokens) or width > widest:
        raise SequenceError(
            f"the page table is {rows} x {width} for {num_seqs} sequence rows of at most {widest} "
            f"pages, and {num_tokens} tokens have {len(inputs.position_ids)} positions"
        )


def _check_pages(spec: EngineSpec, inputs: StepInputs) -> None:
    if (inputs.past_lens < 0).any():
        raise SequenceError(f"`{PAST_LENS}` {inputs.past_lens.tolist()} must be 0 or more")
    lengths = inputs.past_lens.astype(np.int64) + np.diff(inputs.query_start_offsets)
    for row, length in enumerate(lengths.tolist()):
        needed = inputs.page_table[row, : pages_for_tokens(length)].tolist()
        if len(needed) < pages_for_tokens(length):
            raise SequenceError(
                f"row {row} of the page table has {len(needed)} entries and {length} tokens"
            )
        # Keys and values are gathered from the entries behind the end too.
        spare = [page for page in inputs.page_table[row].tolist() if page != UNUSED_PAGE_ENTRY]
        for page in (*needed, *spare):
            if not spec.pool.owns(page):
                raise KvPoolError(
                    f"row {row} of the page table names page {page}, outside the pool of "
                    f"{spec.pool.num_pages} pages"
                )
    if (inputs.page_table == UNUSED_PAGE_ENTRY).all():
        raise SequenceError("the page table names no page, as in a step without a sequence")
