"""What the two ends of a hand-over count, by transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.telemetry import Meter

TRANSPORT = ("transport",)
SPEEDS_GB_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class SenderSeries:
    def __init__(self, meter: Meter) -> None:
        self._bytes = meter.counter("kv_sent_bytes", "KV bytes acknowledged by receivers", TRANSPORT)
        self._seconds = meter.histogram(
            "kv_transfer_latency_seconds", "From reading a chunk to its acknowledgement", TRANSPORT
        )
        self._speed = meter.histogram(
            "kv_transfer_speed_gb_s", "A chunk's bytes by the seconds to its acknowledgement", TRANSPORT, SPEEDS_GB_S
        )
        self._in_flight = meter.gauge("kv_blocks_in_flight", "Blocks read and not acknowledged yet", TRANSPORT)
        self._failures = meter.counter("kv_send_failures", "Failed hand-overs", ("transport", "cause"))
        self._blocks: Counter[str] = Counter()

    @contextmanager
    def in_flight(self, transport: str, blocks: int) -> Iterator[None]:
        self._count(transport, blocks)
        try:
            yield
        finally:
            self._count(transport, -blocks)

    def sent(self, transport: str, size: int, seconds: float) -> None:
        """``size`` bytes were acknowledged ``seconds`` after their reading began."""
        self._bytes.add(size, transport=transport)
        self._seconds.observe(seconds, transport=transport)
        if seconds > 0:
            self._speed.observe(size / seconds / 1e9, transport=transport)

    def failed(self, transport: str, cause: str) -> None:
        self._failures.add(transport=transport, cause=cause)

    def _count(self, transport: str, change: int) -> None:
        self._blocks[transport] += change
        self._in_flight.set(self._blocks[transport], transport=transport)


class ReceiverSeries:
    def __init__(self, meter: Meter) -> None:
        self._bytes = meter.counter("kv_received_bytes", "KV bytes written into own blocks", TRANSPORT)
        self._converted = meter.counter(
            "kv_converted_bytes", "KV bytes that came in blocks of another layout", TRANSPORT
        )
        self._seconds = meter.histogram("kv_offer_seconds", "From an offer's arrival to its acknowledgement", TRANSPORT)
        self._failures = meter.counter(
            "kv_receive_failures", "Refused or failed offers and confirmations", ("transport", "cause")
        )

    def converted(self, transport: str, size: int) -> None:
        self._converted.add(size, transport=transport)

    def received(self, transport: str, size: int, seconds: float) -> None:
        self._bytes.add(size, transport=transport)
        self._seconds.observe(seconds, transport=transport)

    def failed(self, transport: str, cause: str) -> None:
        self._failures.add(transport=transport, cause=cause)
