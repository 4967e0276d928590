"""Polygraphy's view of a comparison: two runners, a data loader and a comparison function.

Polygraphy is optional: this module is imported by `runtime.compare` only, inside a function.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy import util
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from paged_trt.plugins.errors import SpecMismatchError
from paged_trt.runtime.comparison import SequenceResult, Tolerance, compare_sequence
from paged_trt.runtime.dense import Decoder, Generation, greedy
from paged_trt.runtime.scenarios import Scenario

Array = npt.NDArray[Any]
Generate = Callable[[Scenario], Sequence[Generation]]
"""Runs one scenario in ragged batches; a generation per prompt, all steps filled."""

_TOKEN_IDS, _PROMPT_LENS = "token_ids", "prompt_lens"
_NUM_NEW_TOKENS, _PREFILL_CHUNK = "num_new_tokens", "prefill_chunk"
_TOKENS, _LOGITS = "tokens", "logits"
_WHOLE = 0  # `prefill_chunk` of a prefill in one piece: a feed has no None


def feed_dict(scenario: Scenario) -> dict[str, Array]:
    """A scenario as Polygraphy carries it: int64 vectors."""
    lengths = [len(prompt) for prompt in scenario.prompts]
    feeds = {
        _TOKEN_IDS: np.concatenate(scenario.prompts),
        _PROMPT_LENS: np.array(lengths),
        _NUM_NEW_TOKENS: np.array([scenario.num_new_tokens]),
        _PREFILL_CHUNK: np.array([scenario.prefill_chunk or _WHOLE]),
    }
    return OrderedDict((name, values.astype(np.int64)) for name, values in feeds.items())


def scenario_of(feeds: Mapping[str, Array]) -> Scenario:
    """Inverse of `feed_dict`."""
    ends = np.cumsum(feeds[_PROMPT_LENS])[:-1]
    chunk = int(feeds[_PREFILL_CHUNK][0])
    return Scenario(
        prompts=tuple(np.split(np.asarray(feeds[_TOKEN_IDS]), ends)),
        num_new_tokens=int(feeds[_NUM_NEW_TOKENS][0]),
        prefill_chunk=None if chunk == _WHOLE else chunk,
    )


class _ScenarioRunner(BaseRunner):  # type: ignore[misc] # Polygraphy has no types
    """Base of both runners: same inputs, same outputs, one generation per prompt."""

    @util.check_called_by("get_input_metadata")  # type: ignore[untyped-decorator]
    def get_input_metadata_impl(self) -> Any:
        """Four int64 vectors; see `feed_dict`."""
        metadata = TensorMetadata()
        for name in (_TOKEN_IDS, _PROMPT_LENS, _NUM_NEW_TOKENS, _PREFILL_CHUNK):
            metadata.add(name, np.dtype(np.int64), (None,))
        return metadata

    @util.check_called_by("infer")  # type: ignore[untyped-decorator]
    def infer_impl(self, feed_dict: Mapping[str, Array]) -> dict[str, Array]:
        """Tokens `[num_seqs, num_new_tokens]` and logits `[.., .., vocab_size]`."""
        scenario = scenario_of(feed_dict)
        start = time.perf_counter()
        generations = self.generate(scenario)
        self.inference_time = time.perf_counter() - start
        return OrderedDict(
            [
                (_TOKENS, np.stack([each.tokens for each in generations])),
                (_LOGITS, np.stack([each.logits for each in generations])),
            ]
        )

    def generate(self, scenario: Scenario) -> Sequence[Generation]:
        """Run one scenario."""
        raise NotImplementedError


class DenseRunner(_ScenarioRunner):
    """The un-rewritten model, one sequence at a time.

    Args:
        decoder: the model.

    Attributes:
        notes: what a report must say about it.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(name="dense")
        self._decoder = decoder
        # A chunk size means nothing here, so that every scenario asks for the same sequences.
        self._known: dict[tuple[bytes, int], Generation] = {}
        self.notes = decoder.notes

    def generate(self, scenario: Scenario) -> Sequence[Generation]:
        """Run one scenario; a prompt that was run before is not run again."""
        generations = []
        for prompt in scenario.prompts:
            key = (prompt.tobytes(), scenario.num_new_tokens)
            if key not in self._known:
                self._known[key] = greedy(self._decoder, prompt, scenario.num_new_tokens)
            generations.append(self._known[key])
        return generations


class PagedRunner(_ScenarioRunner):
    """The engine, all sequences in ragged batches.

    Args:
        generate: runs a scenario; what it uses stays open.
    """

    def __init__(self, generate: Generate) -> None:
        super().__init__(name="paged")
        self._generate = generate

    def generate(self, scenario: Scenario) -> Sequence[Generation]:
        """Run one scenario."""
        return self._generate(scenario)


class _Rule:
    """`compare_func` of Polygraphy: keeps what each sequence gave, iteration by iteration."""

    def __init__(self, scenarios: Sequence[Scenario], tolerance: Tolerance) -> None:
        self._pending = iter(scenarios)
        self._tolerance = tolerance
        self.results: list[tuple[SequenceResult, ...]] = []

    def __call__(self, dense: Mapping[str, Array], paged: Mapping[str, Array]) -> dict[str, bool]:
        scenario = next(self._pending)
        widths = dense[_LOGITS].shape[-1], paged[_LOGITS].shape[-1]
        if widths[0] != widths[1]:
            raise SpecMismatchError(
                "vocab_size",
                widths[1],
                widths[0],
                where="logits of the model",
                remedy="pass the model that the engine was built from",
            )
        ours, theirs = (zip(each[_TOKENS], each[_LOGITS], strict=True) for each in (dense, paged))
        results = tuple(
            compare_sequence(left, right, prompt_len=len(prompt), tolerance=self._tolerance)
            for prompt, left, right in zip(scenario.prompts, ours, theirs, strict=True)
        )
        self.results.append(results)
        return OrderedDict(
            (f"sequence {index}", result.passed) for index, result in enumerate(results)
        )


def run(
    dense: DenseRunner, generate: Generate, scenarios: Sequence[Scenario], *, tolerance: Tolerance
) -> list[tuple[SequenceResult, ...]]:
    """Run all scenarios on both and compare them; a tuple of results per scenario."""
    rule = _Rule(scenarios, tolerance)

    def load() -> Iterator[dict[str, Array]]:
        yield from map(feed_dict, scenarios)

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        results = Comparator.run([dense, PagedRunner(generate)], data_loader=load())
        Comparator.compare_accuracy(results, compare_func=rule)
    return rule.results
