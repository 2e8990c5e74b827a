"""Channels of processes that left the registry are closed; those in use and those that it never knew are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.core.background import background
from baton.core.clock import ManualClock
from baton.core.errors import StateUnavailable
from baton.core.types import ProcessRecord, Role
from baton.rpc.channels import ChannelPool
from baton.state.registry import MemoryRegistry
from services.process.departures import DEPARTURES_SECONDS, close_departed

WORKER = ProcessRecord("decode-0", Role.DECODE, "127.0.0.1:1", epoch=7, pid=1)


class Watched(MemoryRegistry):
    """Counts how often it was read, and can be away."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.looks = 0
        self.away = False

    async def processes(self) -> list[ProcessRecord]:
        self.looks += 1
        if self.away:
            raise StateUnavailable("no answer")
        return list(await super().processes())

    async def looked_at(self, times: int) -> None:
        """Until that many looks began and ended from now on."""
        last = self.looks + times + 1
        async with asyncio.timeout(20):
            while self.looks < last:
                await asyncio.sleep(0)


@asynccontextmanager
async def tended() -> AsyncIterator[tuple[ChannelPool, Watched]]:
    clock = ManualClock()
    registry = Watched(clock)
    await registry.register(WORKER, 1e9 * DEPARTURES_SECONDS)
    async with ChannelPool() as channels, background(close_departed(channels, registry, clock), "close departed"):
        await registry.looked_at(1)
        yield channels, registry


def test_the_channel_of_a_process_that_left_is_closed_and_no_other() -> None:
    async def run() -> None:
        async with tended() as (channels, registry):
            worker, fixed = channels.get(WORKER.address), channels.get("planner.example:1")
            await registry.looked_at(2)
            assert channels.get(WORKER.address) is worker
            await registry.deregister(WORKER.id, WORKER.epoch)
            await registry.looked_at(1)
            assert channels.get(WORKER.address) is not worker
            assert channels.get("planner.example:1") is fixed

    asyncio.run(run())


def test_a_channel_with_a_call_in_progress_stays_until_the_call_has_ended() -> None:
    async def run() -> None:
        async with tended() as (channels, registry):
            worker, answer = channels.get(WORKER.address), asyncio.Event()
            call = asyncio.create_task(worker.answer(answer.wait()))
            await asyncio.sleep(0)
            await registry.deregister(WORKER.id, WORKER.epoch)
            await registry.looked_at(3)
            assert channels.get(WORKER.address) is worker
            answer.set()
            assert await call
            await registry.looked_at(1)
            assert channels.get(WORKER.address) is not worker

    asyncio.run(run())


def test_a_registry_that_is_away_closes_nothing() -> None:
    async def run() -> None:
        async with tended() as (channels, registry):
            worker = channels.get(WORKER.address)
            registry.away = True
            await registry.looked_at(3)
            assert channels.get(WORKER.address) is worker

    asyncio.run(run())
