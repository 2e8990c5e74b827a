"""Keys of the file and keys of the store: who is let in, with whose limits, with and without Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import StateUnavailable, Unauthenticated
from baton.core.types import Account, AdminRole, KeyRecord, Limits, Organisation, Tenant
from baton.state.audited_records import MemoryRecords
from gateway.accounts import AccountPolicy, Accounts
from gateway.callers import Callers, FileKeyAccounts
from gateway.keys import KeyRing, new_key
from tests.stored_records import store

SHOWN, IN_FILE = new_key("ops", "acme")
RING = KeyRing("5" * 64, [replace(IN_FILE, role=AdminRole.PLATFORM_ADMIN, priority=3)])
TENANT = Tenant("acme", "umbrella", limits=Limits(concurrency=7), sharing_group="g")


class UnsteadyTenancy(MemoryRecords):
    """``is_away``: calls fail; ``is_frozen``: they do not end."""

    is_away = False
    is_frozen = False

    async def account(self, key_id: str) -> Account | None:
        if self.is_frozen:
            await asyncio.Event().wait()
        if self.is_away:
            raise StateUnavailable("away")
        return await super().account(key_id)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.tenancy = UnsteadyTenancy(self.clock)
        accounts = Accounts(FileKeyAccounts(self.tenancy, RING), RING.secret, self.clock, AccountPolicy(patience=0.01))
        self.callers = Callers(RING, accounts)

    async def record_tenant(self) -> None:
        await store(self.tenancy, Organisation("umbrella"), TENANT)

    async def issue(self, key: KeyRecord) -> str:
        shown, issued = RING.secret.issue(key)
        await store(self.tenancy, issued)
        return shown


def test_a_key_of_the_file_works_without_any_record() -> None:
    async def body() -> None:
        caller = await World().callers.authenticate(SHOWN)
        assert (caller.tenant, caller.key_id, caller.priority) == ("acme", "ops", 3)
        payer = caller.payer
        assert (payer.organisation.name, payer.tenant.limits, payer.key.role) == (
            "acme",
            Limits(),
            AdminRole.PLATFORM_ADMIN,
        )

    asyncio.run(body())


def test_a_key_of_the_file_pays_as_its_recorded_tenant() -> None:
    async def body() -> None:
        world = World()
        await world.record_tenant()
        caller = await world.callers.authenticate(SHOWN)
        assert caller.payer.tenant == TENANT and caller.payer.organisation == Organisation("umbrella")
        assert caller.payer.key.role is AdminRole.PLATFORM_ADMIN
        assert caller.salt == RING.secret.salt(TENANT)

    asyncio.run(body())


def test_a_key_of_the_file_ends_when_its_record_says_so() -> None:
    async def body() -> None:
        world = World()
        await world.record_tenant()
        await world.issue(KeyRecord("ops", "acme", "", "", revoked_at=5.0))
        with pytest.raises(Unauthenticated):
            await world.callers.authenticate(SHOWN)

    asyncio.run(body())


def test_a_record_of_the_same_id_lets_nobody_in_with_another_secret() -> None:
    async def body() -> None:
        world = World()
        await world.record_tenant()
        forged = await world.issue(KeyRecord("ops", "acme", "", ""))
        with pytest.raises(Unauthenticated):
            await world.callers.authenticate(forged)

    asyncio.run(body())


def test_a_key_of_the_store_pays_as_recorded() -> None:
    async def body() -> None:
        world = World()
        await world.record_tenant()
        caller = await world.callers.authenticate(await world.issue(KeyRecord("k1", "acme", "", "", priority=-2)))
        assert (caller.key_id, caller.priority, caller.payer.tenant) == ("k1", -2, TENANT)

    asyncio.run(body())


@pytest.mark.parametrize("how", ["is_away", "is_frozen"])
def test_without_redis_known_keys_and_those_of_the_file_go_on(how: str) -> None:
    async def body() -> None:
        world = World()
        await world.record_tenant()
        shown = await world.issue(KeyRecord("k1", "acme", "", ""))
        before = await world.callers.authenticate(shown), await world.callers.authenticate(SHOWN)
        setattr(world.tenancy, how, True)
        for _ in range(3):
            world.clock.advance(10.0)
            async with asyncio.timeout(5):
                assert (await world.callers.authenticate(shown), await world.callers.authenticate(SHOWN)) == before

    asyncio.run(body())


def test_while_redis_is_frozen_only_the_first_request_waits_for_it() -> None:
    async def body() -> None:
        world = World()
        await world.record_tenant()
        shown = await world.issue(KeyRecord("k1", "acme", "", ""))
        await world.callers.authenticate(shown)
        world.tenancy.is_frozen = True
        world.clock.advance(10.0)
        await world.callers.authenticate(shown)
        accounts = world.callers._accounts
        accounts._policy = replace(accounts._policy, patience=3600.0)
        async with asyncio.timeout(20):
            await world.callers.authenticate(shown)

    asyncio.run(body())


def test_a_key_of_the_file_never_seen_before_goes_on_without_redis() -> None:
    async def body() -> None:
        world = World()
        world.tenancy.is_away = True
        assert (await world.callers.authenticate(SHOWN)).key_id == "ops"
        with pytest.raises(StateUnavailable):
            await world.callers.authenticate("k9.secret")

    asyncio.run(body())
