"""A process's entry in the registry: renewed by a heartbeat, gone when the process is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.core.api import RegistryApi
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import StateUnavailable
from baton.core.types import EngineStats, ModelCard, ProcessRecord, TierStats, WorkerState
from baton.state.outage import RegistryOutage

log = logging.getLogger(__name__)


class Registration:
    """Keeps ``record`` in the registry. Redis away: the process runs on and keeps trying; both ends are logged once.

    A Redis that comes back empty has the record again after one heartbeat.
    """

    def __init__(
        self, registry: RegistryApi, record: ProcessRecord, clock: Clock, *, interval: float, lease: float
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._interval = interval
        self._lease = lease
        self._record = record
        self._stats: Callable[[], EngineStats] = EngineStats
        self._tier: Callable[[], TierStats | None] = lambda: None
        self._degraded: Callable[[], str | None] = lambda: None
        self._measured = (clock.now(), 0)  # when, and tokens generated until then
        self._outage = RegistryOutage(log, "carrying on")

    @property
    def record(self) -> ProcessRecord:
        """As last written, or tried to be."""
        return self._record

    def why_not_ready(self) -> str | None:
        """None when the process takes requests, else its state."""
        return None if self._record.state is WorkerState.READY else self._record.state.value

    def why_degraded(self) -> str | None:
        """What the process does without for now; None for nothing."""
        return self._degraded()

    def describe_degraded(self, why: Callable[[], str | None]) -> None:
        """From now on /readyz says so. The registry does not: it is in the same Redis as what is lacking."""
        self._degraded = why

    def publish_http(self, address: str) -> None:
        """Where /metrics, /healthz and /readyz are."""
        self._record = replace(self._record, http_address=address)

    def describe(self, card: ModelCard, stats: Callable[[], EngineStats]) -> None:
        """The model is loaded: from now on the record says what is served and how busy it is."""
        self._record = replace(self._record, card=card)
        self._stats = stats
        self._measured = (self._clock.now(), stats().tokens_generated)

    def describe_tier(self, stats: Callable[[], TierStats]) -> None:
        """From now on the record says what the cache tier holds."""
        self._tier = stats

    async def set_state(self, state: WorkerState) -> None:
        """Tell everyone now, not at the next heartbeat."""
        log.info("state", extra={"state": state.value})
        self._record = replace(self._record, state=state)
        await self.renew()

    async def renew(self) -> None:
        beats = self._record.beats + 1
        stats, tier, rate = self._stats(), self._tier(), self._rate()
        self._record = replace(self._record, stats=stats, tier=tier, tokens_per_second=rate, beats=beats)
        with self._outage.forgiven():
            await self._registry.register(self._record, self._lease)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Registered, and renewed, while the block lasts; removed at its end, if the registry can be reached."""
        await self.renew()
        try:
            async with background(self._beat(), "heartbeat"):
                yield
        finally:
            await self._remove()

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self.renew()

    async def _remove(self) -> None:
        try:
            await self._registry.deregister(self._record.id, self._record.epoch)
        except StateUnavailable as error:
            log.warning("could not deregister, the lease will end", extra={"error": error.message})

    def _rate(self) -> float:
        """Tokens generated per second, over at least one second so that it does not jump with every heartbeat."""
        then, before = self._measured
        now, tokens = self._clock.now(), self._stats().tokens_generated
        if now - then < 1.0:
            return self._record.tokens_per_second
        self._measured = (now, tokens)
        return (tokens - before) / (now - then)
