"""One suite for both stores of organisations, tenants and keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from baton.core.admin_api import RecordsApi
from baton.core.clock import SystemClock
from baton.core.errors import InvalidRequest, StateUnavailable
from baton.core.types import (
    Account,
    AwayPolicy,
    KeyRecord,
    Limits,
    Metric,
    ModelLimits,
    Organisation,
    Tenant,
    Tier,
)
from baton.state.audited_records import MemoryRecords, RedisRecords
from baton.state.config import StateConfig
from baton.state.redis_client import connect
from baton.state.tenancy_records import decode, encode
from tests.stored_records import store

LIMITS = Limits(tokens_per_day=5, concurrency=0, shadow=frozenset({Metric.TOKENS_PER_DAY, Metric.CONCURRENCY}))
RULES = (ModelLimits("org/model:7b", LIMITS), ModelLimits("m", Limits()))
ORGANISATION = Organisation("umbrella", LIMITS, RULES, "Asia/Tokyo")
TENANT = Tenant(
    "acme", "umbrella", Tier.GOLD, LIMITS, RULES, ("m",), "Europe/Berlin", "group", AwayPolicy.CLOSED, 64, "own"
)
KEY = KeyRecord("k1", "acme", "k1.abcd", "ff00", 1.5, 2.5, None, LIMITS, RULES, None, -3)

InStore = Callable[[Callable[[RecordsApi], Awaitable[None]]], None]


@pytest.fixture(params=["memory", "valkey"])
def in_each_store(request: pytest.FixtureRequest) -> InStore:
    def run(body: Callable[[RecordsApi], Awaitable[None]]) -> None:
        async def main() -> None:
            if request.param == "memory":
                await body(MemoryRecords(SystemClock()))
                return
            url = request.getfixturevalue("quota_server")
            config = StateConfig(url, "secret", timeout_ms=5_000, namespace=f"test-{os.urandom(4).hex()}")
            async with connect(config) as client:
                await body(RedisRecords(client, config))

        asyncio.run(main())

    return run


def test_records_come_back_field_by_field(in_each_store: InStore) -> None:
    async def body(records: RecordsApi) -> None:
        assert await records.tenant("acme") is None
        etags = await store(records, ORGANISATION, TENANT, KEY)
        assert await records.organisation("umbrella") == (ORGANISATION, etags[0])
        assert await records.tenant("acme") == (TENANT, etags[1])
        assert await records.key("k1") == (KEY, etags[2])
        assert await records.account("k1") == Account(ORGANISATION, TENANT, KEY)

    in_each_store(body)


def test_the_revision_changes_with_every_change_of_a_record_and_not_without(in_each_store: InStore) -> None:
    async def body(records: RecordsApi) -> None:
        seen = [await records.revision()]
        for record in (ORGANISATION, TENANT, KEY, replace(KEY, revoked_at=3.0), replace(TENANT, tier=Tier.SILVER)):
            await store(records, record)
            seen += [await records.revision(), await records.revision()]
            assert await records.account("k1") is not None or record is not KEY
        assert seen[1::2] == seen[2::2]
        assert len(set(seen)) == 6

    in_each_store(body)


def test_an_account_needs_its_tenant_and_its_organisation(in_each_store: InStore) -> None:
    async def body(records: RecordsApi) -> None:
        assert await records.account("k1") is None
        await store(records, KEY)
        assert await records.account("k1") is None
        await store(records, TENANT)
        assert await records.account("k1") is None
        await store(records, ORGANISATION)
        assert await records.account("k1") is not None
        assert await records.account("k2") is None

    in_each_store(body)


def test_what_makes_no_sense_is_not_stored(in_each_store: InStore) -> None:
    async def body(records: RecordsApi) -> None:
        with pytest.raises(InvalidRequest, match=r"tenant\.name"):
            await store(records, replace(TENANT, name="{other}"))
        with pytest.raises(InvalidRequest, match=r"key\.id"):
            await store(records, replace(KEY, id="a.b"))
        with pytest.raises(InvalidRequest, match=r"organization\.time_zone"):
            await store(records, replace(ORGANISATION, time_zone="Moon"))

    in_each_store(body)


def test_fields_of_a_newer_version_are_ignored_and_garbage_is_not_taken_for_a_record() -> None:
    newer = encode(TENANT).replace(b'"name"', b'"colour":1,"name"').replace(b'"burst"', b'"newer":2,"burst"')
    assert decode(Tenant, newer) == TENANT
    for data in (b"", b"[]", b"{}", b'{"name":1}', encode(TENANT).replace(b'"gold"', b'"lead"')):
        with pytest.raises(ValueError, match=r".+"):
            decode(Tenant, data)


def test_a_record_that_cannot_be_read_is_an_outage_and_no_absence() -> None:
    async def body() -> None:
        records = MemoryRecords(SystemClock())
        await store(records, TENANT, KEY)
        records._records["tenant", "acme"] = b"{", "etag"
        with pytest.raises(StateUnavailable, match="tenancy"):
            await records.account("k1")

    asyncio.run(body())
