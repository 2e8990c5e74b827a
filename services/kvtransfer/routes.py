"""Which transport a sender takes to which receiver: the best that both have and that works."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from baton.core.clock import Clock
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.telemetry import Meter
from baton.core.types import KvFormat, KvHandshake
from services.kvtransfer.transport import Outgoing, TransportName, spoken

log = logging.getLogger(__name__)


class Routes:
    """``transports`` best first; ``layout`` is that of the blocks here: to a receiver of another one only transports
    lead that convert. One that failed towards a receiver is left alone for ``rest_seconds``."""

    def __init__(
        self, transports: Sequence[Outgoing], layout: KvFormat, *, rest_seconds: float, meter: Meter, clock: Clock
    ) -> None:
        self._transports = transports
        self._layout = layout
        self._rest = rest_seconds
        self._clock = clock
        self._resting: dict[tuple[int, TransportName], float] = {}
        self._fallbacks = meter.counter(
            "kv_transport_fallbacks", "Times that a transport failed and another one was taken", ("from", "to", "cause")
        )

    async def choose(self, receiver: KvHandshake) -> Outgoing:
        """The transport to take now, open. TransferRejected when the two workers have none in common."""
        for transport in self._open_to(receiver):
            try:
                await transport.open(receiver)
            except TransportUnavailable as error:
                self.fail(receiver, transport, error, cause="open")
            else:
                return transport
        mine = ", ".join(transport.name for transport in self._transports)
        raise TransferRejected(f"transports: here {mine}, {receiver.worker_id} has {', '.join(spoken(receiver))}")

    def fail(
        self, receiver: KvHandshake, transport: Outgoing, error: TransportUnavailable, *, cause: str = "offer"
    ) -> None:
        """Leave ``transport`` alone for a while. Counted and logged once for all that met the same failure.

        The last one that is left raises ``error`` instead: there is nothing to fall back to.
        """
        now, key = self._clock.now(), (receiver.epoch, transport.name)
        if self._resting.get(key, now) > now:
            return
        transport.forget(receiver)
        left = next((other for other in self._open_to(receiver) if other is not transport), None)
        if left is None:
            raise error
        self._resting = {each: until for each, until in self._resting.items() if until > now}
        self._resting[key] = now + self._rest
        labels = {"from": transport.name.value, "to": left.name.value}
        self._fallbacks.add(1, **labels, cause=cause)
        details = {"peer": receiver.worker_id, "cause": cause, "error": error.message}
        log.warning("transport fallback", extra={**labels, **details})

    def _open_to(self, receiver: KvHandshake) -> Iterator[Outgoing]:
        now, theirs = self._clock.now(), spoken(receiver)
        for transport in self._transports:
            if (
                transport.name in theirs
                and (transport.name.converts or receiver.format == self._layout)
                and transport.reaches(receiver)
                and self._resting.get((receiver.epoch, transport.name), now) <= now
            ):
                yield transport
