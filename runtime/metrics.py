"""What a Prometheus server scrapes: pages, sequences and steps of a core, and request latencies.

Needs prometheus_client, of the extra `serve`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from paged_trt.plugins.errors import PackageMissingError
from paged_trt.runtime.core import EngineCore
from paged_trt.runtime.requests import GenerationRequest, TokenEvent

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_GAUGES: Final = {
    "pages_in_use": "Pages with a reference",
    "pages_free": "Pages that can be handed out, retained ones included",
    "pages_retained": "Free pages whose content a later prompt may reuse",
    "sequences": "Sequences that have not ended, waiting ones included",
    "waiting": "Sequences without a slot",
}
_COUNTERS: Final = {
    "pages_evicted": "Retained pages that were handed out for something else",
    "prefill_steps": "Steps that ran prompt tokens",
    "mixed_steps": "Prefill steps that ran decode rows too",
    "decode_steps": "Steps of one token per sequence",
    "failed_steps": "Steps that raised",
    "prompt_tokens": "Prompt tokens of admitted sequences",
    "cached_tokens": "Prompt tokens whose keys and values were reused",
    "new_tokens": "Tokens generated",
    "preemptions": "Times that a sequence gave its pages to an older one",
}
_EXECUTOR_COUNTERS: Final = {
    "graph_replays": "Decode steps that a CUDA graph ran",
    "graph_captures": "CUDA graphs captured",
    "graph_fallbacks": "Decode steps that a CUDA graph should have run and did not",
    "table_copies": "Host-to-device copies of the page table",
}
_FIRST_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclasses.dataclass(slots=True)
class _Times:
    opened: float
    last_token: float | None = None


class Metrics:
    """Metrics of one engine core, and of the sessions that it observes.

    Args:
        core: whose pages, sequences and steps are told.
        registry: where the metrics are registered; one of its own when left out.

    Attributes:
        registry: where the metrics are registered.

    Raises:
        PackageMissingError: prometheus_client is not installed.
    """

    def __init__(self, core: EngineCore, *, registry: CollectorRegistry | None = None) -> None:
        client = _import_client()
        self._client = client
        self._core = core
        self.registry: CollectorRegistry = registry or client.CollectorRegistry()
        self._lock = threading.Lock()
        self._times: dict[str, _Times] = {}
        self._first_token = client.Histogram(
            "paged_trt_time_to_first_token_seconds",
            "From the submission of a request to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._between_tokens = client.Histogram(
            "paged_trt_inter_token_seconds",
            "Between two tokens of a request",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._requests = client.Counter(
            "paged_trt_requests",
            "Requests that ended, by their finish reason",
            ["finish_reason"],
            registry=self.registry,
        )
        self.registry.register(self)

    def opened(self, request: GenerationRequest) -> None:
        """A request was submitted."""
        with self._lock:
            self._times[request.request_id] = _Times(time.monotonic())

    def event(self, event: TokenEvent) -> None:
        """A request got a token, or ended."""
        now = time.monotonic()
        with self._lock:
            times = self._times.get(event.request_id)
            if event.finish_reason is not None:
                self._times.pop(event.request_id, None)
        if event.finish_reason is not None:
            self._requests.labels(event.finish_reason).inc()
        if times is None or event.token is None:
            return
        if times.last_token is None:
            self._first_token.observe(now - times.opened)
        else:
            self._between_tokens.observe(now - times.last_token)
        times.last_token = now

    def text(self) -> tuple[bytes, str]:
        """All metrics as a scrape gets them, and their content type."""
        from prometheus_client import exposition

        return exposition.generate_latest(self.registry), exposition.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """Counts of the core and of its executor, as they are now."""
        stats = self._core.stats()
        for name, text in _GAUGES.items():
            yield self._family("Gauge", name, text, getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield self._family("Counter", name, text, getattr(stats, name))
        read = getattr(self._core.executor, "stats", None)
        executor = read() if read is not None else None
        for name, text in _EXECUTOR_COUNTERS.items() if executor is not None else ():
            yield self._family("Counter", name, text, getattr(executor, name))

    def _family(self, kind: str, name: str, text: str, value: int) -> Any:
        make = getattr(self._client.metrics_core, f"{kind}MetricFamily")
        return make(f"paged_trt_{name}", text, value=value)


def _import_client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.metrics_core
    except ImportError as error:
        raise PackageMissingError(
            "metrics need prometheus_client, which is not installed; "
            '`pip install "paged-trt[serve]"`'
        ) from error
    return prometheus_client
