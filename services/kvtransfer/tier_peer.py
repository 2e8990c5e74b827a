"""Where the cache tier is and what it holds, as one worker sees it; nothing depends on there being one.

A worker keeps a copy of the tier's names, so that a request for which the tier can do nothing never asks it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from baton.core.api import RegistryApi, TierApi
from baton.core.clock import Clock
from baton.core.errors import BatonError, PeerUnavailable, StateUnavailable
from baton.core.types import ProcessRecord, Role, WorkerState
from services.kvtransfer.circuit import Circuit

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class Tiers(Protocol):
    @property
    def is_there(self) -> bool:
        """Whether there is one to use now."""
        ...

    def find(self) -> TierApi | None:
        """The tier to use now; None when there is none, or it was lost a moment ago."""
        ...

    def lost(self, cause: str) -> None:
        """It did not answer: leave it alone for a while."""
        ...

    def leading(self, names: Sequence[bytes]) -> int:
        """How many leading ``names`` it holds, as far as is known here; none when there is no tier to use."""
        ...

    def holds(self, names: Sequence[bytes]) -> None:
        """These were just put there."""
        ...

    def lacks(self, name: bytes) -> None:
        """It was asked for this one in vain."""
        ...


class NoTier:
    """A worker on its own."""

    is_there = False

    def find(self) -> TierApi | None:
        return None

    def lost(self, cause: str) -> None: ...

    def leading(self, names: Sequence[bytes]) -> int:
        return 0

    def holds(self, names: Sequence[bytes]) -> None: ...

    def lacks(self, name: bytes) -> None: ...


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
        self._names: set[bytes] = set()  # what the chosen one holds, as of ``_known`` and what was seen since
        self._known = (0, 0)  # epoch and version

    @property
    def is_there(self) -> bool:
        return self._chosen is not None and not self._circuit.is_open(self._chosen)

    def find(self) -> TierApi | None:
        if self._chosen is None or not self.is_there:
            return None
        return self._tiers(self._chosen[0])

    def lost(self, cause: str) -> None:
        if self._chosen is not None:
            self._circuit.trip(self._chosen, cause)

    def leading(self, names: Sequence[bytes]) -> int:
        if not self.is_there:
            return 0
        return next((count for count, name in enumerate(names) if name not in self._names), len(names))

    def holds(self, names: Sequence[bytes]) -> None:
        self._names.update(names)

    def lacks(self, name: bytes) -> None:
        self._names.discard(name)

    async def look(self) -> None:
        """Choose anew, and learn what has changed there. A registry that is away changes nothing."""
        try:
            chosen = _first_ready(await self._registry.processes())
        except StateUnavailable:
            chosen = self._chosen
        if chosen != self._chosen:
            self._names.clear()
            self._chosen, self._known = chosen, (0, 0)
        tier = self.find()
        if tier is not None:
            await self._learn(tier)

    async def _learn(self, tier: TierApi) -> None:
        try:
            changes = await tier.changes(*self._known)
        except PeerUnavailable as error:
            self.lost(error.message)
        except BatonError as error:  # it does not say what it holds: no request asks it
            log.info("names of the cache tier are not known", extra={"error": error.message})
        else:
            if changes.is_all:
                self._names.clear()
            self._names.difference_update(changes.removed)
            self._names.update(changes.added)
            self._known = (changes.epoch, changes.version)

    async def run(self) -> NoReturn:
        while True:
            await self.look()
            await self._clock.sleep(LOOK_SECONDS)


def _first_ready(records: Sequence[ProcessRecord]) -> tuple[str, int] | None:
    ready = [record for record in records if record.role is Role.KVTRANSFER and record.state is WorkerState.READY]
    chosen = min(ready, key=lambda record: record.id, default=None)
    return None if chosen is None else (chosen.address, chosen.epoch)
