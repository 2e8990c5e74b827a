"""One suite for both stores of organisations, tenants and keys."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from baton.core.errors import Conflict, InvalidRequest, StateUnavailable
from baton.core.tenancy_api import TenancyApi
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
from baton.state.config import StateConfig
from baton.state.redis_client import connect
from baton.state.tenancy import MemoryTenancy, RedisTenancy
from baton.state.tenancy_records import decode, encode

LIMITS = Limits(tokens_per_day=5, concurrency=0, shadow=frozenset({Metric.TOKENS_PER_DAY, Metric.CONCURRENCY}))
RULES = (ModelLimits("org/model:7b", LIMITS), ModelLimits("m", Limits()))
ORGANISATION = Organisation("umbrella", LIMITS, RULES, "Asia/Tokyo")
TENANT = Tenant(
    "acme", "umbrella", Tier.GOLD, LIMITS, RULES, ("m",), "Europe/Berlin", "group", AwayPolicy.CLOSED, 64, "own"
)
KEY = KeyRecord("k1", "acme", "k1.abcd", "ff00", 1.5, 2.5, None, LIMITS, RULES, None, -3)

InStore = Callable[[Callable[[TenancyApi], Awaitable[None]]], None]


@pytest.fixture(params=["memory", "valkey"])
def in_each_store(request: pytest.FixtureRequest) -> InStore:
    def run(body: Callable[[TenancyApi], Awaitable[None]]) -> None:
        async def main() -> None:
            if request.param == "memory":
                await body(MemoryTenancy())
                return
            url = request.getfixturevalue("quota_server")
            config = StateConfig(url, "secret", timeout_ms=5_000, namespace=f"test-{os.urandom(4).hex()}")
            async with connect(config) as client:
                await body(RedisTenancy(client, config))

        asyncio.run(main())

    return run


def test_records_come_back_field_by_field(in_each_store: InStore) -> None:
    async def body(store: TenancyApi) -> None:
        assert await store.tenant("acme") is None
        etags = [
            await store.put_organisation(ORGANISATION, ""),
            await store.put_tenant(TENANT, ""),
            await store.put_key(KEY, ""),
        ]
        assert await store.organisation("umbrella") == (ORGANISATION, etags[0])
        assert await store.tenant("acme") == (TENANT, etags[1])
        assert await store.key("k1") == (KEY, etags[2])
        assert await store.account("k1") == Account(ORGANISATION, TENANT, KEY)

    in_each_store(body)


def test_an_account_needs_its_tenant_and_its_organisation(in_each_store: InStore) -> None:
    async def body(store: TenancyApi) -> None:
        assert await store.account("k1") is None
        await store.put_key(KEY, "")
        assert await store.account("k1") is None
        await store.put_tenant(TENANT, "")
        assert await store.account("k1") is None
        await store.put_organisation(ORGANISATION, "")
        assert await store.account("k1") is not None
        assert await store.account("k2") is None

    in_each_store(body)


def test_a_write_that_did_not_see_the_latest_one_is_refused(in_each_store: InStore) -> None:
    async def body(store: TenancyApi) -> None:
        with pytest.raises(Conflict, match="does not exist"):
            await store.put_tenant(TENANT, "abc")
        first = await store.put_tenant(TENANT, "")
        with pytest.raises(Conflict, match="exists already"):
            await store.put_tenant(replace(TENANT, tier=Tier.BRONZE), "")
        second = await store.put_tenant(replace(TENANT, tier=Tier.SILVER), first)
        assert first != second
        with pytest.raises(Conflict, match="has changed"):
            await store.put_tenant(TENANT, first)
        assert await store.tenant("acme") == (replace(TENANT, tier=Tier.SILVER), second)
        await store.put_tenant(TENANT, "*")

    in_each_store(body)


def test_what_makes_no_sense_is_not_stored(in_each_store: InStore) -> None:
    async def body(store: TenancyApi) -> None:
        with pytest.raises(InvalidRequest, match=r"tenant\.name"):
            await store.put_tenant(replace(TENANT, name="{other}"), "")
        with pytest.raises(InvalidRequest, match=r"key\.id"):
            await store.put_key(replace(KEY, id="a.b"), "")
        with pytest.raises(InvalidRequest, match=r"organisation\.time_zone"):
            await store.put_organisation(replace(ORGANISATION, time_zone="Moon"), "")

    in_each_store(body)


def test_fields_of_a_newer_version_are_ignored_and_garbage_is_not_taken_for_a_record() -> None:
    newer = encode(TENANT).replace(b'"name"', b'"colour":1,"name"').replace(b'"burst"', b'"newer":2,"burst"')
    assert decode(Tenant, newer) == TENANT
    for data in (b"", b"[]", b"{}", b'{"name":1}', encode(TENANT).replace(b'"gold"', b'"lead"')):
        with pytest.raises(ValueError, match=r".+"):
            decode(Tenant, data)


def test_a_record_that_cannot_be_read_is_an_outage_and_no_absence() -> None:
    async def body() -> None:
        store = MemoryTenancy()
        await store.put_key(KEY, "")
        await store.put_tenant(TENANT, "")
        store._records["tenant", "acme"] = b"{", "etag"
        with pytest.raises(StateUnavailable, match="tenancy"):
            await store.account("k1")

    asyncio.run(body())
