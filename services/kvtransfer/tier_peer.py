"""Where the cache tier is, as one worker sees it; nothing depends on there being one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from baton.core.api import RegistryApi, TierApi
from baton.core.clock import Clock
from baton.core.errors import StateUnavailable
from baton.core.types import ProcessRecord, Role, WorkerState
from services.kvtransfer.circuit import Circuit

LOOK_SECONDS = 1.0


class Tiers(Protocol):
    def find(self) -> TierApi | None:
        """The tier to use now; None when there is none, or it was lost a moment ago."""
        ...

    def lost(self, cause: str) -> None:
        """It did not answer: leave it alone for a while."""
        ...


class NoTier:
    """A worker on its own."""

    def find(self) -> TierApi | None:
        return None

    def lost(self, cause: str) -> None: ...


class RegisteredTier:
    """The kvtransfer process that all workers agree on: of the ready ones, that with the lowest id."""

    def __init__(
        self,
        registry: RegistryApi,
        tiers: Callable[[str], TierApi],
        clock: Clock,
        *,
        rest_seconds: float,
    ) -> None:
        """``tiers`` gives the tier at an address."""
        self._registry = registry
        self._tiers = tiers
        self._clock = clock
        self._circuit = Circuit(clock, rest_seconds)
        self._chosen: tuple[str, int] | None = None  # address and epoch

    def find(self) -> TierApi | None:
        if self._chosen is None or self._circuit.is_open(self._chosen):
            return None
        return self._tiers(self._chosen[0])

    def lost(self, cause: str) -> None:
        if self._chosen is not None:
            self._circuit.trip(self._chosen, cause)

    async def look(self) -> None:
        """Choose anew. A registry that is away changes nothing."""
        with suppress(StateUnavailable):
            self._chosen = _first_ready(await self._registry.processes())

    async def run(self) -> NoReturn:
        while True:
            await self.look()
            await self._clock.sleep(LOOK_SECONDS)


def _first_ready(records: Sequence[ProcessRecord]) -> tuple[str, int] | None:
    ready = [record for record in records if record.role is Role.KVTRANSFER and record.state is WorkerState.READY]
    chosen = min(ready, key=lambda record: record.id, default=None)
    return None if chosen is None else (chosen.address, chosen.epoch)
