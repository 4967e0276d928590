"""Steps of a paged engine as data, for `polygraphy run --data-loader-script`.

Random tables and lengths say nothing of a paged engine. These steps come out of the runtime's
own scheduler: prompts around whole pages, prefilled whole and in chunks, then decoded, in
ragged batches on shuffled pages. Next tokens are random and not those of a model, so that the
steps are fixed before anything runs and every runner gets the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paged_trt.plugins.manifest import read_manifest
from paged_trt.plugins.tensors import (
    INPUT_IDS,
    PAGE_TABLE,
    PAST_LENS,
    POSITION_IDS,
    QUERY_START_OFFSETS,
    EngineSpec,
)
from paged_trt.runtime.executor import StepInputs
from paged_trt.runtime.recorded_steps import record_steps
from paged_trt.runtime.scenarios import default_prompt_lens, make_scenarios, random_prompts

Array = npt.NDArray[Any]
HISTORY_IDS: Final = "history_ids"
"""`[1, S]` int64: all tokens of each sequence up to and with this step."""
HISTORY_OFFSETS: Final = "history_offsets"
"""`[N + 1]` int32: where each sequence begins in the history."""
HISTORY_POSITIONS: Final = "history_positions"
"""`[1, S]` int64: position of each token of the history."""


def load_steps(
    engine_dir: Path | str,
    *,
    prompt_lens: Sequence[int] | None = None,
    num_new_tokens: int = 3,
    seed: int = 0,
) -> Iterator[dict[str, Array]]:
    """Feed dictionaries of consecutive steps.

    A step holds what an engine reads besides its pools, and the history of its sequences for a
    model that has no pools.

    Args:
        engine_dir: whose limits and vocabulary count; only its manifest is read.
        prompt_lens: tokens of each prompt; None takes lengths around whole pages.
        num_new_tokens: tokens after each prompt, one of them in the prefill step.
        seed: of the tokens and of the page order.

    Raises:
        ManifestError: `engine_dir` is no engine directory.
        SequenceError: a prompt does not fit the engine.
    """
    spec = read_manifest(Path(engine_dir)).spec
    lengths = default_prompt_lens(spec, num_new_tokens) if prompt_lens is None else prompt_lens
    prompts = random_prompts(spec, lengths, seed=seed)
    for scenario in make_scenarios(spec, prompts, num_new_tokens=num_new_tokens):
        histories: dict[int, Array] = {}
        for inputs in record_steps(spec, scenario, seed=seed):
            yield dict(_feeds(spec, inputs, histories))


def _feeds(
    spec: EngineSpec, inputs: StepInputs, histories: dict[int, Array]
) -> Iterator[tuple[str, Array]]:
    """Names and arrays of one step; `histories`, tokens by first page, is brought up to date."""
    yield INPUT_IDS, inputs.input_ids[None]
    yield PAGE_TABLE, inputs.page_table
    yield QUERY_START_OFFSETS, inputs.query_start_offsets
    yield PAST_LENS, inputs.past_lens
    rows = list(_histories(inputs, histories))
    ends = np.cumsum([0, *map(len, rows)])
    # One token per row would be a decode step, and these are whole sequences.
    padding = np.zeros(int(ends[-1] == len(rows)), np.int64)
    yield HISTORY_IDS, np.concatenate([*rows, padding])[None]
    yield HISTORY_OFFSETS, ends.astype(np.int32)
    if spec.reads_position_ids:
        yield POSITION_IDS, inputs.position_ids[None]
        positions = [np.arange(len(row)) for row in rows]
        yield HISTORY_POSITIONS, np.concatenate([*positions, padding])[None]


def _histories(inputs: StepInputs, histories: dict[int, Array]) -> Iterator[Array]:
    """All tokens of each row, with those of the step."""
    offsets = inputs.query_start_offsets
    for row, past_len in enumerate(inputs.past_lens):
        new = inputs.input_ids[offsets[row] : offsets[row + 1]]
        if len(new):
            # No two live sequences share a page, so that the first one names the sequence.
            first = int(inputs.page_table[row, 0])
            old = histories[first] if past_len else new[:0]
            new = histories[first] = np.concatenate([old, new])
        yield new
