"""Prometheus metrics of an asynchronous session; needs the extra `serve`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paged_trt.runtime.requests import GenerationRequest, TokenEvent
from paged_trt.runtime.results import SessionStats

GAUGES: Final = {
    "pages_in_use": "KV pages with a reference",
    "pages_free": "KV pages that can be handed out",
    "pages_retained": "Free KV pages whose content a later prompt may reuse",
    "sequences": "Sequences that have not ended",
    "waiting": "Sequences without a slot",
}
"""Fields of SessionStats that go up and down."""
COUNTERS: Final = {
    "pages_evicted": "Retained KV pages that were handed out for something else",
    "prefill_steps": "Steps that ran prompt tokens",
    "mixed_steps": "Steps that ran prompt tokens and decode rows",
    "decode_steps": "Steps of one token per sequence",
    "failed_steps": "Steps that raised",
    "prompt_tokens": "Prompt tokens of admitted sequences",
    "cached_tokens": "Prompt tokens whose keys and values were reused",
    "new_tokens": "Tokens generated",
    "preemptions": "Times that a sequence gave its pages to an older one",
    "finished": "Sequences that ended by an end token or their limit",
    "failed": "Sequences that ended with an error",
    "cancelled": "Sequences that were released before their end",
}
"""Fields of SessionStats that only grow."""
_FIRST_TOKEN: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NEXT_TOKEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Times and counts of requests; an observer of an `AsyncSession`.

    Args:
        registry: where the metrics are; `prometheus_client.generate_latest` reads it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open: dict[str, tuple[float, float | None]] = {}
        self._requests = Counter(
            "paged_trt_requests",
            "Requests that ended, by their finish reason",
            ["finish_reason"],
            registry=registry,
        )
        times = [
            ("time_to_first_token", "From submission to the first token", _FIRST_TOKEN),
            ("inter_token", "From one token of a request to its next", _NEXT_TOKEN),
            ("request", "From submission to the end", _REQUEST),
        ]
        self._first, self._next, self._whole = (
            Histogram(f"paged_trt_{name}_seconds", text, buckets=buckets, registry=registry)
            for name, text, buckets in times
        )
        self._registry = registry

    def watch(self, stats: Callable[[], SessionStats]) -> None:
        """Export the numbers of a session, read whenever the metrics are.

        Args:
            stats: such as `AsyncSession.stats`.
        """
        self._registry.register(_StatsCollector(stats))

    def opened(self, request: GenerationRequest) -> None:
        """A request was submitted."""
        self._open[request.request_id] = (time.perf_counter(), None)

    def event(self, event: TokenEvent) -> None:
        """A request got a token, or ended."""
        now = time.perf_counter()
        begin, last = self._open.get(event.request_id, (now, None))
        if event.token is not None:
            if last is None:
                self._first.observe(now - begin)
            else:
                self._next.observe(now - last)
            self._open[event.request_id] = (begin, now)
        if event.finish_reason is not None:
            self._open.pop(event.request_id, None)
            self._requests.labels(event.finish_reason).inc()
            self._whole.observe(now - begin)


class _StatsCollector(Collector):
    def __init__(self, stats: Callable[[], SessionStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """One metric per field."""
        stats = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"paged_trt_{name}", text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"paged_trt_{name}", text, value=getattr(stats, name))
