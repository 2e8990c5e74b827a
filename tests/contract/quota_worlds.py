"""Quotas over each kind of counters: in memory, in fakeredis (Lua and all) on a controlled clock, in a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import fakeredis
import fakeredis._helpers
import fakeredis._socket._base
import fakeredis.commands_mixins.server_mixin
import fakeredis.model._stream
import pytest

from baton.core.clock import ManualClock, SystemClock
from baton.core.tenancy_api import LedgerApi, QuotaApi
from baton.core.types import (
    FREE,
    UNLIMITED,
    Account,
    KeyRecord,
    Limits,
    ModelLimits,
    Organisation,
    Prices,
    QuotaBalance,
    QuotaClaim,
    Tenant,
)
from baton.state.config import StateConfig
from baton.state.quota.ledger import RedisLedger
from baton.state.quota.memory import MemoryQuota
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect
from tests.fake_redis import add_struct

NOON = 1_764_417_600.0  # 2025-11-29 12:00:00 UTC, the beginning of a minute
LEASE = 15.0
FOR_EVER = 1e6  # longer than any test: how an admission ended stays known
ASKS_THE_TIME: tuple[ModuleType, ...] = (
    fakeredis._helpers,
    fakeredis._socket._base,
    fakeredis.commands_mixins.server_mixin,
    fakeredis.model._stream,
)


@dataclass(frozen=True)
class World:
    """``lease_seconds`` of a claim that is to lapse; ``pass_time`` moves the clock, where there is one to move."""

    quota: QuotaApi
    ledger: LedgerApi
    clock: ManualClock | None = None
    lease_seconds: float = LEASE

    def pass_time(self, seconds: float) -> None:
        assert self.clock is not None
        self.clock.advance(seconds)

    async def lapse(self) -> None:
        """Let claims that were made with ``lease_seconds`` expire."""
        if self.clock is not None:
            self.clock.advance(self.lease_seconds + 0.001)
            assert await self.quota.expire() > 0
            return
        async with asyncio.timeout(20):
            while await self.quota.expire() == 0:
                await asyncio.sleep(0.005)


Body = Callable[[World], Awaitable[None]]
InWorlds = Callable[[Body], None]


@asynccontextmanager
async def memory_world() -> AsyncIterator[World]:
    clock = ManualClock(NOON)
    quota = MemoryQuota(clock, remember_seconds=FOR_EVER)
    yield World(quota, quota, clock)


@asynccontextmanager
async def fake_client() -> AsyncIterator[tuple[fakeredis.FakeAsyncRedis, ManualClock]]:
    """A server of its own, whose time is that of the clock."""
    clock = ManualClock(NOON)
    with pytest.MonkeyPatch.context() as patch:
        for module in ASKS_THE_TIME:
            patch.setattr(module, "time", SimpleNamespace(time=clock.wall))
        server = fakeredis.FakeServer()
        async with fakeredis.FakeAsyncRedis(server=server, protocol=2) as client:
            await add_struct(client, server)
            yield client, clock


@asynccontextmanager
async def fake_world() -> AsyncIterator[World]:
    config = StateConfig(quota_budget_ms=10_000, timeout_ms=10_000, quota_remember_seconds=FOR_EVER)
    async with fake_client() as (client, clock):
        yield World(SharedQuota(client, config, clock), RedisLedger(client, config), clock)


@asynccontextmanager
async def served_world(url: str, password: str) -> AsyncIterator[World]:
    namespace = f"test-{os.urandom(4).hex()}"
    config = StateConfig(url, password, timeout_ms=10_000, quota_budget_ms=10_000, namespace=namespace)
    async with connect(config) as client:
        quota = SharedQuota(client, config, SystemClock())
        yield World(quota, RedisLedger(client, config), lease_seconds=0.05)


def account(
    tenant: Limits = UNLIMITED,
    *,
    organisation: Limits = UNLIMITED,
    key: Limits = UNLIMITED,
    models: tuple[ModelLimits, ...] = (),
    name: str = "acme",
    key_id: str = "k1",
    time_zone: str = "UTC",
) -> Account:
    return Account(
        Organisation("umbrella", organisation, time_zone=time_zone),
        Tenant(name, "umbrella", limits=tenant, model_limits=models, time_zone=time_zone),
        KeyRecord(key_id, name, f"{key_id}.abcd", "00", limits=key),
    )


def claim(
    payer: Account,
    request_id: str = "req-1",
    *,
    tokens: tuple[int, int] = (10, 20),
    owner: str = "gateway-1",
    model: str = "m",
    prices: Prices = FREE,
    lease: float = LEASE,
) -> QuotaClaim:
    return QuotaClaim(request_id, owner, payer, model, *tokens, prices=prices, lease_seconds=lease)


def owned_by(order: QuotaClaim, owner: str) -> QuotaClaim:
    return replace(order, owner=owner)


async def standing(world: World, payer: Account, model: str = "m") -> dict[str, tuple[int, int]]:
    """(used, reserved) of every balance, by level, model and metric."""

    def name(balance: QuotaBalance) -> str:
        return "/".join(filter(None, (balance.level, balance.model, balance.metric)))

    return {name(b): (b.used, b.reserved) for b in await world.quota.balances(payer, model)}
