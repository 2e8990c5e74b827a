"""What the gateway knows of the fleet: who is registered, who failed lately, and how much it sent to whom."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from baton.core.api import RegistryApi
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.pools import Pools, known_pools
from baton.core.types import Candidate, ModelCard, ProcessRecord, Role, WorkerState
from baton.state.outage import RegistryOutage
from gateway.energy import EnergyRates

log = logging.getLogger(__name__)
WORKER_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What administrators' records are held against: every model that was ever served, the labels of the workers that
    are registered, and the planner's pools."""

    models: tuple[str, ...] = ()
    labels: frozenset[str] = frozenset()
    pools: Pools = Pools()


class FleetView:
    """The newest registry contents, as far as placement needs them. Pure: fed by ``FleetWatch`` or a test."""

    def __init__(self, clock: Clock, *, down_seconds: float = 2.0) -> None:
        self._clock = clock
        self._down_seconds = down_seconds
        self._records: tuple[ProcessRecord, ...] = ()
        self._cards: dict[str, ModelCard] = {}
        self._down: dict[str, tuple[int, float]] = {}
        self._sent: Counter[str] = Counter()
        self.pools = Pools()
        """The planner's map of tenants and tiers to workers, as last known."""
        self.energy = EnergyRates()
        self.known = False
        """Whether the registry was ever read."""

    def update(self, records: Sequence[ProcessRecord]) -> None:
        self.known = True
        self._records = tuple(records)
        self.energy.update(self._records)
        fresh: dict[str, ModelCard] = {}
        for record in self._records:
            if record.card is not None:
                known = fresh.get(record.card.model, record.card)
                shortest = min(known.context_length, record.card.context_length)
                fresh[record.card.model] = replace(known, context_length=shortest)
            if record.role is Role.PLANNER:
                self.pools = known_pools(record.pools)
        self._cards |= fresh  # a model stays known while its workers are away

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that was ever served, in order of name."""
        return tuple(sorted(self._cards))

    @property
    def gateways(self) -> int:
        """How many are registered, this one among them."""
        return sum(record.role is Role.GATEWAY for record in self._records)

    def facts(self) -> FleetFacts | None:
        """None while the registry was never read."""
        if not self.known:
            return None
        workers = (record for record in self._records if record.role in WORKER_ROLES)
        return FleetFacts(self.models, frozenset(label for worker in workers for label in worker.labels), self.pools)

    def card(self, model: str) -> ModelCard | None:
        """What the workers of ``model`` say of it, the shortest context of them; None when none ever served it."""
        return self._cards.get(model)

    def ready(self, model: str) -> tuple[ProcessRecord, ...]:
        """Workers of any role that serve ``model`` now."""
        return tuple(
            record
            for record in self._records
            if record.role in WORKER_ROLES
            and record.state is WorkerState.READY
            and record.card is not None
            and record.card.model == model
        )

    def addresses(self, role: Role) -> tuple[str, ...]:
        usable = (WorkerState.READY, WorkerState.LOADING)
        return tuple(record.address for record in self._records if record.role is role and record.state in usable)

    def epochs(self) -> frozenset[tuple[str, int]]:
        return frozenset((record.id, record.epoch) for record in self._records)

    def mark_down(self, worker: Candidate) -> None:
        """A request saw this process fail: new requests avoid it for a while, or until it is another process."""
        self._down[worker.worker_id] = (worker.epoch, self._clock.now() + self._down_seconds)

    def down(self) -> tuple[str, ...]:
        now = self._clock.now()
        epochs = {record.id: record.epoch for record in self._records}
        self._down = {
            worker: (epoch, until)
            for worker, (epoch, until) in self._down.items()
            if until > now and epochs.get(worker, epoch) == epoch
        }
        return tuple(sorted(self._down))

    @contextmanager
    def sending(self, worker_id: str) -> Iterator[None]:
        """Counts a request as running on the worker for as long as the block lasts."""
        self._sent[worker_id] += 1
        try:
            yield
        finally:
            self._sent[worker_id] -= 1
            if not self._sent[worker_id]:
                del self._sent[worker_id]

    def running_on(self, worker_id: str) -> int:
        return self._sent[worker_id]


class FleetWatch:
    """Feeds a view from the registry. With the registry away the last known fleet stays in use."""

    def __init__(self, registry: RegistryApi, view: FleetView, clock: Clock, *, interval: float) -> None:
        self._registry = registry
        self._view = view
        self._clock = clock
        self._interval = interval
        self._outage = RegistryOutage(log, "the last known fleet stays in use")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look now, and go on looking while the block lasts."""
        await self.look()
        async with background(self._keep_looking(), "watch-fleet"):
            yield

    async def look(self) -> None:
        with self._outage.forgiven():
            self._view.update(await self._registry.processes())

    async def _keep_looking(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self.look()
