"""Tells the kvtransfer process which prefix blocks this worker holds. Nothing depends on it being there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from baton.core.api import DirectoryApi, RegistryApi
from baton.core.clock import Clock
from baton.core.errors import BatonError
from baton.core.types import KvHandshake, Role, WorkerState

log = logging.getLogger(__name__)


class CachedBlocks(Protocol):
    def cached_blocks(self) -> tuple[int, frozenset[bytes]]:
        """A number that grows with every change, and the hashes in the prefix cache."""
        ...


class Catalogue:
    """Publishes what changed since the last time, or everything when the directory asks for it or is another one."""

    def __init__(
        self,
        blocks: CachedBlocks,
        registry: RegistryApi,
        directories: Callable[[str], DirectoryApi],
        me: KvHandshake,
        address: str,
    ) -> None:
        self._blocks = blocks
        self._registry = registry
        self._directories = directories
        self._me = me
        self._address = address
        self._directory: tuple[str, int] | None = None  # address and epoch of the one that knows ``_published``
        self._published: frozenset[bytes] = frozenset()
        self._version: int = -1
        self._sequence: int = 0
        self._failing = False

    async def run(self, clock: Clock, interval: float) -> None:
        """Publish every ``interval`` seconds; a failure is logged once and starts the next time with everything."""
        while True:
            try:
                await self.publish()
            except BatonError as error:
                self._directory = None
                if not self._failing:
                    log.info("block catalogue is not published", extra={"error": error.message})
                self._failing = True
            else:
                self._failing = False
            await clock.sleep(interval)

    async def publish(self) -> None:
        """One visit to the directory, if there is one."""
        found = await self._directories_known()
        if not found:
            return
        chosen = self._directory if self._directory in found else found[0]
        directory = self._directories(chosen[0])
        await directory.announce(self._me, self._address)
        version, held = self._blocks.cached_blocks()
        if chosen == self._directory and version == self._version:
            return
        self._sequence += 1
        me, epoch, sequence = self._me.worker_id, self._me.epoch, self._sequence
        added, removed = sorted(held - self._published), sorted(self._published - held)
        known = chosen == self._directory and await directory.publish(me, epoch, sequence, added, removed)
        if not known:
            await directory.reset(me, epoch, sequence, sorted(held))
        self._directory, self._published, self._version = chosen, held, version

    async def _directories_known(self) -> list[tuple[str, int]]:
        records = await self._registry.processes()
        return [(r.address, r.epoch) for r in records if r.role is Role.KVTRANSFER and r.state is WorkerState.READY]
