"""Times launches on a device: a CUDA graph of many of them, replayed between two events.

Launch gaps of the host are not in it. What is timed may be anything that launches on the
graphs' stream: `DriverGraphs` records with the driver, and a benchmark of other libraries brings
its own `Graphs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from paged_trt.plugins import cuda
from paged_trt.plugins.cuda import check
from paged_trt.plugins.device import Graph, Stream

Call = Callable[[], None]
REPLAYS: Final = 7
GRAPH_MICROSECONDS: Final = 2000.0
"""A graph lasts about this long, so that starting it does not count."""
MOST_CALLS: Final = 240


class Replay(Protocol):
    """A recorded graph."""

    def __call__(self) -> float:
        """Replay it once; its microseconds."""

    def close(self) -> None:
        """Give it back."""


class Graphs(Protocol):
    """Records calls and replays them."""

    def record(self, calls: Sequence[Call]) -> Replay:
        """A graph of `calls`, in order; nothing of it has run yet."""

    def run(self, call: Call) -> float:
        """Run one call, not recorded; its microseconds, the host's share included."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds of one call.

    Attributes:
        median: of the replays.
        minimum: of the replays.
        maximum: of the replays.
        calls: calls in the graph.
        replays: replays that count.
    """

    median: float
    minimum: float
    maximum: float
    calls: int
    replays: int


def measure(
    graphs: Graphs,
    calls: Sequence[Call],
    *,
    replays: int = REPLAYS,
    graph_microseconds: float = GRAPH_MICROSECONDS,
    estimate: float | None = None,
) -> Times:
    """Time of one call.

    Args:
        graphs: records and replays.
        calls: the same work on different data, so that no cache holds what the next one reads;
            a graph runs each of them equally often.
        replays: timed replays, after one that is not.
        graph_microseconds: a graph has enough calls to last about this long.
        estimate: microseconds of a call, to choose their number by; None times one, with the
            host's share, which makes the graphs of short calls shorter.

    Raises:
        PagedTrtError: the device failed.
    """
    (times,) = measure_in_turn(
        graphs,
        [calls],
        replays=replays,
        graph_microseconds=graph_microseconds,
        estimate=estimate,
    )
    return times


def measure_in_turn(
    graphs: Graphs,
    works: Sequence[Sequence[Call]],
    *,
    replays: int = REPLAYS,
    graph_microseconds: float = GRAPH_MICROSECONDS,
    estimate: float | None = None,
) -> list[Times]:
    """Times of several works whose replays take turns: a drift of the clocks meets all of them.

    Args:
        graphs: records and replays.
        works: of each, calls as `measure` takes them.
        replays: timed replays of each, after one that is not.
        graph_microseconds: as in `measure`.
        estimate: as in `measure`, of every work.

    Raises:
        PagedTrtError: the device failed.
    """
    with contextlib.ExitStack() as stack:
        recorded = []
        for calls in works:
            replay, count = _record(graphs, calls, graph_microseconds, estimate)
            stack.callback(replay.close)
            recorded.append((replay, count))
        for replay, _ in recorded:
            replay()
        rounds = [[replay() / count for replay, count in recorded] for _ in range(replays)]
    return [
        Times(
            median=statistics.median(times),
            minimum=min(times),
            maximum=max(times),
            calls=count,
            replays=replays,
        )
        for times, (_, count) in zip(zip(*rounds, strict=True), recorded, strict=True)
    ]


def _record(
    graphs: Graphs, calls: Sequence[Call], graph_microseconds: float, estimate: float | None
) -> tuple[Replay, int]:
    """A graph of enough calls, and their number."""
    for call in calls[:2]:
        graphs.run(call)
    once = graphs.run(calls[-1]) if estimate is None else estimate
    wanted = max(1, min(MOST_CALLS, math.ceil(graph_microseconds / max(once, 1.0))))
    rounds = max(1, math.ceil(wanted / len(calls)))
    return graphs.record([*calls] * rounds), rounds * len(calls)


class _DriverReplay:
    def __init__(self, graphs: DriverGraphs, stream: Stream, graph: Graph) -> None:
        self._graphs, self._stream, self._graph = graphs, stream, graph

    def __call__(self) -> float:
        return self._graphs.run(lambda: self._stream.launch(self._graph))

    def close(self) -> None:
        self._graph.close()


class DriverGraphs:
    """Graphs of launches on one stream, recorded by the driver.

    Args:
        stream: where the calls launch.
        driver: module of driver calls; None takes `cuda.driver()`.
    """

    def __init__(self, stream: Stream, *, driver: Any = None) -> None:
        self._driver: Any = cuda.driver() if driver is None else driver
        self._stream = stream
        self._begin, self._end = (
            check(self._driver.cuEventCreate(0), "cuEventCreate") for _ in range(2)
        )

    def record(self, calls: Sequence[Call]) -> Replay:
        """A graph of `calls`, in order; nothing of it has run yet."""

        def all_of_them() -> None:
            for call in calls:
                call()

        return _DriverReplay(self, self._stream, self._stream.capture(all_of_them))

    def run(self, call: Call) -> float:
        """Run one call, not recorded; its microseconds."""
        handle = self._stream.handle
        check(self._driver.cuEventRecord(self._begin, handle), "cuEventRecord")
        call()
        check(self._driver.cuEventRecord(self._end, handle), "cuEventRecord")
        self._stream.synchronize()
        elapsed = check(
            self._driver.cuEventElapsedTime(self._begin, self._end), "cuEventElapsedTime"
        )
        return float(elapsed) * 1e3

    def close(self) -> None:
        """Destroy the events."""
        for event in (self._begin, self._end):
            check(self._driver.cuEventDestroy(event), "cuEventDestroy")
