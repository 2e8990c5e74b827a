"""The admin API over real gRPC: what goes in comes out, typed errors included, whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from baton.core.errors import (
    AlreadyExists,
    BatonError,
    Conflict,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from baton.core.types import (
    ANY_ETAG,
    Account,
    AdminRole,
    AwayPolicy,
    Delivered,
    KeyRecord,
    Level,
    Limits,
    Metric,
    ModelLimits,
    Organisation,
    Paging,
    QuotaClaim,
    QuotaRefusal,
    RefusalNote,
    ResourceName,
    Tenant,
    Tier,
    UsageGroup,
    UsageQuery,
    WriteOptions,
)
from baton.rpc.admin import admin_service
from baton.rpc.admin_client import AdminClient
from baton.rpc.channels import ClientSecurity, PeerChannel, open_channel
from protos.baton.v1 import admin_pb2 as pb
from protos.baton.v1 import admin_pb2_grpc
from protos.baton.v1.types_pb2 import TIER_BRONZE
from tests.admin_world import ACME, NEW, NOON, ROOT, UMBRELLA, WHICHEVER, AdminWorld
from tests.contract.wire_doubles import wire

NO_TIME = Timestamp(seconds=2**62)
EVERY_LIMIT = Limits(1, 2, 3, 4, 5, 6, 0, 8, frozenset({Metric.CONCURRENCY, Metric.TOKENS_PER_DAY}))
RULES = (ModelLimits("m", Limits(concurrency=1)), ModelLimits("big", EVERY_LIMIT))
WHOLE_TENANT = Tenant(
    "t", "umbrella", Tier.GOLD, EVERY_LIMIT, RULES, ("m",), "Asia/Tokyo", "group", AwayPolicy.CLOSED, 64, "own"
)
WHOLE_KEY = KeyRecord("k", "acme", "", "", 0.0, NOON + 1.5, None, EVERY_LIMIT, RULES, (), -7, AdminRole.TENANT_ADMIN)


@dataclass
class Served:
    world: AdminWorld
    root: AdminClient
    address: str

    @asynccontextmanager
    async def stub(self, key: str = "root") -> AsyncIterator[tuple[Any, PeerChannel]]:
        peer = open_channel(self.address, ClientSecurity(key))
        try:
            yield admin_pb2_grpc.AdminServiceStub(peer.channel), peer
        finally:
            await peer.close()


def served(body: Callable[[Served], Awaitable[None]]) -> None:
    """Keys in this world read like the name of a role."""

    async def main() -> None:
        world = await AdminWorld().made()
        callers = {"root": world.root, **{role.value: world.caller(role) for role in AdminRole}}

        async def authenticate(presented: str | None) -> Account:
            if presented not in callers:
                raise Unauthenticated("the API key is not valid")
            return callers[presented]

        async with wire(admin_service(world.admin, authenticate), security=ClientSecurity("root")) as (server, peer):
            await body(Served(world, AdminClient(peer), server.address))

    asyncio.run(main())


def test_records_travel_field_by_field() -> None:
    async def body(to: Served) -> None:
        organisation = Organisation("o", EVERY_LIMIT, RULES, "Europe/Berlin")
        made = await to.root.create(ResourceName("o"), organisation, NEW)
        assert made.record == organisation and made == await to.root.get(ResourceName("o"))
        tenant = await to.root.create(UMBRELLA.child("t"), WHOLE_TENANT, NEW)
        assert isinstance(tenant.record, Tenant) and tenant.record.uid
        assert replace(tenant.record, uid="") == WHOLE_TENANT and tenant == await to.root.get(tenant.name)
        assert [warning.field for warning in tenant.warnings] == ["tenant.pool", "tenant.pool"]
        assert tenant == await to.world.admin.get(tenant.name, to.world.root)
        issued = await to.root.issue_key(ACME.child("k"), WHOLE_KEY, NEW)
        stored = await to.world.records.key("k")
        assert stored is not None and isinstance(issued.key.record, KeyRecord)
        assert issued.key.record == replace(stored[0], secret_hmac="")
        assert replace(stored[0], prefix="", secret_hmac="", created_at=0.0) == WHOLE_KEY
        assert to.world.secret.proves(stored[0], issued.secret.partition(".")[2])

    served(body)


def test_updates_rotations_revocations_and_deletions_arrive() -> None:
    async def body(to: Served) -> None:
        first = await to.root.issue_key(ACME, KeyRecord("", "", "", ""), NEW)
        name = first.key.name
        updated = await to.root.update(name, KeyRecord("", "", "", "", priority=4), ("priority",), WHICHEVER)
        assert isinstance(updated.record, KeyRecord) and updated.record.priority == 4
        rotated = await to.root.rotate_key(name, "next", 60.0, WriteOptions(updated.etag))
        assert rotated.key.name == ACME.child("next") and rotated.secret.startswith("next.")
        revoked = await to.root.revoke_key(rotated.key.name, WHICHEVER)
        assert isinstance(revoked.record, KeyRecord) and revoked.record.revoked_at == NOON
        await to.root.delete(name, WHICHEVER, force=False)
        assert [found.name.key for found in (await to.root.list(ACME, Paging())).records] == ["next"]
        await to.root.update(UMBRELLA, Organisation("", Limits(concurrency=9)), ("limits",), WHICHEVER)
        assert (await to.root.get(UMBRELLA)).record.limits == Limits(concurrency=9)
        await to.root.delete(UMBRELLA, WHICHEVER, force=True)
        assert (await to.root.list(ROOT, Paging())).records == ()

    served(body)


def test_pages_follow_each_other() -> None:
    async def body(to: Served) -> None:
        page = await to.root.list(UMBRELLA, Paging(1))
        assert [found.name.tenant for found in page.records] == ["acme"] and page.next_token == "acme"
        page = await to.root.list(UMBRELLA, Paging(1, page.next_token))
        assert [found.name.tenant for found in page.records] == ["zeta"] and page.next_token == ""
        for paging in (Paging(-1), Paging(1, "]\r\n")):
            with pytest.raises(InvalidRequest, match=r"page_(size|token)"):
                await to.root.list(UMBRELLA, paging)
        first = await to.root.audit(ROOT, Paging(2))
        rest = await to.root.audit(ROOT, Paging(2, first.next_token))
        resources = [entry.resource for entry in (*first.entries, *rest.entries)]
        assert resources == [str(UMBRELLA.child("zeta")), str(ACME), str(UMBRELLA)]
        with pytest.raises(InvalidRequest, match="page_token"):
            await to.root.audit(ROOT, Paging(2, "x"))

    served(body)


def test_quotas_refusals_alerts_and_usage_travel() -> None:
    async def body(to: Served) -> None:
        limits = Limits(requests_per_minute=1, tokens_per_day=10)
        await to.root.update(ACME, Tenant("", "", limits=limits), ("limits",), WHICHEVER)
        await to.root.issue_key(ACME.child("k1"), KeyRecord("", "", "", ""), NEW)
        account = await to.world.records.account("k1")
        assert account is not None
        claim = QuotaClaim("r1", "owner", account, "m", 4, 3)
        await to.world.quota.reserve(claim)
        await to.world.quota.settle(claim, Delivered(4, 1, 2))
        with pytest.raises(QuotaExceeded) as caught:
            await to.world.quota.reserve(replace(claim, request_id="r2"))
        note = RefusalNote("r2", NOON, "acme", "k1", "m", 4, 3, caught.value.refusals)
        await to.world.refusals.note([note])

        assert await to.root.explain(ACME, "r2") == note
        balances = await to.root.quota(ACME.child("k1"), "m")
        held = {(balance.level, balance.metric): balance for balance in balances}
        minute = held[Level.TENANT, Metric.REQUESTS_PER_MINUTE]
        assert (minute.limit, minute.used, minute.reserved, minute.remaining) == (1, 1, 0, 0)
        first = await to.root.alerts(UMBRELLA, Paging(1))
        rest = await to.root.alerts(UMBRELLA, Paging(1, first.next_token))
        assert [*first.alerts, *rest.alerts] == await to.world.quota.alerts("umbrella")
        assert [alert.percent for alert in (*first.alerts, *rest.alerts)] == [50, 100]
        assert {alert.at for alert in rest.alerts} == {NOON}
        query = UsageQuery(ROOT, NOON - 1, NOON + 1)
        [entry] = [entry async for entry in to.root.export_usage(query)]
        assert entry == (await to.world.quota.entries("umbrella"))[0]
        for group, subject in ((UsageGroup.TENANT, "acme"), (UsageGroup.KEY, "k1"), (UsageGroup.MODEL, "m")):
            [used] = await to.root.sum_usage(query, group)
            figures = (used.subject, used.requests, used.input_tokens, used.cached_tokens, used.output_tokens)
            assert figures == (subject, 1, 4, 1, 2)
        for empty in (replace(query, end=NOON), replace(query, start=NOON + 0.5), replace(query, model="n")):
            assert [entry async for entry in to.root.export_usage(empty)] == []
        with pytest.raises(InvalidRequest, match="end"):
            await to.root.sum_usage(UsageQuery(ROOT, 5.0, 5.0), UsageGroup.KEY)

    served(body)


def test_a_refusal_that_never_fits_stays_one() -> None:
    async def body(to: Served) -> None:
        never = QuotaRefusal(Level.KEY, "k", "m", Metric.BURST, 1, 2, 3, 4, None)
        note = RefusalNote("r", NOON, "acme", "k", "m", 1, 2, (never, replace(never, retry_after=0.25)))
        await to.world.refusals.note([note])
        assert await to.root.explain(ACME, "r") == note

    served(body)


UNKNOWN_TIER = pb.CreateTenantRequest(parent=str(UMBRELLA), tenant_id="t")
UNKNOWN_TIER.tenant.MergeFromString(b"\x30\x63")  # field 6, a tier of a newer version
Call = Callable[[AdminClient], Awaitable[object]]
REFUSED: dict[str, tuple[str, type[BatonError], Call]] = {
    "nobody": ("stranger", Unauthenticated, lambda c: c.get(ACME)),
    "no role": ("none", PermissionDenied, lambda c: c.get(ACME)),
    "viewer writes": ("viewer", PermissionDenied, lambda c: c.revoke_key(ACME.child("k"), WHICHEVER)),
    "someone else's": ("tenant_admin", NotFound, lambda c: c.get(UMBRELLA.child("zeta"))),
    "beyond the tenant": ("viewer", PermissionDenied, lambda c: c.audit(UMBRELLA, Paging())),
    "usage of all": ("viewer", PermissionDenied, lambda c: c.sum_usage(UsageQuery(UMBRELLA, 1, 2), UsageGroup.KEY)),
    "taken": ("root", AlreadyExists, lambda c: c.create(ACME, Tenant("", ""), NEW)),
    "stale": ("root", Conflict, lambda c: c.delete(ACME, WriteOptions("stale"), force=False)),
    "unknown request": ("root", NotFound, lambda c: c.explain(ACME, "never-sent")),
    "no etag": ("root", InvalidRequest, lambda c: c.delete(ACME, NEW, force=False)),
    "no mask": ("root", InvalidRequest, lambda c: c.update(ACME, Tenant("", ""), (), WHICHEVER)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_the_same_error_on_both_ends(case: str) -> None:
    key, kind, call = REFUSED[case]

    async def body(to: Served) -> None:
        async with to.stub(key) as (_, peer):
            with pytest.raises(kind) as caught:
                await call(AdminClient(peer))
            assert type(caught.value) is kind

    served(body)


def test_a_viewer_who_names_nothing_sees_its_own_tenant() -> None:
    async def body(to: Served) -> None:
        async with to.stub("viewer") as (_, peer):
            viewer = AdminClient(peer)
            assert [entry.resource for entry in (await viewer.audit(ROOT, Paging())).entries] == [str(ACME)]
            assert await viewer.sum_usage(UsageQuery(ROOT, 1, 2), UsageGroup.KEY) == ()
            with pytest.raises(NotFound, match="organizations/umbrella/tenants/acme"):
                await viewer.explain(ROOT, "r1")

    served(body)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("GetTenant", pb.GetTenantRequest(name="organizations/umbrella"), "name"),
        ("GetTenant", pb.GetTenantRequest(name="organizations/umbrella/tenants/a*"), "name.tenants"),
        ("GetTenant", pb.GetTenantRequest(), "name"),
        ("ListKeys", pb.ListKeysRequest(parent="tenants/acme"), "parent"),
        ("CreateTenant", pb.CreateTenantRequest(parent=str(UMBRELLA), tenant_id="A B"), "tenant_id"),
        ("CreateTenant", UNKNOWN_TIER, "Tenant.tier"),
        ("UpdateTenant", pb.UpdateTenantRequest(tenant=pb.Tenant(name=str(ACME), etag=ANY_ETAG)), "update_mask"),
        (
            "UpdateTenant",
            pb.UpdateTenantRequest(tenant=pb.Tenant(name=str(ACME)), update_mask=FieldMask(paths=["limits"])),
            "etag",
        ),
        ("ExplainRefusal", pb.ExplainRefusalRequest(parent=str(ACME)), "ExplainRefusalRequest.request_id"),
        ("QueryUsage", pb.QueryUsageRequest(), "QueryUsageRequest.filter"),
        ("RotateKey", pb.RotateKeyRequest(name=str(ACME.child("k")), successor_id="a.b{"), "successor_id"),
        ("CreateKey", pb.CreateKeyRequest(parent=str(ACME), key=pb.Key(expire_time=NO_TIME)), "Key.expire_time"),
        ("QueryUsage", pb.QueryUsageRequest(filter=pb.UsageFilter(end_time=NO_TIME)), "UsageFilter.end_time"),
    ],
)
def test_what_no_client_of_ours_sends_is_refused_by_its_field(method: str, request_: Any, field: str) -> None:
    async def body(to: Served) -> None:
        async with to.stub() as (stub, peer):
            with pytest.raises(InvalidRequest) as caught:
                await peer.answer(getattr(stub, method)(request_, metadata=peer.metadata()))
            assert caught.value.field == field

    served(body)


def test_a_key_of_another_kind_of_header_is_taken_too() -> None:
    async def body(to: Served) -> None:
        async with to.stub("") as (stub, _):
            metadata = grpc.aio.Metadata(("x-api-key", "viewer"))
            answer = await stub.GetTenant(pb.GetTenantRequest(name=str(ACME)), metadata=metadata)
            assert answer.tenant.name == str(ACME) and answer.tenant.tier == TIER_BRONZE

    served(body)


def test_a_long_export_comes_in_pieces_and_in_order() -> None:
    async def body(to: Served) -> None:
        await to.root.issue_key(ACME.child("k1"), KeyRecord("", "", "", ""), NEW)
        account = await to.world.records.account("k1")
        assert account is not None
        for number in range(1203):
            claim = QuotaClaim(f"r{number}", "owner", account, "m", 1, 1)
            await to.world.quota.reserve(claim)
            await to.world.quota.settle(claim, Delivered(1, 0, 1))
        found = [entry.request_id async for entry in to.root.export_usage(UsageQuery(UMBRELLA, 0, NOON + 1))]
        assert found == [f"r{number}" for number in range(1203)]

    served(body)
