"""An engine's metrics among those of Ray, which a Prometheus server scrapes on every host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.serve import metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class RayMetrics:
    """Copies samples to Ray, which adds `ray_` to their names and the replica to their labels.

    Ray takes what a number has become since it was told last; a sample of ours is a sum already.
    So all are gauges there, with the names and values that `GET /metrics` of one server gives.

    Args:
        registry: where the metrics of the engine are.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._gauges: dict[str, Any] = {}

    def publish(self) -> None:
        """Tell Ray the samples as they are now."""
        for family in self._registry.collect():
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    gauge = self._gauges[sample.name] = metrics.Gauge(
                        sample.name, description=family.documentation, tag_keys=tuple(sample.labels)
                    )
                gauge.set(sample.value, tags=dict(sample.labels))
