"""Who holds a key: remembered for a moment, revoked within it, known through an outage."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import StateUnavailable, Unauthenticated
from baton.core.types import Account, KeyRecord, Organisation, Tenant
from baton.state.audited_records import MemoryRecords
from gateway.accounts import AccountPolicy, Accounts
from gateway.credentials import ServerSecret
from tests.stored_records import store

SECRET = ServerSecret("5" * 64)
SHOWN, KEY = SECRET.issue(KeyRecord("k1", "acme", "", "", priority=4))
TENANT = Tenant("acme", "umbrella")


class CountedTenancy(MemoryRecords):
    """``reads`` counts look-ups of accounts; ``is_away`` makes them fail."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.reads = 0
        self.is_away = False

    async def account(self, key_id: str) -> Account | None:
        self.reads += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise StateUnavailable("away")
        return await super().account(key_id)

    async def revision(self) -> str:
        if self.is_away:
            raise StateUnavailable("away")
        return await super().revision()


class SteppedClock(ManualClock):
    """A sleep ends when ``pass_time`` has gone past it."""

    def __init__(self, start: float) -> None:
        super().__init__(start)
        self._moved = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        end = self.now() + seconds
        while self.now() < end:
            await self._moved.wait()

    async def pass_time(self, seconds: float) -> None:
        """In small steps, with everything that wakes up done between them."""
        for _ in range(round(seconds / 0.05)):
            self.advance(0.05)
            self._moved.set()
            self._moved = asyncio.Event()
            for _ in range(5):
                await asyncio.sleep(0)


async def built(policy: AccountPolicy | None = None) -> tuple[Accounts, CountedTenancy, SteppedClock]:
    clock = SteppedClock(1000.0)
    tenancy = CountedTenancy(clock)
    await store(tenancy, Organisation("umbrella"), TENANT, KEY)
    return Accounts(tenancy, SECRET, clock, policy or AccountPolicy()), tenancy, clock


def test_a_key_names_its_tenant_its_salt_and_its_account() -> None:
    async def body() -> None:
        accounts, _, _ = await built()
        principal, account = await accounts.authenticate(SHOWN)
        assert (principal.tenant, principal.key_id, principal.priority) == ("acme", "k1", 4)
        assert principal.salt == SECRET.salt(TENANT)
        assert account == Account(Organisation("umbrella"), TENANT, KEY)

    asyncio.run(body())


@pytest.mark.parametrize("presented", [None, "", "k1", "k1.", ".", "k1.wrong", "k2.x", "{k}:*.x", SHOWN + "x"])
def test_a_wrong_key_is_refused_without_saying_why(presented: str | None) -> None:
    async def body() -> None:
        accounts, _, _ = await built()
        with pytest.raises(Unauthenticated):
            await accounts.authenticate(presented)

    asyncio.run(body())


def test_a_revoked_key_is_refused_within_a_second() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        await accounts.authenticate(SHOWN)
        await store(tenancy, replace(KEY, revoked_at=1000.0))
        clock.advance(0.99)
        with pytest.raises(Unauthenticated):
            await accounts.authenticate(SHOWN)

    asyncio.run(body())


def test_a_revoked_key_is_refused_though_the_loop_was_too_busy_to_hear_of_it_in_time() -> None:
    """With no patience at all every answer comes after the alarm, as in a loop that something holds up."""

    async def body() -> None:
        accounts, tenancy, clock = await built(AccountPolicy(patience=0.0))
        await accounts.authenticate(SHOWN)
        await store(tenancy, replace(KEY, revoked_at=1000.0))
        clock.advance(200.0)
        with pytest.raises(Unauthenticated):
            await accounts.authenticate(SHOWN)

    asyncio.run(body())


def test_a_key_ends_when_it_expires_without_a_look_up() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        await store(tenancy, replace(KEY, expires_at=1000.2))
        await accounts.authenticate(SHOWN)
        clock.advance(0.2)
        with pytest.raises(Unauthenticated):
            await accounts.authenticate(SHOWN)
        assert tenancy.reads == 1

    asyncio.run(body())


def test_many_requests_of_one_key_are_one_look_up() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        asking = [asyncio.create_task(accounts.authenticate(SHOWN)) for _ in range(20)]
        await asyncio.sleep(0)
        asking[0].cancel()
        answers = await asyncio.gather(*asking[1:])
        assert tenancy.reads == 1
        clock.advance(1.0)
        _, again = await accounts.authenticate(SHOWN)
        assert tenancy.reads == 2
        assert again is answers[0][1], "an account that did not change stays the same object"

    asyncio.run(body())


def test_a_changed_limit_is_seen_within_a_second() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        await accounts.authenticate(SHOWN)
        await store(tenancy, replace(TENANT, models=("m",)))
        clock.advance(0.99)
        assert (await accounts.authenticate(SHOWN))[1].tenant.models == ("m",)

    asyncio.run(body())


def test_known_keys_go_on_through_an_outage_for_a_bounded_time() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built(AccountPolicy(stale_seconds=60))
        await accounts.authenticate(SHOWN)
        tenancy.is_away = True
        clock.advance(60)
        await accounts.authenticate(SHOWN)
        with pytest.raises(StateUnavailable):
            await accounts.authenticate("k2.x")
        clock.advance(1)
        with pytest.raises(StateUnavailable):
            await accounts.authenticate(SHOWN)

    asyncio.run(body())


def test_guessing_keys_costs_bounded_memory_and_one_look_up_each() -> None:
    async def body() -> None:
        accounts, tenancy, _ = await built(AccountPolicy(known=10))
        for number in range(50):
            for _ in range(2):
                with pytest.raises(Unauthenticated):
                    await accounts.authenticate(f"guess{number}.x")
        assert tenancy.reads == 50
        assert len(accounts._seen) == 10

    asyncio.run(body())


def test_while_no_record_changes_a_key_is_looked_up_once() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        async with accounts.followed():
            await clock.pass_time(0.3)
            for _ in range(20):
                await accounts.authenticate(SHOWN)
                await clock.pass_time(5.0)
        assert tenancy.reads == 1

    asyncio.run(body())


def test_a_change_is_seen_after_half_a_second_however_long_a_key_was_known() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        async with accounts.followed():
            await accounts.authenticate(SHOWN)
            await clock.pass_time(7.0)
            await store(tenancy, replace(TENANT, models=("m",)))
            await clock.pass_time(0.55)
            assert (await accounts.authenticate(SHOWN))[1].tenant.models == ("m",)
            await store(tenancy, replace(KEY, revoked_at=1000.0))
            await clock.pass_time(0.55)
            with pytest.raises(Unauthenticated):
                await accounts.authenticate(SHOWN)

    asyncio.run(body())


def test_a_change_between_look_up_and_answer_is_not_taken_for_what_was_there() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built()
        async with accounts.followed():
            await clock.pass_time(0.3)
            asking = asyncio.create_task(accounts.authenticate(SHOWN))
            await asyncio.sleep(0)
            await store(tenancy, replace(KEY, revoked_at=1000.0))
            with suppress(Unauthenticated):
                await asking
            await clock.pass_time(0.5)
            with pytest.raises(Unauthenticated):
                await accounts.authenticate(SHOWN)

    asyncio.run(body())


def test_without_news_of_the_revision_a_key_is_looked_up_and_goes_on_for_a_bounded_time() -> None:
    async def body() -> None:
        accounts, tenancy, clock = await built(AccountPolicy(stale_seconds=60))
        async with accounts.followed():
            await accounts.authenticate(SHOWN)
            await clock.pass_time(100)
            tenancy.is_away = True
            await clock.pass_time(59)
            await accounts.authenticate(SHOWN)
            assert tenancy.reads > 1
            await clock.pass_time(2)
            with pytest.raises(StateUnavailable):
                await accounts.authenticate(SHOWN)

    asyncio.run(body())


def test_guesses_do_not_push_out_a_key_in_use() -> None:
    async def body() -> None:
        accounts, tenancy, _ = await built(AccountPolicy(known=10))
        for number in range(50):
            await accounts.authenticate(SHOWN)
            with pytest.raises(Unauthenticated):
                await accounts.authenticate(f"guess{number}.x")
        assert tenancy.reads == 51

    asyncio.run(body())
