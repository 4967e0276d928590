"""Steps of padding, one of each kind that a server meets, for an executor that warms up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paged_trt.plugins.kv import UNUSED_PAGE_ENTRY, power_of_two_buckets, table_width_buckets
from paged_trt.plugins.tensors import EngineSpec
from paged_trt.runtime.executor import StepInputs, token_of_row


def prefill_steps(spec: EngineSpec) -> Iterator[StepInputs]:
    """One step for each power of two of T, up to the largest step of the engine.

    Args:
        spec: interface of the engine.
    """
    width = table_width_buckets(spec.pool)[-1]
    for num_tokens in power_of_two_buckets(spec.max_token_rows):
        # One token of one sequence is a decode step.
        if num_tokens > 1:
            yield padding_step(num_tokens=num_tokens, num_seqs=1, width=width)


def decode_steps(spec: EngineSpec, *, takes_tokens: bool = False) -> Iterator[StepInputs]:
    """One step for each (N, M) bucket.

    Args:
        spec: interface of the engine.
        takes_tokens: the ids stand for tokens of the step before.
    """
    for num_seqs in power_of_two_buckets(spec.pool.max_batch_size):
        for width in table_width_buckets(spec.pool):
            yield padding_step(
                num_tokens=num_seqs,
                num_seqs=num_seqs,
                width=width,
                token=token_of_row(0) if takes_tokens else 0,
            )


def padding_step(*, num_tokens: int, num_seqs: int, width: int, token: int = 0) -> StepInputs:
    """A step without a token of any sequence: it writes no page and its logits mean nothing.

    Args:
        num_tokens: T.
        num_seqs: N.
        width: M.
        token: id of every token.
    """
    return StepInputs(
        input_ids=np.full(num_tokens, token, np.int64),
        position_ids=np.zeros(num_tokens, np.int64),
        page_table=np.full((num_seqs, width), UNUSED_PAGE_ENTRY, np.int32),
        query_start_offsets=np.zeros(num_seqs + 1, np.int32),
        past_lens=np.zeros(num_seqs, np.int32),
    )
