"""One suite for both registries: in memory, and in a real Redis-compatible server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.core.api import RegistryApi
from baton.core.clock import SystemClock
from baton.core.errors import StateUnavailable
from baton.core.types import (
    EngineStats,
    KvFormat,
    ModelCard,
    ProcessRecord,
    Role,
    Tier,
    TierLoad,
    TierStats,
    WorkerState,
)
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server
from baton.state.redis_client import connect
from baton.state.registry import MemoryRegistry, RedisRegistry

CARD = ModelCard("m", "llama", 8192, 512, "abc", KvFormat("fake", 16, 1, 1, 8), (2,))
RECORD = ProcessRecord(
    id="decode-0",
    role=Role.DECODE,
    address="127.0.0.1:1234",
    epoch=2**64 - 1,
    pid=42,
    http_address="127.0.0.1:99",
    state=WorkerState.READY,
    card=CARD,
    stats=EngineStats(
        total_blocks=10,
        free_blocks=7,
        held_blocks=2,
        cached_blocks=1,
        tiers=(TierLoad(Tier.GOLD, 1, 2, 3, 4, 5), TierLoad(Tier.BRONZE)),
    ),
    tokens_per_second=1.5,
    labels=("h200", "acme-only"),
    pools=("tenant:acme=acme-only",),
    tier=TierStats(memory_blocks=1, hits=2),
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with embedded_server("secret") as started:
        yield started


@asynccontextmanager
async def memory_registry(server: tuple[str, int]) -> AsyncIterator[RegistryApi]:
    yield MemoryRegistry(SystemClock())


@asynccontextmanager
async def redis_registry(server: tuple[str, int]) -> AsyncIterator[RegistryApi]:
    config = StateConfig(url=server[0], password="secret", namespace=f"test-{os.urandom(4).hex()}", timeout_ms=2000)
    async with connect(config) as client:
        yield RedisRegistry(client, config)


@pytest.fixture(params=[memory_registry, redis_registry], ids=["memory", "redis"])
def check(request: pytest.FixtureRequest, server: tuple[str, int]) -> Callable[..., None]:
    def run(body: Callable[[RegistryApi], Awaitable[None]]) -> None:
        async def main() -> None:
            async with request.param(server) as registry:
                await body(registry)

        asyncio.run(main())

    return run


def test_record_comes_back_field_by_field(check: Callable[..., None]) -> None:
    async def body(registry: RegistryApi) -> None:
        await registry.register(RECORD, 30)
        assert list(await registry.processes()) == [RECORD]

    check(body)


def test_renewal_replaces_the_record(check: Callable[..., None]) -> None:
    async def body(registry: RegistryApi) -> None:
        await registry.register(RECORD, 30)
        draining = replace(RECORD, state=WorkerState.DRAINING)
        await registry.register(draining, 30)
        assert list(await registry.processes()) == [draining]

    check(body)


def test_record_vanishes_when_its_lease_ends(check: Callable[..., None]) -> None:
    async def body(registry: RegistryApi) -> None:
        await registry.register(RECORD, 0.02)
        async with asyncio.timeout(10):
            while await registry.processes():
                await asyncio.sleep(0.005)

    check(body)


def test_deregister_spares_a_successor(check: Callable[..., None]) -> None:
    async def body(registry: RegistryApi) -> None:
        await registry.register(RECORD, 30)
        await registry.deregister(RECORD.id, 12345)
        await registry.deregister(RECORD.id, RECORD.epoch // 10)
        assert list(await registry.processes()) == [RECORD]
        await registry.deregister(RECORD.id, RECORD.epoch)
        await registry.deregister(RECORD.id, RECORD.epoch)
        assert list(await registry.processes()) == []

    check(body)


def test_reading_the_registry_takes_two_commands_whatever_else_redis_keeps(server: tuple[str, int]) -> None:
    """Thousands of admissions a second leave each a key for minutes."""

    async def body() -> None:
        namespace = f"test-{os.urandom(4).hex()}"
        config = StateConfig(url=server[0], password="secret", namespace=namespace, timeout_ms=2000)
        async with connect(config) as client:
            await client.mset({f"{namespace}:{{umbrella}}:quota:r:acme/{number}": "" for number in range(3_000)})
            registry = RedisRegistry(client, config)
            await registry.register(RECORD, 30)
            before = await commands(client)
            assert list(await registry.processes()) == [RECORD]
            assert await commands(client) - before == 2

    asyncio.run(body())


async def commands(client: Redis) -> int:
    """That the server has been sent before, this one left out."""
    stats = await client.info("commandstats")
    return sum(stats[name]["calls"] for name in stats if name != "cmdstat_info")


def test_a_process_that_died_is_forgotten_when_another_one_registers(server: tuple[str, int]) -> None:
    async def body() -> None:
        namespace = f"test-{os.urandom(4).hex()}"
        config = StateConfig(url=server[0], password="secret", namespace=namespace, timeout_ms=2000)
        async with connect(config) as client:
            registry = RedisRegistry(client, config)
            await registry.register(RECORD, 0.02)
            async with asyncio.timeout(10):
                while await registry.processes():
                    await asyncio.sleep(0.005)
            other = replace(RECORD, id="decode-1")
            await registry.register(other, 30)
            assert len(await client.keys(f"{namespace}:*")) == 2, "its record and the index"
            assert await client.zrange(f"{namespace}:processes", 0, -1) == [b"decode-1"]
            await registry.deregister(other.id, other.epoch)
            assert await client.keys(f"{namespace}:*") == []

    asyncio.run(body())


def test_frozen_server_costs_no_more_than_the_budget() -> None:
    async def body(config: StateConfig, pid: int) -> None:
        async with connect(config) as client:
            registry = RedisRegistry(client, config)
            await registry.register(RECORD, 30)
            os.kill(pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(5):
                    with pytest.raises(StateUnavailable, match="decode-0"):
                        await registry.register(RECORD, 30)
                    with pytest.raises(StateUnavailable):
                        await registry.processes()
            finally:
                os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(10):
                while True:
                    try:
                        assert list(await registry.processes()) == [RECORD]
                        break
                    except StateUnavailable:
                        await asyncio.sleep(0.01)

    with embedded_server("secret") as (url, pid):
        asyncio.run(body(StateConfig(url=url, password="secret"), pid))


def test_absent_server_is_a_typed_error() -> None:
    async def body() -> None:
        config = StateConfig(url="redis://127.0.0.1:1/0")
        async with connect(config) as client:
            with pytest.raises(StateUnavailable, match="registry"):
                await RedisRegistry(client, config).processes()

    asyncio.run(body())
