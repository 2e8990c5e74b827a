"""Spans behind the ``Tracer`` protocol, through OpenTelemetry's API: a no-op until a provider is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace


class OpenTelemetryTracer:
    """Names follow the gen_ai conventions where they have one."""

    def __init__(self, service: str) -> None:
        self._tracer = trace.get_tracer(f"baton.{service}")

    @contextmanager
    def span(self, name: str, **attributes: str | int | float) -> Iterator[None]:
        with self._tracer.start_as_current_span(name, attributes=attributes):
            yield
