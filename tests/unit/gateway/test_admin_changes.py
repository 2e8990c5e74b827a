from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from baton.core.errors import AlreadyExists, BatonError, Conflict, InvalidRequest, NotFound, PermissionDenied
from baton.core.types import (
    ANY_ETAG,
    AdminRole,
    KeyRecord,
    Limits,
    ModelLimits,
    Organisation,
    Paging,
    ResourceName,
    Tenant,
    Tier,
    WriteOptions,
)
from gateway.fleet import FleetFacts
from tests.admin_world import ACME, NEW, ROOT, UMBRELLA, WHICHEVER, AdminWorld


def in_world(body: Callable[[AdminWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(await AdminWorld().made())

    asyncio.run(main())


def test_an_update_takes_the_fields_of_its_mask_and_no_other() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root = world.admin, world.root
        limits = Limits(concurrency=3, tokens_per_day=9)
        given = Tenant("", "", Tier.GOLD, limits, models=("m",), time_zone="Asia/Tokyo", uid="of the caller's choice")
        done = await admin.update(ACME, given, ["tier", "limits.concurrency"], WHICHEVER, root)
        uid = await uid_of(world)
        assert done.record == Tenant("acme", "umbrella", Tier.GOLD, Limits(concurrency=3), uid=uid)
        again = await admin.update(ACME, given, ["limits.tokens_per_day"], WHICHEVER, root)
        assert again.record.limits == limits and again.etag != done.etag
        whole = await admin.update(ACME, given, ["*"], WHICHEVER, root)
        assert whole.record == replace(given, name="acme", organisation="umbrella", uid=uid)
        assert await admin.get(ACME, root) == whole

    in_world(body)


async def uid_of(world: AdminWorld) -> str:
    found = await world.records.tenant("acme")
    assert found is not None
    return found[0].uid


@pytest.mark.parametrize(
    "mask", [[], ["uid"], ["name"], ["limits.speed"], ["tier.x"], ["organisation"], ["secret_hmac"]]
)
def test_a_mask_that_names_no_field_is_refused_by_name(mask: list[str]) -> None:
    async def body(world: AdminWorld) -> None:
        with pytest.raises(InvalidRequest, match="update_mask") as caught:
            await world.admin.update(ACME, Tenant("", ""), mask, WHICHEVER, world.root)
        assert caught.value.field == "update_mask"

    in_world(body)


def test_an_update_needs_an_etag_and_the_right_one() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root, given = world.admin, world.root, Tenant("", "", Tier.GOLD)
        with pytest.raises(InvalidRequest, match="etag"):
            await admin.update(ACME, given, ["tier"], NEW, root)
        seen = await admin.get(ACME, root)
        await admin.update(ACME, given, ["tier"], WriteOptions(seen.etag), root)
        with pytest.raises(Conflict, match=seen.etag):
            await admin.update(ACME, given, ["tier"], WriteOptions(seen.etag), root)
        with pytest.raises(Conflict, match="changed"):
            await admin.delete(ACME, WriteOptions(seen.etag), force=False, caller=root)

    in_world(body)


def test_writers_that_take_whichever_etag_lose_no_change_of_each_other() -> None:
    async def body(world: AdminWorld) -> None:
        metrics = ("concurrency", "tokens_per_day", "tokens_per_month", "requests_per_minute")
        given = Tenant("", "", limits=Limits(**dict.fromkeys(metrics, 7)))
        updates = [world.admin.update(ACME, given, [f"limits.{name}"], WHICHEVER, world.root) for name in metrics]
        await asyncio.gather(*updates)
        assert (await world.admin.get(ACME, world.root)).record.limits == given.limits

    in_world(body)


BAD: list[tuple[ResourceName, Tenant, str]] = [
    (UMBRELLA.child("new"), Tenant("", "", limits=Limits(concurrency=-1)), r"tenant\.limits\.concurrency.*-1"),
    (UMBRELLA.child("new"), Tenant("", "", limits=Limits(tokens_per_day=10**13)), r"tokens_per_day.*10000000000000"),
    (UMBRELLA.child("new"), Tenant("", "", models=("n",)), r"models: must be one of m, big, got 'n'"),
    (UMBRELLA.child("new"), Tenant("", "", model_limits=(ModelLimits("n", Limits()),)), r"models.*'n'"),
    (UMBRELLA.child("new"), Tenant("", "", time_zone="Mars/Base"), r"time_zone.*'Mars/Base'"),
    (UMBRELLA.child("a{b}"), Tenant("", ""), r"tenant\.name.*a-z.*'a\{b\}'"),
    (UMBRELLA.child("a\r\nDEL x"), Tenant("", ""), r"tenant\.name"),
    (UMBRELLA.child("a:b"), Tenant("", ""), r"tenant\.name"),
    (UMBRELLA.child("x" * 64), Tenant("", ""), r"1 to 63"),
]


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(("name", "record", "told"), BAD)
def test_what_makes_no_sense_is_refused_with_field_limit_and_value(
    name: ResourceName, record: Tenant, told: str, dry: bool
) -> None:
    async def body(world: AdminWorld) -> None:
        with pytest.raises(InvalidRequest, match=told):
            await world.admin.create(name, record, WriteOptions(validate_only=dry), world.root)
        assert len((await world.admin.list(UMBRELLA, Paging(), world.root)).records) == 2

    in_world(body)


def test_a_model_that_left_the_fleet_stays_in_records_that_had_it() -> None:
    async def body(world: AdminWorld) -> None:
        await world.admin.update(ACME, Tenant("", "", models=("m",)), ["models"], WHICHEVER, world.root)
        world.fleet = FleetFacts(models=("big",))
        await world.admin.update(ACME, Tenant("", "", models=("m", "big")), ["models"], WHICHEVER, world.root)
        world.fleet = None  # nobody knows the fleet: no name is known to be wrong
        await world.admin.update(ACME, Tenant("", "", models=("n",)), ["models"], WHICHEVER, world.root)

    in_world(body)


def test_a_dry_run_tells_what_would_be_and_changes_nothing() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root, dry = world.admin, world.root, WriteOptions(ANY_ETAG, validate_only=True)
        before = await world.records.audit("", 100)
        made = await admin.create(UMBRELLA.child("new"), Tenant("", "", Tier.GOLD), dry, root)
        assert made.record == Tenant("new", "umbrella", Tier.GOLD) and made.etag == ""
        with pytest.raises(AlreadyExists, match="acme"):
            await admin.create(ACME, Tenant("", ""), dry, root)
        with pytest.raises(NotFound, match="organizations/none"):
            await admin.create(ResourceName("none", "new"), Tenant("", ""), dry, root)
        with pytest.raises(InvalidRequest, match="force"):
            await admin.delete(UMBRELLA, dry, force=False, caller=root)
        await admin.delete(UMBRELLA, dry, force=True, caller=root)
        issued = await admin.issue_key(ACME.child("k"), KeyRecord("", "", "", ""), dry, root)
        assert issued.secret == ""
        assert await world.records.audit("", 100) == before and await world.records.key("k") is None

    in_world(body)


def test_a_tenant_goes_with_its_keys_and_a_new_one_of_its_name_has_none() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root = world.admin, world.root
        await world.issue("k1")
        with pytest.raises(InvalidRequest, match="force"):
            await admin.delete(ACME, WHICHEVER, force=False, caller=root)
        before = await uid_of(world)
        await admin.delete(ACME, WHICHEVER, force=True, caller=root)
        assert await world.records.account("k1") is None
        await admin.create(ACME, Tenant("", "", uid=before), NEW, root)
        assert await uid_of(world) not in {"", before}, "nor does it find what is cached of the other's prompts"
        assert await world.records.account("k1") is None
        with pytest.raises(NotFound):
            await admin.get(ACME.child("k1"), root)
        actions = [(entry.action, entry.resource) for entry in await world.records.audit("", 3)]
        assert actions[1:] == [("delete tenant", str(ACME.child("k1"))), ("delete tenant", str(ACME))]

    in_world(body)


def test_a_repeated_request_id_changes_nothing_more_and_gets_the_first_answer() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root = world.admin, world.root
        once = WriteOptions(ANY_ETAG, request_id="r1")
        gold = Tenant("", "", Tier.GOLD)
        first = await admin.update(ACME, gold, ["tier"], once, root)
        await admin.update(ACME, Tenant("", "", Tier.SILVER), ["tier"], WHICHEVER, root)
        assert await admin.update(ACME, gold, ["tier"], once, root) == first
        assert (await admin.get(ACME, root)).record == Tenant("acme", "umbrella", Tier.SILVER, uid=await uid_of(world))
        with pytest.raises(InvalidRequest, match=r"request_id.*another call"):
            await admin.update(ACME, gold, ["*"], once, root)
        gone = WriteOptions(ANY_ETAG, request_id="r2")
        for _ in range(2):
            await admin.delete(UMBRELLA.child("zeta"), gone, force=False, caller=root)

    in_world(body)


def test_a_repeated_issue_makes_one_key_and_tells_its_secret_once() -> None:
    async def body(world: AdminWorld) -> None:
        once = WriteOptions(request_id="r1")
        first = await world.admin.issue_key(ACME, KeyRecord("", "", "", ""), once, world.root)
        again = await world.admin.issue_key(ACME, KeyRecord("", "", "", ""), once, world.root)
        assert first.secret and again.secret == "" and again.key == first.key
        assert len((await world.admin.list(ACME, Paging(), world.root)).records) == 1

    in_world(body)


def test_a_call_that_lost_the_race_against_its_own_repetition_gets_the_winners_answer() -> None:
    """Both looked for an earlier call before either was done."""

    async def body(world: AdminWorld) -> None:
        async def nothing(actor: str, request: str) -> None:
            return None

        world.records.committed = nothing  # type: ignore[method-assign,assignment]
        once = WriteOptions(ANY_ETAG, request_id="r1")
        issue = partial(world.admin.issue_key, ACME, KeyRecord("", "", "", ""), once, world.root)
        first, again = await issue(), await issue()
        assert again.key == first.key and (bool(first.secret), again.secret) == (True, "")
        twice = WriteOptions(ANY_ETAG, request_id="r2")
        rotate = partial(world.admin.rotate_key, first.key.name, "", 9.0, twice, world.root)
        first, again = await rotate(), await rotate()
        assert again.key == first.key and (bool(first.secret), again.secret) == (True, "")

    in_world(body)


def test_a_request_id_stands_for_one_key_id() -> None:
    async def body(world: AdminWorld) -> None:
        once = WriteOptions(request_id="r1")
        await world.admin.issue_key(ACME.child("k1"), KeyRecord("", "", "", ""), once, world.root)
        with pytest.raises(InvalidRequest, match="another call"):
            await world.admin.issue_key(ACME.child("k2"), KeyRecord("", "", "", ""), once, world.root)

    in_world(body)


def test_keys_are_issued_rotated_with_overlap_and_revoked() -> None:
    async def body(world: AdminWorld) -> None:
        admin, root, records = world.admin, world.root, world.records
        secret = await world.issue("k1", priority=5, role=AdminRole.VIEWER)
        with pytest.raises(AlreadyExists, match="k1"):
            await world.issue("k1")
        with pytest.raises(AlreadyExists, match="k1"):
            await world.issue("k1", UMBRELLA.child("zeta"))
        rotated = await admin.rotate_key(ACME.child("k1"), "k2", 60.0, WHICHEVER, root)
        old, new = await records.key("k1"), await records.key("k2")
        assert old is not None and new is not None
        assert world.secret.proves(old[0], secret.partition(".")[2])
        assert world.secret.proves(new[0], rotated.secret.partition(".")[2])
        assert (new[0].priority, new[0].role) == (5, AdminRole.VIEWER)
        now = world.clock.wall()
        assert old[0].is_active(now + 59) and not old[0].is_active(now + 60) and new[0].is_active(now + 10**6)
        revoked = await admin.revoke_key(ACME.child("k2"), WHICHEVER, root)
        assert isinstance(revoked.record, KeyRecord) and not revoked.record.is_active(now)
        for overlap in (0.0, -1.0, 1e9):
            with pytest.raises(InvalidRequest, match="overlap"):
                await admin.rotate_key(ACME.child("k1"), "k3", overlap, WHICHEVER, root)

    in_world(body)


def test_a_record_is_found_under_its_own_parents_only() -> None:
    async def body(world: AdminWorld) -> None:
        await world.admin.create(ResourceName("other"), Organisation(""), NEW, world.root)
        await world.issue("k1")
        for name in (
            ResourceName("other", "acme"),
            ResourceName("other", "acme", "k1"),
            UMBRELLA.child("zeta").child("k1"),
        ):
            with pytest.raises(NotFound):
                await world.admin.get(name, world.root)
            with pytest.raises(NotFound):
                await world.admin.delete(name, WHICHEVER, force=True, caller=world.root)
        with pytest.raises(NotFound):
            await world.admin.issue_key(ResourceName("other", "acme", "k2"), KeyRecord("", "", "", ""), NEW, world.root)

    in_world(body)


async def _refused(kind: type[BatonError], call: Awaitable[object]) -> None:
    with pytest.raises(kind):
        await call


def test_a_tenant_admin_rules_its_own_tenant_and_nothing_above_it() -> None:
    async def body(world: AdminWorld) -> None:
        admin, boss = world.admin, world.caller(AdminRole.TENANT_ADMIN)
        await admin.update(ACME, Tenant("", "", limits=Limits(concurrency=2)), ["limits"], WHICHEVER, boss)
        await admin.issue_key(ACME.child("k1"), KeyRecord("", "", "", "", role=AdminRole.VIEWER), NEW, boss)
        await admin.revoke_key(ACME.child("k1"), WHICHEVER, boss)
        gold, denied = Tenant("", "", Tier.GOLD), PermissionDenied
        await _refused(denied, admin.update(ACME, gold, ["tier"], WHICHEVER, boss))
        await _refused(denied, admin.update(ACME, Tenant("", "", max_kv_blocks=9), ["max_kv_blocks"], WHICHEVER, boss))
        await _refused(denied, admin.update(ACME, Tenant("", "", pool="p"), ["pool"], WHICHEVER, boss))
        await _refused(denied, admin.update(ACME, gold, ["*"], WHICHEVER, boss))
        await _refused(denied, admin.update(UMBRELLA, Organisation(""), ["limits"], WHICHEVER, boss))
        await _refused(denied, admin.create(UMBRELLA.child("new"), gold, NEW, boss))
        await _refused(denied, admin.delete(ACME, WHICHEVER, force=True, caller=boss))
        await _refused(denied, admin.list(UMBRELLA, Paging(), boss))
        await _refused(NotFound, admin.get(UMBRELLA.child("zeta"), boss))
        await _refused(NotFound, admin.update(UMBRELLA.child("zeta"), gold, ["limits"], WHICHEVER, boss))
        await _refused(NotFound, admin.issue_key(UMBRELLA.child("zeta"), KeyRecord("", "", "", ""), NEW, boss))
        assert (await admin.get(UMBRELLA, boss)).name == UMBRELLA

    in_world(body)


def test_nobody_gives_or_takes_over_more_than_it_has() -> None:
    async def body(world: AdminWorld) -> None:
        admin, boss = world.admin, world.caller(AdminRole.TENANT_ADMIN)
        await world.issue("root", role=AdminRole.PLATFORM_ADMIN)
        await world.issue("plain")
        powerful = KeyRecord("", "", "", "", role=AdminRole.PLATFORM_ADMIN)
        urgent, root_key = KeyRecord("", "", "", "", priority=1), ACME.child("root")
        for call in (
            admin.issue_key(ACME.child("new"), powerful, NEW, boss),
            admin.issue_key(ACME.child("new"), urgent, NEW, boss),
            admin.update(ACME.child("plain"), powerful, ["role"], WHICHEVER, boss),
            admin.update(ACME.child("plain"), urgent, ["priority"], WHICHEVER, boss),
            admin.rotate_key(root_key, "", 60.0, WHICHEVER, boss),
            admin.revoke_key(root_key, WHICHEVER, boss),
            admin.delete(root_key, WHICHEVER, force=False, caller=boss),
        ):
            await _refused(PermissionDenied, call)

    in_world(body)


def test_a_viewer_looks_and_a_key_without_a_role_does_not_even_that() -> None:
    async def body(world: AdminWorld) -> None:
        admin, viewer, nobody = world.admin, world.caller(AdminRole.VIEWER), world.caller(AdminRole.NONE)
        assert (await admin.get(ACME, viewer)).name == ACME
        assert (await admin.list(ACME, Paging(), viewer)).records == ()
        await _refused(PermissionDenied, admin.update(ACME, Tenant("", ""), ["limits"], WHICHEVER, viewer))
        await _refused(PermissionDenied, admin.issue_key(ACME, KeyRecord("", "", "", ""), NEW, viewer))
        await _refused(PermissionDenied, admin.get(ACME, nobody))
        await _refused(PermissionDenied, admin.list(ROOT, Paging(), nobody))

    in_world(body)


def test_the_audit_log_says_who_changed_what_from_what_to_what() -> None:
    async def body(world: AdminWorld) -> None:
        boss = world.caller(AdminRole.TENANT_ADMIN)
        once = WriteOptions(ANY_ETAG, request_id="r7")
        await world.admin.update(ACME, Tenant("", "", limits=Limits(concurrency=2)), ["limits"], once, boss)
        entry = (await world.admin.audit(ACME, Paging(1), boss)).entries[0]
        assert entry.actor == "organizations/umbrella/tenants/acme/keys/acme-tenant-admin"
        assert (entry.action, entry.resource, entry.request_id) == ("update tenant", str(ACME), "r7")
        assert json.loads(entry.before)["limits"]["concurrency"] is None
        assert json.loads(entry.after)["limits"]["concurrency"] == 2

    in_world(body)
