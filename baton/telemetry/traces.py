"""Spans behind the ``Tracer`` protocol, through OpenTelemetry's API.

Whoever runs Baton installs the provider that records and exports them (``opentelemetry-instrument python -m gateway``,
say). Without one nothing is recorded, and a trace that a caller began still passes through all hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT: Final = "traceparent"


class OpenTelemetryTracer:
    """Satisfies ``Tracer``. ``service`` is the name of the instrumented part."""

    def __init__(self, service: str) -> None:
        self._tracer = trace.get_tracer(f"baton.{service}")
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, *, parent: str = "", **attributes: str | int | float) -> Iterator[None]:
        """Errors that leave the block are recorded in the span. A ``parent`` that is none begins a trace."""
        context = self._propagator.extract({TRACEPARENT: parent}) if parent else None
        with self._tracer.start_as_current_span(name, context=context, attributes=attributes):
            yield

    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get(TRACEPARENT, "")
