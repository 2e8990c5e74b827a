"""What administrators read: usage of everybody who was charged, and what of a record has no effect as things stand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import InvalidRequest, NotFound, PermissionDenied
from baton.core.pools import Pools
from baton.core.types import (
    Account,
    AdminRole,
    Delivered,
    KeyRecord,
    Level,
    Limits,
    Organisation,
    Paging,
    ProcessRecord,
    QuotaClaim,
    Role,
    Tenant,
    UsageGroup,
    UsageQuery,
    Versioned,
    WriteOptions,
)
from gateway.fleet import FleetFacts, FleetView
from tests.admin_world import ACME, NEW, NOON, ROOT, UMBRELLA, WHICHEVER, AdminWorld

ALL = UsageQuery(ROOT, 0.0, NOON + 60)


def in_world(body: Callable[[AdminWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(await AdminWorld().made())

    asyncio.run(main())


async def used(world: AdminWorld, organisation: str, tenant: str) -> None:
    """One request of the tenant, recorded or not, is charged."""
    account = Account(
        Organisation(organisation), Tenant(tenant, organisation), KeyRecord(f"k-{tenant}", tenant, "", "")
    )
    await world.quota.settle(QuotaClaim(f"r-{tenant}", "o", account, "m", 5, 9), Delivered(5, 0, 7))


def test_usage_without_a_name_is_everybodys_that_was_charged() -> None:
    """A tenant of the key file that nobody recorded, and one whose organisation was deleted, are among them."""

    async def body(world: AdminWorld) -> None:
        await used(world, "umbrella", "acme")
        await used(world, "local", "local")
        await used(world, "gone", "late")
        sums = await world.admin.sum_usage(ALL, UsageGroup.TENANT, world.root)
        assert [each.subject for each in sums] == ["acme", "late", "local"]
        entries = [entry.tenant async for entry in world.admin.export_usage(ALL, world.root)]
        assert entries == ["late", "local", "acme"], "by organisation"
        own = await world.admin.sum_usage(ALL, UsageGroup.TENANT, world.caller(AdminRole.VIEWER))
        assert [each.subject for each in own] == ["acme"]

    in_world(body)


async def alerted(world: AdminWorld, payer: Account) -> None:
    """Every limit of a day that the account has is used up."""
    claim = QuotaClaim(f"r-{payer.key.id}", "o", payer, "m", 0, 10)
    await world.quota.settle(claim, Delivered(0, 0, 10))


def test_alerts_of_a_tenant_are_its_own_and_its_keys_for_whoever_may_look_at_it() -> None:
    async def body(world: AdminWorld) -> None:
        daily = Limits(tokens_per_day=10)
        for tenant in ("acme", "zeta"):
            await world.issue(f"k-{tenant}", UMBRELLA.child(tenant), limits=daily)
            await world.admin.update(
                UMBRELLA.child(tenant), Tenant("", "", limits=daily), ["limits"], WHICHEVER, world.root
            )
            account = await world.records.account(f"k-{tenant}")
            assert account is not None
            await alerted(world, account)
        whole = await world.admin.alerts(UMBRELLA, Paging(), world.root)
        assert [alert.subject for alert in whole.alerts] == ["acme", "k-acme", "zeta", "k-zeta"]
        viewer = world.caller(AdminRole.VIEWER)
        for parent in (ACME, ROOT):
            own = await world.admin.alerts(parent, Paging(), viewer)
            assert [(alert.level, alert.subject) for alert in own.alerts] == [
                (Level.TENANT, "acme"),
                (Level.KEY, "k-acme"),
            ]
        first = await world.admin.alerts(UMBRELLA.child("zeta"), Paging(1), world.root)
        rest = await world.admin.alerts(UMBRELLA.child("zeta"), Paging(1, first.next_token), world.root)
        assert [alert.subject for alert in (*first.alerts, *rest.alerts)] == ["zeta", "k-zeta"]
        for parent, error in ((UMBRELLA, PermissionDenied), (UMBRELLA.child("zeta"), NotFound)):
            with pytest.raises(error):
                await world.admin.alerts(parent, Paging(), viewer)
        with pytest.raises(InvalidRequest, match="parent"):
            await world.admin.alerts(ROOT, Paging(), world.root)
        with pytest.raises(InvalidRequest, match="page_token"):
            await world.admin.alerts(ACME, Paging(1, "x"), viewer)

    in_world(body)


def told(found: Versioned) -> list[str]:
    assert all(warning.field == "tenant.pool" for warning in found.warnings)
    return [warning.message for warning in found.warnings]


def test_a_pool_that_no_worker_belongs_to_is_taken_and_warned_of_wherever_the_tenant_is_told() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root, given = world.admin, world.root, Tenant("", "", pool="fast")
        world.fleet = FleetFacts(("m",), frozenset({"slow", "fat"}), Pools(kept=frozenset({"fast"})))
        rule = "no worker carries the label 'fast', so nothing of this tenant runs; labels of workers: fat, slow"
        dry = await admin.update(ACME, given, ["pool"], WriteOptions("*", validate_only=True), root)
        assert told(dry) == [rule] and told(await admin.get(ACME, root)) == []
        done = await admin.update(ACME, given, ["pool"], WHICHEVER, root)
        assert isinstance(done.record, Tenant) and done.record.pool == "fast" and told(done) == [rule]
        assert told(await admin.create(UMBRELLA.child("new"), given, NEW, root)) == [rule]
        assert await admin.get(ACME, root) == done
        listed = (await admin.list(UMBRELLA, Paging(), root)).records
        assert [bool(found.warnings) for found in listed] == [True, True, False]
        with pytest.raises(NotFound, match=r"no refusal of 'r-1' .*; tenant\.pool: no worker carries the label 'fast'"):
            await admin.explain(ACME, "r-1", root)

    in_world(body)


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        (FleetFacts(labels=frozenset({"fast"}), pools=Pools(kept=frozenset({"fast"}))), None),
        (FleetFacts(labels=frozenset({"fast"}), pools=Pools({"acme": "fast"})), None),
        (FleetFacts(labels=frozenset({"fast"})), "other tenants' requests run on workers with the label 'fast', too"),
        (None, None),
    ],
)
def test_a_pool_that_others_use_too_is_warned_of(fleet: FleetFacts | None, said: str | None) -> None:
    async def body(world: AdminWorld) -> None:
        world.fleet = fleet
        done = await world.admin.update(ACME, Tenant("", "", pool="fast"), ["pool"], WHICHEVER, world.root)
        messages = told(done)
        assert len(messages) == (said is not None) and all(said in message for message in messages if said)

    in_world(body)


def test_the_fleets_facts_are_what_workers_and_planner_registered() -> None:
    view = FleetView(ManualClock())
    assert view.facts() is None
    worker = ProcessRecord("decode-0", Role.DECODE, "a:1", 1, 1, labels=("fast", "acme-only"))
    planner = ProcessRecord(
        "planner", Role.PLANNER, "a:2", 2, 2, labels=("planners",), pools=("tenant:acme=acme-only",)
    )
    view.update([worker, replace(worker, id="prefill-0", role=Role.PREFILL, labels=("fat",)), planner])
    facts = view.facts()
    assert facts is not None and facts.labels == {"fast", "acme-only", "fat"} and facts.pools.labels == {"acme-only"}
