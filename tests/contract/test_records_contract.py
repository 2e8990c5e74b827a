"""One suite for both stores of audited records, and for both logs of refusals."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest

from baton.core.admin_api import RecordsApi, RefusalsApi
from baton.core.clock import SystemClock
from baton.core.errors import AlreadyExists, Conflict, InvalidRequest, NotFound
from baton.core.types import (
    ANY_ETAG,
    Account,
    AdminRole,
    Commit,
    Committed,
    KeyRecord,
    Level,
    Limits,
    Metric,
    Organisation,
    QuotaRefusal,
    RecordChange,
    RefusalNote,
    ResourceName,
    Tenant,
    WriteOptions,
)
from baton.state.audited_records import MemoryRecords, RedisRecords
from baton.state.config import StateConfig
from baton.state.quota.memory import MemoryQuota
from baton.state.redis_client import connect
from baton.state.refusals import KEPT, MemoryRefusals, RedisRefusals
from gateway.admin.parts import AdminParts
from gateway.admin.service import Admin
from gateway.credentials import ServerSecret

ROOT = ResourceName()
ROOT_CALLER = Account(
    Organisation("platform"),
    Tenant("platform", "platform"),
    KeyRecord("root", "platform", "", "", role=AdminRole.PLATFORM_ADMIN),
)
ORGANISATION = Organisation("umbrella")
TENANT = Tenant("acme", "umbrella")
KEY = KeyRecord("k1", "acme", "k1.abcd", "ff00", 1.5, role=AdminRole.VIEWER)
UMBRELLA, ACME, K1 = ResourceName("umbrella"), ResourceName("umbrella", "acme"), ResourceName("umbrella", "acme", "k1")


@dataclass
class Stores:
    records: RecordsApi
    refusals: RefusalsApi

    async def make(self) -> None:
        changes = [(UMBRELLA, ORGANISATION), (ACME, TENANT), (K1, KEY)]
        for name, record in changes:
            parents = (name.parent,) if name.parent.organisation else ()
            change = RecordChange(name, "", None, record)
            done = await self.records.commit(Commit("root", f"create {name.kind}", (change,), parents))
            assert done.record == record and not done.repeated

    async def etags(self) -> tuple[str, str, str]:
        organisation = await self.records.organisation("umbrella")
        tenant, key = await self.records.tenant("acme"), await self.records.key("k1")
        return tuple("" if found is None else found[1] for found in (organisation, tenant, key))  # type: ignore[return-value]


Body = Callable[[Stores], Awaitable[None]]


@pytest.fixture(params=["memory", "valkey"])
def in_each_store(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    def run(body: Body) -> None:
        async def main() -> None:
            if request.param == "memory":
                await body(Stores(MemoryRecords(SystemClock()), MemoryRefusals()))
                return
            url = request.getfixturevalue("quota_server")
            config = StateConfig(url, "secret", timeout_ms=5_000, namespace=f"test-{os.urandom(4).hex()}")
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(connect(config))
                await body(Stores(RedisRecords(client, config), RedisRefusals(client, config)))

        asyncio.run(main())

    return run


InStores = Callable[[Body], None]


def test_a_commit_is_read_back_listed_and_audited(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        records = stores.records
        await stores.make()
        account = await records.account("k1")
        assert account is not None and account.key == KEY and account.tenant == TENANT
        assert [*await records.names(ROOT, "", 10)] == [UMBRELLA]
        assert [*await records.names(UMBRELLA, "", 10)] == [ACME]
        assert [*await records.names(ACME, "", 10)] == [K1]
        newest, second, _ = await records.audit("", 10)
        assert (newest.actor, newest.action, newest.resource) == ("root", "create key", str(K1))
        assert newest.before == "" and json.loads(newest.after)["role"] == "viewer"
        assert (await records.audit(newest.id, 1))[0] == second

    in_each_store(body)


def test_the_audit_log_holds_no_secret(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        await stores.make()
        change = RecordChange(K1, (await stores.etags())[2], KEY, replace(KEY, priority=3))
        await stores.records.commit(Commit("root", "update", (change,)))
        entry = (await stores.records.audit("", 1))[0]
        assert json.loads(entry.before)["priority"] == 0 and json.loads(entry.after)["priority"] == 3
        assert "secret_hmac" not in entry.before + entry.after and "ff00" not in entry.before + entry.after

    in_each_store(body)


def test_names_are_listed_in_order_behind_the_last_one_seen(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        names = ["b", "a-1", "c", "a"]
        for name in names:
            change = RecordChange(ResourceName(name), "", None, Organisation(name))
            await stores.records.commit(Commit("root", "create", (change,)))
        assert [name.id for name in await stores.records.names(ROOT, "", 2)] == ["a", "a-1"]
        assert [name.id for name in await stores.records.names(ROOT, "a-1", 5)] == ["b", "c"]
        assert [name.id for name in await stores.records.names(ROOT, "bb", 5)] == ["c"]

    in_each_store(body)


def test_of_a_commit_that_meets_another_write_nothing_happens(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        await stores.make()
        before = await stores.etags()
        good = RecordChange(UMBRELLA, before[0], ORGANISATION, replace(ORGANISATION, time_zone="Asia/Tokyo"))
        stale = RecordChange(ACME, "stale", TENANT, replace(TENANT, models=("m",)))
        with pytest.raises(Conflict, match="has changed"):
            await stores.records.commit(Commit("root", "update", (good, stale)))
        with pytest.raises(AlreadyExists, match="acme"):
            await stores.records.commit(Commit("root", "create", (good, RecordChange(ACME, "", None, TENANT))))
        gone = RecordChange(ACME.child("k9"), "etag", KEY, KEY)
        with pytest.raises(Conflict, match="does not exist"):
            await stores.records.commit(Commit("root", "update", (good, gone)))
        assert await stores.etags() == before
        assert len(await stores.records.audit("", 10)) == 3

    in_each_store(body)


def test_what_makes_no_sense_is_not_stored_however_it_comes(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        for name, record in (
            (ResourceName("a b"), Organisation("a b")),
            (UMBRELLA, Organisation("umbrella", Limits(concurrency=-1))),
        ):
            with pytest.raises(InvalidRequest, match=r"organization\."):
                await stores.records.commit(Commit("root", "create", (RecordChange(name, "", None, record),)))

    in_each_store(body)


def test_a_child_needs_its_parent_and_a_parent_goes_last(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        orphan = RecordChange(ResourceName("none", "zeta"), "", None, Tenant("zeta", "none"))
        with pytest.raises(NotFound, match="organizations/none"):
            await stores.records.commit(Commit("root", "create", (orphan,), (ResourceName("none"),)))
        await stores.make()
        _, tenant, key = await stores.etags()
        tenant_gone = RecordChange(ACME, tenant, TENANT, None)
        with pytest.raises(InvalidRequest, match="force"):
            await stores.records.commit(Commit("root", "delete", (tenant_gone,), emptied=(ACME,)))
        key_gone = RecordChange(K1, key, KEY, None)
        await stores.records.commit(Commit("root", "delete", (tenant_gone, key_gone), emptied=(ACME,)))
        assert await stores.records.tenant("acme") is None and await stores.records.key("k1") is None
        assert [*await stores.records.names(UMBRELLA, "", 10)] == []

    in_each_store(body)


def test_a_request_id_is_done_once_and_answered_again(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        records = stores.records
        assert await records.committed("root", "r1") is None
        change = RecordChange(UMBRELLA, "", None, ORGANISATION)
        commit = Commit("root", "create", (change,), request="r1", digest="d")
        done = await records.commit(commit)
        again = Committed(ORGANISATION, done.etag, "d", repeated=True)
        assert await records.committed("root", "r1") == again == await records.commit(commit)
        assert await records.committed("somebody", "r1") is None
        assert len(await records.audit("", 10)) == 1
        deletion = RecordChange(UMBRELLA, done.etag, ORGANISATION, None)
        await records.commit(Commit("root", "delete", (deletion,), request="r2", digest="e"))
        answer = await records.committed("root", "r2")
        assert answer is not None and (answer.digest, answer.record) == ("e", None)

    in_each_store(body)


def test_of_racing_writers_one_wins(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        await stores.make()
        etag = (await stores.etags())[1]

        async def write(number: int) -> bool:
            after = replace(TENANT, limits=Limits(concurrency=number))
            try:
                await stores.records.commit(Commit("root", "update", (RecordChange(ACME, etag, TENANT, after),)))
            except Conflict:
                return False
            return True

        assert sum(await asyncio.gather(*map(write, range(20)))) == 1
        assert len(await stores.records.audit("", 100)) == 4

    in_each_store(body)


def admin_over(stores: Stores) -> Admin:
    clock = SystemClock()
    quota, secret = MemoryQuota(clock), ServerSecret("0" * 64)
    return Admin(AdminParts(stores.records, quota, quota, stores.refusals, secret, clock, lambda: None))


def test_writers_that_take_whichever_etag_lose_no_field_of_each_other(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        await stores.make()
        admin, metrics = admin_over(stores), ("concurrency", "tokens_per_day", "tokens_per_month")
        given = Tenant("", "", limits=Limits(concurrency=7, tokens_per_day=7, tokens_per_month=7))
        options = WriteOptions(ANY_ETAG)
        await asyncio.gather(*(admin.update(ACME, given, [f"limits.{name}"], options, ROOT_CALLER) for name in metrics))
        assert (await admin.get(ACME, ROOT_CALLER)).record.limits == given.limits

    in_each_store(body)


def test_calls_that_race_with_one_request_id_are_one_change(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        await stores.make()
        admin, once = admin_over(stores), WriteOptions(request_id="r1")
        issued = await asyncio.gather(
            *(admin.issue_key(ACME, KeyRecord("", "", "", ""), once, ROOT_CALLER) for _ in range(10))
        )
        assert len({answer.key.name for answer in issued}) == 1
        assert sum(bool(answer.secret) for answer in issued) == 1
        assert len(await stores.records.names(ACME, "", 10)) == 2

    in_each_store(body)


def refusal(request_id: str, tenant: str = "acme") -> RefusalNote:
    limit = QuotaRefusal(Level.TENANT, tenant, "", Metric.CONCURRENCY, 1, 0, 1, 1, None)
    return RefusalNote(request_id, 7.25, tenant, "k1", "m", 3, 4, (limit, replace(limit, retry_after=0.5)))


def test_a_refusal_is_found_by_its_request_in_its_tenant_only(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        await stores.refusals.note([refusal("r1"), refusal("r2", "zeta")])
        assert await stores.refusals.find("acme", "r1") == refusal("r1")
        assert await stores.refusals.find("zeta", "r1") is None
        assert await stores.refusals.find("acme", "r3") is None
        assert await stores.refusals.find("nobody", "r1") is None

    in_each_store(body)


def test_a_flood_of_refusals_is_forgotten_from_its_oldest(in_each_store: InStores) -> None:
    async def body(stores: Stores) -> None:
        for start in range(0, 2 * KEPT, 500):
            await stores.refusals.note([refusal(f"r{start + number}") for number in range(500)])
        assert await stores.refusals.find("acme", "r0") is None
        assert await stores.refusals.find("acme", f"r{2 * KEPT - 1}") is not None
        assert await stores.refusals.find("acme", f"r{KEPT}") is not None

    in_each_store(body)


def test_ten_thousand_tenants_are_listed_once_each_and_found_at_once(in_each_store: InStores) -> None:
    many = [f"tenant-{number:05}" for number in range(10_000)]

    async def body(stores: Stores) -> None:
        async def make(name: str) -> None:
            change = RecordChange(UMBRELLA.child(name), "", None, Tenant(name, "umbrella"))
            await stores.records.commit(Commit("root", "create tenant", (change,), (UMBRELLA,)))

        await stores.make()
        for first in range(0, len(many), 100):
            await asyncio.gather(*map(make, many[first : first + 100]))
        listed: list[str] = []
        while page := await stores.records.names(UMBRELLA, listed[-1] if listed else "", 1000):
            listed += [name.tenant for name in page]
        assert listed == ["acme", *many]
        found = await stores.records.tenant(many[-1])
        assert found is not None and found[0].name == many[-1]

    in_each_store(body)
