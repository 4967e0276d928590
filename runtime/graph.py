"""CUDA graphs of decode steps: one per (N, M) bucket, captured after the bucket's first step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable

from paged_trt.plugins.device import Graph, Stream
from paged_trt.plugins.errors import ExecutionError

Bucket = tuple[int, int]
"""N and M."""
_LOG = logging.getLogger("paged_trt")


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    signature: Hashable
    graph: Graph | None


class DecodeGraphs:
    """Replays the work of a bucket.

    The first step of a bucket runs eagerly, because TensorRT may compile or allocate in it. Its
    work is captured right after it, before anything of the context changes, and replayed from
    the second step on. A graph that could not be captured, and bindings that are not those of
    the graph, fall back to eager steps, which are counted.

    Args:
        stream: where everything runs.

    Attributes:
        num_captures: graphs captured.
        num_replays: steps that a graph ran.
        num_fallbacks: steps that a graph should have run and did not.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._entries: dict[Bucket, _Entry] = {}
        self.num_captures = 0
        self.num_replays = 0
        self.num_fallbacks = 0

    def run(self, bucket: Bucket, signature: Hashable, execute: Callable[[], None]) -> None:
        """Run a step of a bucket.

        Args:
            bucket: N and M.
            signature: everything that is bound.
            execute: puts the work on the stream.

        Raises:
            ExecutionError: the step failed.
        """
        entry = self._entries.get(bucket)
        if entry is None:
            execute()
            self._entries[bucket] = _Entry(signature, self._capture(bucket, execute))
        elif entry.graph is None or entry.signature != signature:
            self.num_fallbacks += 1
            execute()
        else:
            self._stream.launch(entry.graph)
            self.num_replays += 1

    def close(self) -> None:
        """Destroy the graphs; a second call does nothing."""
        while self._entries:
            _, entry = self._entries.popitem()
            if entry.graph is not None:
                entry.graph.close()

    def _capture(self, bucket: Bucket, execute: Callable[[], None]) -> Graph | None:
        try:
            graph = self._stream.capture(execute)
        except ExecutionError as error:
            _LOG.warning(
                "decode steps of %d sequences and %d pages run without a CUDA graph: %s",
                *bucket,
                error,
            )
            return None
        self.num_captures += 1
        return graph
