"""Two gateway processes over one store: what is changed or counted at one holds at the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.client import Client
from baton.core.errors import Cancelled, QuotaExceeded, Unauthenticated
from baton.core.types import (
    KeyRecord,
    Level,
    Limits,
    Organisation,
    QuotaBalance,
    ResourceName,
    StopRules,
    Tenant,
    UsageGroup,
    UsageQuery,
)
from baton.rpc.admin_client import AdminClient
from baton.rpc.channels import ChannelPool, ClientSecurity
from tests.admin_world import NEW, WHICHEVER
from tests.gateways import eventually, second_gateway
from tests.launched import prompt_request, running_stack

UMBRELLA, ACME = ResourceName("umbrella"), ResourceName("umbrella", "acme")
ANY_KEY = KeyRecord("", "", "", "")
WHOLE = 8 + 4  # tokens of ``ASK`` and its answer
ASK = replace(prompt_request(range(8), 4), stop=StopRules(ignore_eos=True))


@dataclass
class Gateways:
    """Administrators and users of the tenant ``acme`` at each of the two."""

    admins: list[AdminClient]
    clients: list[Client]

    async def limit(self, limits: Limits) -> None:
        await self.admins[0].update(ACME, Tenant("", "", limits=limits), ["limits"], WHICHEVER)

    async def used(self) -> int:
        """Tokens of this month, once all requests are settled."""
        found: list[QuotaBalance] = []

        async def is_settled() -> bool:
            balances = await self.admins[1].quota(ACME, "fake")
            found[:] = [each for each in balances if each.level is Level.TENANT and each.limit is not None]
            return [each.reserved for each in found] == [0]

        await eventually(is_settled, "nothing is reserved")
        return found[0].used

    async def charged(self) -> list[tuple[int, int]]:
        """Requests of ``acme`` and their input tokens, as the ledger has them."""
        query = UsageQuery(UMBRELLA, time.time() - 3600, time.time() + 60)
        sums = await self.admins[1].sum_usage(query, UsageGroup.TENANT)
        return [(used.requests, used.input_tokens) for used in sums]


@asynccontextmanager
async def two_gateways(*settings: str) -> AsyncIterator[Gateways]:
    async with running_stack("fake", *settings, prefill=0) as running, second_gateway(running) as other:
        record = running.stack.record
        async with AsyncExitStack() as stack:
            channels = await stack.enter_async_context(ChannelPool(ClientSecurity(token=record.key)))
            addresses = (record.gateway, other)
            admins = [AdminClient(channels.get(address)) for address in addresses]
            await admins[0].create(UMBRELLA, Organisation(""), NEW)
            await admins[0].create(ACME, Tenant("", ""), NEW)
            key = (await admins[0].issue_key(ACME.child("k1"), ANY_KEY, NEW)).secret
            clients = [await stack.enter_async_context(Client(address, key)) for address in addresses]
            yield Gateways(admins, clients)
            await running.assert_idle()


async def raises(kind: type[Exception], work: Callable[[], Awaitable[object]]) -> bool:
    try:
        await work()
    except kind:
        return True
    return False


def test_a_key_revoked_through_one_gateway_is_refused_by_the_other() -> None:
    async def main() -> None:
        async with two_gateways() as to:
            here, there = to.clients
            for client in to.clients:
                await client.ask(ASK)
            await to.admins[0].revoke_key(ACME.child("k1"), WHICHEVER)
            await eventually(lambda: raises(Unauthenticated, there.models), "refused by the other gateway")
            await eventually(lambda: raises(Unauthenticated, here.models), "refused by the one that was told")
            for client in to.clients:
                with pytest.raises(Unauthenticated):
                    await client.ask(ASK)

    asyncio.run(main())


def test_a_quota_set_through_one_gateway_is_counted_by_both_together() -> None:
    async def main() -> None:
        async with two_gateways() as to:
            here, there = to.clients
            await there.ask(ASK)  # so that the other gateway remembers a tenant without limits
            await to.limit(Limits(tokens_per_month=0))
            await eventually(lambda: raises(QuotaExceeded, lambda: there.ask(ASK)), "applied by the other gateway")
            limit = await to.used() + 3 * WHOLE
            await to.limit(Limits(tokens_per_month=limit))
            await eventually(lambda: passes(here), "the new limit lets a request pass")
            await eventually(lambda: passes(there), "and at the other gateway, too")
            await here.ask(ASK)
            for client in (there, here):
                with pytest.raises(QuotaExceeded, match=f"tokens_per_month: limit {limit}, used"):
                    await client.ask(ASK)

    asyncio.run(main())


async def passes(client: Client) -> bool:
    return not await raises(QuotaExceeded, lambda: client.ask(ASK))


def test_a_request_taken_over_at_another_gateway_ends_at_the_first_and_is_charged_once() -> None:
    slow = replace(ASK, max_tokens=1_500, request_id="one")

    async def main() -> None:
        async with two_gateways("engine.fake_step_ms=20") as to:
            here, there = to.clients
            async with aclosing(here.stream(slow)) as older, aclosing(there.stream(slow)) as newer:
                await anext(older)
                await anext(newer)
                with pytest.raises(Cancelled, match="request one was taken over by a later call, at another gateway"):
                    async for _ in older:
                        pass
                got = (await anext(newer)).token_ids
                assert got, "the later call goes on"

            async def is_charged_once() -> bool:
                return await to.charged() == [(1, 8)]

            await eventually(is_charged_once, "what the later call got is charged")

    asyncio.run(main())


def test_who_asks_again_at_another_gateway_and_hangs_up_there_pays_for_what_the_first_one_delivers() -> None:
    """Which does not hear of it before its answer is whole."""
    seldom = ("gateway.quota_lease_seconds=600", "gateway.quota_renew_seconds=200")
    asked = replace(ASK, max_tokens=150, request_id="one")

    async def main() -> None:
        async with two_gateways("engine.fake_step_ms=20", *seldom) as to:
            await to.limit(Limits(tokens_per_month=100_000))
            here, there = to.clients
            async with aclosing(here.stream(asked)) as older:
                got = len((await anext(older)).token_ids)
                async with aclosing(there.stream(asked)) as newer:
                    await anext(newer)
                await to.used()  # so the later call is settled
                async for chunk in older:
                    got += len(chunk.token_ids)
            assert got == asked.max_tokens

            async def is_all_charged() -> bool:
                return await to.used() == 8 + got

            await eventually(is_all_charged, "what the first one delivered is charged")
            assert await to.charged() == [(1, 8)]

    asyncio.run(main())
