"""The planner's shell: keeps the picture of the fleet fresh and remembers what it has just decided."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.api import RegistryApi
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.telemetry import Meter
from baton.core.types import Plan, PlanQuery
from baton.state.outage import RegistryOutage
from services.planner.config import PlannerConfig
from services.planner.fleet import FleetPicture, InFlight
from services.planner.policy import Noise, plan

log = logging.getLogger(__name__)


class Planner:
    """Implements ``PlannerApi``. Answers from memory: no call waits on the registry."""

    def __init__(
        self,
        registry: RegistryApi,
        config: PlannerConfig,
        *,
        meter: Meter,
        clock: Clock,
        noise: Noise = random.random,
    ) -> None:
        self._registry = registry
        self._config = config
        self._clock = clock
        self._noise = noise
        self._picture = FleetPicture()
        self._in_flight = InFlight(clock, config.in_flight_seconds)
        self._outage = RegistryOutage(log, "planning from the last picture")
        self._plans = meter.counter("plans", "Answered queries", ("reason",))
        self._refused = meter.counter("plans_refused", "Queries without a plan", ("reason",))
        self._seconds = meter.histogram(
            "plan_seconds", "Time to decide", (), (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.012)
        )

    async def plan(self, query: PlanQuery) -> Plan:
        began = self._clock.now()
        try:
            decided = plan(query, self._picture.snapshot(self._in_flight.tokens()), self._config, self._noise)
        except BatonError as error:
            self._refused.add(reason=error.reason)
            raise
        self._remember(query, decided)
        self._plans.add(reason=decided.reasons[-1])
        self._seconds.observe(self._clock.now() - began)
        return decided

    async def refresh(self) -> None:
        """Look at the registry once. While it is away the last picture stays."""
        with self._outage.forgiven():
            self._picture.update(await self._registry.processes())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Refresh now, and go on refreshing until the block ends."""
        await self.refresh()
        async with background(self._keep_fresh(), "refresh the fleet"):
            yield

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(self._config.refresh_seconds)
            await self.refresh()

    def _remember(self, query: PlanQuery, decided: Plan) -> None:
        lowered = decided.limits.max_tokens
        tokens = query.prompt_tokens + (query.max_tokens if lowered is None else lowered)
        self._in_flight.add(decided.decode[0].worker_id, tokens)
        if decided.prefill and query.prompt_tokens > self._config.local_prefill_max_tokens:
            self._in_flight.add(decided.prefill[0].worker_id, query.prompt_tokens)
