"""What one server is busy with: its requests in flight, whether it still lets new ones in, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.clock import Clock
from baton.core.errors import BatonError, Cancelled, Draining
from baton.core.telemetry import Meter


class Calls:
    """gRPC's own graceful stop cancels long streams, so we count requests and drain by ourselves.

    ``closing`` is set when the server is about to stop: streams that live as long as the server end then.
    """

    def __init__(self, meter: Meter, clock: Clock) -> None:
        self._clock = clock
        self._in_flight = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.closing = asyncio.Event()
        self._requests = meter.counter("rpc_requests", "Requests begun", ("method",))
        self._errors = meter.counter("rpc_errors", "Requests that ended with an error", ("method", "reason"))
        self._duration = meter.histogram("rpc_duration_seconds", "From request to end of answer", ("method",))

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while the block runs. Draining once draining has begun."""
        if self._draining:
            raise Draining("this server is draining: it takes no new requests")
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    @contextmanager
    def measured(self, method: str) -> Iterator[None]:
        """Count, time and classify a request of ``method``, one of the served ones (a bounded label)."""
        self._requests.add(method=method)
        begun = self._clock.now()
        try:
            yield
        except BatonError as error:
            self._errors.add(method=method, reason=error.reason)
            raise
        except asyncio.CancelledError:
            self._errors.add(method=method, reason=Cancelled.reason)
            raise
        except Exception:
            self._errors.add(method=method, reason=BatonError.reason)
            raise
        finally:
            self._duration.observe(self._clock.now() - begun, method=method)

    def refuse_new(self) -> None:
        self._draining = True

    async def drained(self, timeout: float) -> bool:
        """Wait until no request is in flight, at most ``timeout`` seconds. False: some are left."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
