"""Prometheus instruments behind the ``Meter`` protocol. Every series begins with ``baton_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client import Histogram as PrometheusHistogram

from baton.core.telemetry import Counter, Gauge, Histogram

NAMESPACE = "baton"
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Counter:
    def __init__(self, metric: PrometheusCounter) -> None:
        self._metric = metric

    def add(self, amount: float = 1.0, **labels: str) -> None:
        (self._metric.labels(**labels) if labels else self._metric).inc(amount)


class _Gauge:
    def __init__(self, metric: PrometheusGauge) -> None:
        self._metric = metric

    def set(self, value: float, **labels: str) -> None:
        (self._metric.labels(**labels) if labels else self._metric).set(value)


class _Histogram:
    def __init__(self, metric: PrometheusHistogram) -> None:
        self._metric = metric

    def observe(self, value: float, **labels: str) -> None:
        (self._metric.labels(**labels) if labels else self._metric).observe(value)


class PrometheusMeter:
    """Instruments in a registry of their own, so that two services in one process do not collide."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return _Counter(PrometheusCounter(name, help, labels, namespace=NAMESPACE, registry=self._registry))

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
        return _Gauge(PrometheusGauge(name, help, labels, namespace=NAMESPACE, registry=self._registry))

    def histogram(
        self, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] | None = None
    ) -> Histogram:
        edges = buckets or SECONDS_BUCKETS
        return _Histogram(
            PrometheusHistogram(name, help, labels, namespace=NAMESPACE, registry=self._registry, buckets=edges)
        )

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)
