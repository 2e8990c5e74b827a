"""What the domain code may say about itself; ``baton.telemetry`` binds it to Prometheus, traces and JSON logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final, Protocol

_log_fields: ContextVar[Mapping[str, str]] = ContextVar("baton_log_fields", default=MappingProxyType({}))


@contextmanager
def log_context(**fields: str) -> Iterator[None]:
    """Add fields (request_id, tenant, ...) to every line logged inside the block, and in tasks started there."""
    before = _log_fields.get()
    _log_fields.set({**before, **fields})
    try:
        yield
    finally:
        _log_fields.set(before)  # not reset: a stream that nobody closed is ended by the loop, in another context


def log_fields() -> Mapping[str, str]:
    """What the blocks around this code say of its log lines."""
    return _log_fields.get()


class Counter(Protocol):
    def add(self, amount: float = 1.0, **labels: str) -> None: ...


class Gauge(Protocol):
    def set(self, value: float, **labels: str) -> None: ...


class Histogram(Protocol):
    def observe(self, value: float, **labels: str) -> None: ...


class Meter(Protocol):
    """Makes instruments. Names have no prefix ("time_to_first_token_seconds"); label names are fixed at creation."""

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter: ...

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge: ...

    def histogram(
        self, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] | None = None
    ) -> Histogram: ...


class Tracer(Protocol):
    """Spans follow a request from process to process: a caller sends its ``traceparent``, the callee's span has it as
    ``parent``. It is the W3C trace context of that name; empty for none."""

    def span(self, name: str, *, parent: str = "", **attributes: str | int | float) -> AbstractContextManager[None]:
        """A span around a piece of work, child of ``parent`` or else of the current one."""
        ...

    def traceparent(self) -> str:
        """The current span, for another process."""
        ...


class _Silent:
    def add(self, amount: float = 1.0, **labels: str) -> None: ...

    def set(self, value: float, **labels: str) -> None: ...

    def observe(self, value: float, **labels: str) -> None: ...


class SilentMeter:
    """Counts nothing: for tests and tools that expose no metrics."""

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return _Silent()

    def gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
        return _Silent()

    def histogram(
        self, name: str, help: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] | None = None
    ) -> Histogram:
        return _Silent()


class SilentTracer:
    def span(self, name: str, *, parent: str = "", **attributes: str | int | float) -> AbstractContextManager[None]:
        return nullcontext()

    def traceparent(self) -> str:
        return ""


SILENT_TRACER: Final = SilentTracer()
