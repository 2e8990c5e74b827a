"""One link per worker process, opened at first use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from baton.core.api import DecodeApi
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.types import Candidate
from gateway.fleet import FleetView

TEND_SECONDS = 1.0


class Link(DecodeApi, Protocol):
    async def aclose(self) -> None: ...


class LinkPool:
    """Calling it with a candidate gives that process's ``DecodeApi``.

    The link of a process that left the registry is closed once no request runs on it: a registry that forgot a worker
    is no reason to break its streams.
    """

    def __init__(self, open_link: Callable[[Candidate], Link], fleet: FleetView) -> None:
        self._open_link = open_link
        self._fleet = fleet
        self._links: dict[Candidate, Link] = {}

    def __call__(self, worker: Candidate) -> DecodeApi:
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = self._open_link(worker)
        return link

    def __len__(self) -> int:
        return len(self._links)

    async def close_departed(self) -> None:
        alive = self._fleet.epochs()
        for worker in list(self._links):
            if (worker.worker_id, worker.epoch) not in alive and not self._fleet.running_on(worker.worker_id):
                await self._links.pop(worker).aclose()

    async def aclose(self) -> None:
        while self._links:
            _, link = self._links.popitem()
            await link.aclose()


@asynccontextmanager
async def tended(pool: LinkPool, clock: Clock) -> AsyncIterator[LinkPool]:
    """Close departed workers' links from time to time while the block lasts, and all links at its end."""
    try:
        async with background(_tend(pool, clock), "tend-links"):
            yield pool
    finally:
        await pool.aclose()


async def _tend(pool: LinkPool, clock: Clock) -> None:
    while True:
        await clock.sleep(TEND_SECONDS)
        await pool.close_departed()
