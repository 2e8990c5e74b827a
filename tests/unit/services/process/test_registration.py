"""The registry entry: renewed, current, survived by its process, and gone with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import StateUnavailable
from baton.core.types import EngineStats, KvFormat, ModelCard, ProcessRecord, Role, WorkerState
from baton.state.registry import MemoryRegistry
from services.process.registration import Registration

CARD = ModelCard("m", "llama", 8192, 512, "h", KvFormat("fake", 16, 1, 1, 8))


class Fragile:
    """A registry that can be away."""

    def __init__(self, clock: ManualClock) -> None:
        self.inner = MemoryRegistry(clock)
        self.away = False
        self.asked = 0

    async def register(self, record: ProcessRecord, ttl: float) -> None:
        self.asked += 1
        if self.away:
            raise StateUnavailable("no answer")
        await self.inner.register(record, ttl)

    async def deregister(self, process_id: str, epoch: int) -> None:
        if self.away:
            raise StateUnavailable("no answer")
        await self.inner.deregister(process_id, epoch)

    async def processes(self) -> Sequence[ProcessRecord]:
        return await self.inner.processes()


def made(registry: Fragile, clock: ManualClock) -> Registration:
    record = ProcessRecord("d", Role.DECODE, "d:1", epoch=5, pid=1)
    return Registration(registry, record, clock, interval=0.25, lease=3.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


def test_registered_while_the_block_lasts_and_gone_after_it() -> None:
    async def run() -> None:
        clock = ManualClock()
        registry = Fragile(clock)
        async with made(registry, clock).kept():
            await until(lambda: registry.asked > 50)  # the clock has moved far past the first lease
            [record] = await registry.processes()
            assert (record.id, record.state) == ("d", WorkerState.LOADING)
        assert await registry.processes() == []

    asyncio.run(run())


def test_state_and_load_are_told() -> None:
    async def run() -> None:
        clock = ManualClock()
        registry = Fragile(clock)
        registration = made(registry, clock)
        stats = EngineStats(total_blocks=9, free_blocks=9)
        registration.describe(CARD, lambda: stats)
        registration.publish_http("d:2")
        assert registration.why_not_ready() == "loading"
        await registration.set_state(WorkerState.READY)
        assert registration.why_not_ready() is None
        clock.advance(2.0)
        stats = EngineStats(total_blocks=9, free_blocks=8, held_blocks=1, tokens_generated=50)
        await registration.renew()
        [record] = await registry.processes()
        assert (record.card, record.stats, record.http_address) == (CARD, stats, "d:2")
        assert record.tokens_per_second == 25.0

    asyncio.run(run())


def test_lives_through_a_registry_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        clock = ManualClock()
        registry = Fragile(clock)
        async with made(registry, clock).kept():
            registry.away = True
            before = registry.asked
            await until(lambda: registry.asked > before + 10)
            registry.inner = MemoryRegistry(clock)  # it comes back empty
            registry.away = False
            before = registry.asked
            await until(lambda: registry.asked > before + 1)
            assert [record.id for record in await registry.processes()] == ["d"]

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert [r.getMessage() for r in caplog.records] == ["registry is away, carrying on", "registry is back"]


def test_registry_that_is_away_at_the_end_is_no_error() -> None:
    async def run() -> None:
        clock = ManualClock()
        registry = Fragile(clock)
        async with made(registry, clock).kept():
            registry.away = True

    asyncio.run(run())
