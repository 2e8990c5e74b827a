"""Minutes, days and months as they turn, and bursts as they refill, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import QuotaExceeded
from baton.core.types import Delivered, LedgerReason, Level, Limits, Metric, SettleOutcome
from baton.state.config import StateConfig
from baton.state.quota.shared import SharedQuota
from tests.contract.quota_worlds import InWorlds, World, account, claim, fake_client, standing

DAY = 86_400.0
PATIENT = StateConfig(quota_budget_ms=10_000)


async def refused_for(world: World, request_id: str, limits: Limits, *, zone: str = "UTC") -> float | None:
    with pytest.raises(QuotaExceeded) as caught:
        await world.quota.reserve(claim(account(limits, time_zone=zone), request_id))
    return caught.value.retry_after


def test_a_minute_has_room_again_when_it_turns(in_timed_worlds: InWorlds) -> None:
    limits = Limits(requests_per_minute=1)

    async def body(world: World) -> None:
        world.pass_time(45.0)
        order = claim(account(limits), "a")
        await world.quota.reserve(order)
        assert await refused_for(world, "b", limits) == pytest.approx(15.0)
        world.pass_time(14.999)
        await refused_for(world, "b", limits)
        world.pass_time(0.001)
        await world.quota.reserve(claim(account(limits), "b"))
        await world.quota.settle(order, Delivered(10, 0, 5))
        assert (await standing(world, account(limits)))["tenant/requests_per_minute"] == (0, 1)

    in_timed_worlds(body)


def test_a_burst_refills_evenly_and_the_minute_still_holds(in_timed_worlds: InWorlds) -> None:
    limits = Limits(requests_per_minute=6, burst=2)

    async def body(world: World) -> None:
        admitted = [0, 0]
        for tenths in range(1200):
            order = claim(account(limits), f"req-{tenths}")
            try:
                await world.quota.reserve(order)
                await world.quota.settle(order, Delivered(1, 0, 1))
                admitted[tenths // 600] += 1
            except QuotaExceeded as refusal:
                assert refusal.retry_after is not None and refusal.retry_after <= 60
            world.pass_time(0.1)
        assert admitted == [6, 6]

    in_timed_worlds(body)


def test_a_burst_says_when_the_next_request_fits(in_timed_worlds: InWorlds) -> None:
    limits = Limits(requests_per_minute=30, burst=2)

    async def body(world: World) -> None:
        for name in "ab":
            await world.quota.reserve(claim(account(limits), name))
        assert await refused_for(world, "c", limits) == pytest.approx(2.0)
        world.pass_time(2.0)
        await world.quota.reserve(claim(account(limits), "c"))
        await refused_for(world, "d", limits)

    in_timed_worlds(body)


@pytest.mark.parametrize(("zone", "hours"), [("UTC", 12.0), ("Asia/Kolkata", 6.5), ("America/New_York", 17.0)])
def test_a_day_ends_at_midnight_of_its_time_zone(in_timed_worlds: InWorlds, zone: str, hours: float) -> None:
    limits = Limits(tokens_per_day=30)

    async def body(world: World) -> None:
        payer = account(limits, time_zone=zone)
        await world.quota.reserve(claim(payer, "a", lease=10 * DAY))
        assert await refused_for(world, "b", limits, zone=zone) == pytest.approx(hours * 3600)
        world.pass_time(hours * 3600 - 0.001)
        await refused_for(world, "b", limits, zone=zone)
        world.pass_time(0.001)
        await world.quota.reserve(claim(payer, "b"))

    in_timed_worlds(body)


def test_days_that_overlap_in_two_time_zones_are_each_counted_to_their_own_end(in_timed_worlds: InWorlds) -> None:
    """It is noon in UTC: the organisation's day in Kolkata ends in 6.5 hours, the tenant's in New York in 17."""
    limits, roomier = Limits(tokens_per_day=60), Limits(tokens_per_day=90)

    async def body(world: World) -> None:
        both = account(roomier, organisation=limits)
        organisation = replace(both.organisation, time_zone="Asia/Kolkata")
        payer = replace(both, organisation=organisation, tenant=replace(both.tenant, time_zone="America/New_York"))

        async def ends_after() -> float | None:
            with pytest.raises(QuotaExceeded) as caught:
                await world.quota.reserve(claim(payer, "too much"))
            return caught.value.retry_after

        async def served(name: str) -> None:
            order = claim(payer, name)
            await world.quota.reserve(order)
            await world.quota.settle(order, Delivered(10, 0, 20))

        await served("a")
        await served("b")
        assert await ends_after() == pytest.approx(6.5 * 3600), "the organisation's day is full"
        world.pass_time(6.5 * 3600)
        await served("c")  # the first of the organisation's next day, the third of the tenant's
        assert await ends_after() == pytest.approx(10.5 * 3600), "now the tenant's is"
        found = {b.level: b.used for b in await world.quota.balances(payer, "m") if b.metric is Metric.TOKENS_PER_DAY}
        assert (found[Level.ORGANISATION], found[Level.TENANT]) == (30, 90)
        world.pass_time(10.5 * 3600)
        await served("d")

    in_timed_worlds(body)


def test_a_month_outlives_its_days(in_timed_worlds: InWorlds) -> None:
    limits = Limits(tokens_per_day=30, tokens_per_month=60)

    async def body(world: World) -> None:
        world.pass_time(-DAY)
        for name in "ab":  # the 28th and the 29th of November
            order = claim(account(limits), name)
            await world.quota.reserve(order)
            await world.quota.settle(order, Delivered(10, 0, 20))
            world.pass_time(DAY)
        assert await refused_for(world, "c", limits) == pytest.approx(0.5 * DAY)
        world.pass_time(0.5 * DAY)
        await world.quota.reserve(claim(account(limits), "c"))

    in_timed_worlds(body)


def test_a_lease_that_ended_is_found_by_the_next_claim(in_timed_worlds: InWorlds) -> None:
    limits = Limits(concurrency=1)

    async def body(world: World) -> None:
        await world.quota.reserve(claim(account(limits), "a", lease=15))
        world.pass_time(14.999)
        assert await refused_for(world, "b", limits) == 1.0
        world.pass_time(0.001)
        await world.quota.reserve(claim(account(limits), "b"))
        (entry,) = await world.ledger.entries("umbrella")
        assert (entry.request_id, entry.reason) == ("a", LedgerReason.EXPIRED)

    in_timed_worlds(body)


def test_a_window_that_turned_warns_anew(in_timed_worlds: InWorlds) -> None:
    limits = Limits(tokens_per_day=30)

    async def body(world: World) -> None:
        for name in "ab":
            order = claim(account(limits), name, tokens=(10, 20))
            await world.quota.reserve(order)
            await world.quota.settle(order, Delivered(10, 0, 14))
            world.pass_time(DAY)
        assert [alert.percent for alert in await world.ledger.alerts("umbrella")] == [80, 80]

    in_timed_worlds(body)


def test_a_limit_set_in_the_middle_of_a_month_finds_what_was_used(in_timed_worlds: InWorlds) -> None:
    async def body(world: World) -> None:
        order = claim(account(), "a")
        await world.quota.reserve(order)
        await world.quota.settle(order, Delivered(10, 0, 20))
        await refused_for(world, "b", Limits(tokens_per_month=59))
        await world.quota.reserve(claim(account(Limits(tokens_per_month=60)), "b"))

    in_timed_worlds(body)


def test_gateways_whose_clocks_differ_count_in_the_same_windows() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            limits = Limits(requests_per_minute=3, tokens_per_day=1000)
            skews = (0.0, 59.0, -3 * DAY, 45 * DAY)
            gateways = [SharedQuota(client, PATIENT, ManualClock(clock.wall() + skew)) for skew in skews]
            for number, gateway in enumerate(gateways[:3]):
                await gateway.reserve(claim(account(limits), f"req-{number}"))
            for gateway in gateways:
                with pytest.raises(QuotaExceeded, match="limit 3, used 0, reserved 3"):
                    await gateway.reserve(claim(account(limits), "one-too-many"))

    asyncio.run(body())


def test_a_server_that_lost_its_scripts_is_sent_them_again() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            quota = SharedQuota(client, PATIENT, clock)
            order = claim(account())
            await quota.reserve(order)
            await client.script_flush()
            assert await quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.SETTLED

    asyncio.run(body())


def test_a_server_restarted_empty_charges_what_it_forgot_once() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            quota = SharedQuota(client, PATIENT, clock)
            order = claim(account(Limits(tokens_per_day=100)))
            await quota.reserve(order)
            await client.flushall()
            assert await quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.SETTLED
            assert await quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.ALREADY
            day = next(b for b in await quota.balances(account(), "m") if b.metric == "tokens_per_day")
            assert (day.used, day.reserved) == (15, 0)

    asyncio.run(body())


def test_counters_that_were_evicted_begin_anew_and_stay_sound() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            quota = SharedQuota(client, PATIENT, clock)
            orders = [claim(account(Limits(tokens_per_minute=500)), f"req-{number}") for number in range(3)]
            await quota.reserve(orders[0])
            await client.delete("baton:{umbrella}:quota:tenant:acme:")
            await quota.reserve(orders[1])
            for order in orders[:2]:
                await quota.settle(order, Delivered(10, 0, 5))
            await quota.reserve(orders[2])
            day = next(b for b in await quota.balances(account(), "m") if b.metric == "tokens_per_day")
            assert (day.used, day.reserved) == (30, 30)

    asyncio.run(body())


def test_a_busy_tenant_keeps_the_latest_windows_only() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            quota = SharedQuota(client, PATIENT, clock)
            for number in range(300):
                order = claim(account(Limits(requests_per_minute=50)), f"req-{number}")
                await quota.reserve(order)
                await quota.settle(order, Delivered(10, 0, 5))
                clock.advance(60 if number < 200 else 40_000)
                assert await client.strlen("baton:{umbrella}:quota:tenant:acme:") <= 1000

    asyncio.run(body())


def test_what_is_over_leaves_nothing_in_redis_but_the_ledger() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            quota = SharedQuota(client, PATIENT, clock)
            for number in range(3):
                order = claim(account(Limits(concurrency=5, requests_per_minute=50, burst=5)), f"req-{number}")
                await quota.reserve(order)
                if number:
                    await quota.settle(order, Delivered(10, 0, 5))
            clock.advance(20)
            assert await quota.expire() == 1
            clock.advance(40 * DAY)
            keys = cast("list[bytes]", await client.keys())
            assert {key.rpartition(b":")[2] for key in keys} == {b"ledger"}

    asyncio.run(body())
