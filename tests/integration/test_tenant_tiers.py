"""What an administrator says of a tenant through the real gateway is what workers do: tier, cap on KV blocks, pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from baton.client import Client
from baton.core.errors import InvalidRequest, Overloaded
from baton.core.types import GenerateRequest, ProcessRecord, ResourceName, Tenant, Tier, TierLoad
from tests.admin_world import NEW, WHICHEVER
from tests.integration.test_tenancy_stack import ACME, UMBRELLA, Platform, asked, eventually, on_platform

ZETA = UMBRELLA.child("zeta")
SLOW = "engine.fake_step_ms=5"
LONG = 1500  # tokens: at least 7.5 seconds


def tiers_of(worker: ProcessRecord) -> dict[Tier, TierLoad]:
    return {tier: TierLoad(tier) for tier in Tier} | {load.tier: load for load in worker.stats.tiers}


async def shown(to: Platform, holds: Callable[[dict[Tier, TierLoad]], bool], what: str) -> None:
    """The worker says so in the registry."""
    await to.stack.until(lambda workers: all(holds(tiers_of(worker)) for worker in workers.values()), what)


@asynccontextmanager
async def streaming(client: Client, request: GenerateRequest) -> AsyncIterator[asyncio.Task[int]]:
    """The request runs beside the block, which gets its count of tokens, and is cancelled with it."""

    async def count() -> int:
        async with aclosing(client.stream(request)) as chunks:
            return sum([len(chunk.token_ids) async for chunk in chunks])

    task = asyncio.ensure_future(count())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def recorded(to: Platform, name: ResourceName, tenant: Tenant, *fields: str) -> None:
    await to.admin.update(name, tenant, fields, WHICHEVER)


def test_a_tier_set_by_the_admin_api_reaches_the_workers_queue_and_preempts_downwards_only() -> None:
    async def body(to: Platform) -> None:
        await to.admin.create(ZETA, Tenant("", ""), NEW)
        zetas, acmes = await to.issue(ZETA), await to.issue(ACME)
        async with to.client(zetas) as zeta, to.client(acmes) as acme, streaming(zeta, asked(0, LONG)):
            await shown(to, lambda tiers: tiers[Tier.BRONZE].running == 1, "bronze has the place")
            async with streaming(acme, asked(20, LONG)):
                await shown(to, lambda tiers: tiers[Tier.BRONZE].waiting == 1, "of bronze, too, it waits")
            await recorded(to, ACME, Tenant("", "", Tier.GOLD), "tier")

            async def is_gold() -> bool:
                """Within a moment: a gateway remembers accounts for as long."""
                async with streaming(acme, asked(20, LONG)):
                    await shown(
                        to,
                        lambda tiers: tiers[Tier.GOLD].running == 1 or tiers[Tier.BRONZE].tenants == 2,
                        "the request is there",
                    )
                    [worker] = (await to.stack.workers()).values()
                    gold, _, bronze = tiers_of(worker).values()
                    has_place = (gold.running, bronze.running, bronze.waiting) == (1, 0, 1)
                    return has_place and bronze.preemptions >= 1 and not gold.preemptions

            await eventually(is_gold, "gold takes the place of bronze")
            await shown(to, lambda tiers: tiers[Tier.BRONZE].running == 1, "bronze goes on")

    on_platform(body, SLOW, "engine.max_running=1")


def test_a_tenant_at_the_cap_of_its_record_waits_and_others_pass() -> None:
    async def body(to: Platform) -> None:
        await to.admin.create(ZETA, Tenant("", ""), NEW)
        await recorded(to, ACME, Tenant("", "", max_kv_blocks=1), "max_kv_blocks")
        async with to.client(await to.issue(ZETA)) as zeta, to.client(await to.issue(ACME)) as acme:
            async with streaming(acme, asked(0, LONG)) as first:
                await shown(to, lambda tiers: tiers[Tier.BRONZE].running == 1, "one alone fits")
                async with streaming(acme, asked(20, 4)) as second:
                    await shown(to, lambda tiers: tiers[Tier.BRONZE].waiting == 1, "a second one waits")
                    await zeta.ask(asked(40))
                    assert not first.done() and not second.done()
            await zeta.ask(asked(40))

    on_platform(body, SLOW)


def test_a_tenants_requests_run_in_the_pool_of_its_record_and_nobody_elses_do() -> None:
    async def body(to: Platform) -> None:
        async with to.client(await to.issue(ACME)) as acme:
            with pytest.raises(Overloaded, match="outside the dedicated pools"):
                await acme.ask(asked())
            await recorded(to, ACME, Tenant("", "", pool="own"), "pool")

            async def is_placed() -> bool:
                try:
                    await acme.ask(asked())
                except Overloaded:
                    return False
                return True

            await eventually(is_placed, "its requests are placed in its pool")
            await recorded(to, ACME, Tenant("", "", pool="nowhere"), "pool")
            for _ in range(200):
                try:
                    await acme.ask(asked())
                except Overloaded as error:
                    assert "in the pool 'nowhere'" in error.message  # by the planner, or without it where it is slow
                    break
            else:
                raise AssertionError("a pool without workers takes requests")
            with pytest.raises(InvalidRequest, match=r"tenant\.pool: must be a label .*got 'a b'"):
                await recorded(to, ACME, Tenant("", "", pool="a b"), "pool")
            with pytest.raises(InvalidRequest, match=r"max_kv_blocks: must be from 1 to .*got 0"):
                await recorded(to, ACME, replace(Tenant("", ""), max_kv_blocks=0), "max_kv_blocks")

    on_platform(body, "decode.labels=own", "planner.pools=own,tenant:local=own")
