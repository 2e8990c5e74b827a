"""Leases of reservations: renewed, run out, taken over; charged once whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import InvalidRequest, QuotaExceeded
from baton.core.tenancy_api import QuotaApi
from baton.core.types import Delivered, LeaseState, LedgerReason, Limits, Prices, Progress, SettleOutcome
from baton.state.config import StateConfig
from baton.state.quota.memory import MemoryQuota
from baton.state.quota.shared import SharedQuota
from tests.contract.quota_worlds import NOON, InWorlds, World, account, claim, fake_client, owned_by, standing

TOKENS = Limits(tokens_per_day=100)
MINUTES = Limits(requests_per_minute=2, tokens_per_minute=70, concurrency=2)


def progress(owner: str = "gateway-1", *, tokens: tuple[int, int, int] = (10, 2, 6)) -> Progress:
    return Progress("req-1", "acme", owner, Delivered(*tokens))


def test_a_crashed_gateways_reservation_ends_charged_for_what_it_told(in_each_world: InWorlds) -> None:
    payer = account(MINUTES, organisation=TOKENS)

    async def body(world: World) -> None:
        await world.quota.reserve(claim(payer, lease=5, prices=Prices(1, 2, 3)))
        states = await world.quota.renew("umbrella", [progress()], world.lease_seconds)
        assert states == [LeaseState.RENEWED]
        await world.lapse()
        now = await standing(world, payer)
        assert now["organization/tokens_per_day"] == (16, 0)
        assert now["tenant/concurrency"] == (0, 0)
        assert now["tenant/requests_per_minute"] in {(1, 0), (0, 0)}  # a real clock may have turned the minute
        (entry,) = await world.ledger.entries("umbrella")
        assert (entry.reason, entry.input_tokens, entry.output_tokens) == (LedgerReason.EXPIRED, 10, 6)
        assert entry.cost == 8 * 1 + 2 * 2 + 6 * 3

    in_each_world(body)


def test_energy_is_charged_with_a_lease_that_ended_and_once(in_each_world: InWorlds) -> None:
    prices = Prices(1, 1, 1, joule=10**9 + 7)  # whose product with the millijoules has more than 53 bits
    told = Delivered(10, 2, 6, energy_millijoules=1_000_000_138)

    async def body(world: World) -> None:
        order = claim(account(TOKENS), lease=5, prices=prices)
        await world.quota.reserve(order)
        await world.quota.renew("umbrella", [Progress("req-1", "acme", "gateway-1", told)], world.lease_seconds)
        await world.lapse()
        total = Delivered(10, 2, 9, energy_millijoules=2_000_000_000)
        await world.quota.settle(order, total)
        first, rest = await world.ledger.entries("umbrella")
        assert (first.reason, first.energy_millijoules) == (LedgerReason.EXPIRED, 1_000_000_138)
        assert first.cost == told.cost(prices) == 16 + 1_000_000_138 * (10**9 + 7) // 1000
        assert (rest.reason, rest.energy_millijoules) == (LedgerReason.LATE, 999_999_862)
        assert first.cost + rest.cost == total.cost(prices)

    in_each_world(body)


@pytest.mark.parametrize("late", [Delivered(10, 5, 6), Delivered(10, 2, 6, energy_millijoules=5)])
def test_what_a_late_settlement_adds_is_booked_whatever_it_is(in_each_world: InWorlds, late: Delivered) -> None:
    async def body(world: World) -> None:
        order = claim(account(TOKENS), lease=5)
        await world.quota.reserve(order)
        await world.quota.renew("umbrella", [progress()], world.lease_seconds)
        await world.lapse()
        await world.quota.settle(order, late)
        entries = await world.ledger.entries("umbrella")
        assert [entry.reason for entry in entries] == [LedgerReason.EXPIRED, LedgerReason.LATE]
        assert sum(entry.cached_tokens for entry in entries) == late.cached_tokens
        assert sum(entry.energy_millijoules for entry in entries) == late.energy_millijoules

    in_each_world(body)


def test_a_settlement_after_the_lease_charges_the_rest_once(in_each_world: InWorlds) -> None:
    payer = account(TOKENS)

    async def body(world: World) -> None:
        order = claim(payer, lease=5, prices=Prices(1, 1, 1))
        await world.quota.reserve(order)
        await world.quota.renew("umbrella", [progress()], world.lease_seconds)
        await world.lapse()
        assert await world.quota.renew("umbrella", [progress()], 5) == [LeaseState.EXPIRED]
        assert await world.quota.settle(order, Delivered(10, 2, 15)) is SettleOutcome.SETTLED
        assert await world.quota.settle(order, Delivered(10, 2, 15)) is SettleOutcome.ALREADY
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (25, 0)
        entries = await world.ledger.entries("umbrella")
        assert [(e.reason, e.requests, e.input_tokens, e.output_tokens, e.cost) for e in entries] == [
            (LedgerReason.EXPIRED, 1, 10, 6, 16),
            (LedgerReason.LATE, 0, 0, 9, 9),
        ]

    in_each_world(body)


def test_a_request_resumed_elsewhere_is_charged_once(in_each_world: InWorlds) -> None:
    payer = account(Limits(concurrency=1, tokens_per_day=30))

    async def body(world: World) -> None:
        order = claim(payer)
        await world.quota.reserve(order)
        successor = owned_by(order, "gateway-2")
        assert (await world.quota.reserve(successor)).taken_over
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (0, 30)
        assert await world.quota.renew("umbrella", [progress(), progress("gateway-2")], 5) == [
            LeaseState.SUPERSEDED,
            LeaseState.RENEWED,
        ]
        assert await world.quota.settle(order, Delivered(10, 0, 3)) is SettleOutcome.SUPERSEDED
        assert await world.quota.settle(successor, Delivered(10, 0, 9)) is SettleOutcome.SETTLED
        assert await world.quota.settle(order, Delivered(10, 0, 3)) is SettleOutcome.SUPERSEDED
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (19, 0)

    in_each_world(body)


def test_what_a_dead_gateway_delivered_is_charged_though_its_successor_cannot_serve(in_each_world: InWorlds) -> None:
    payer = account(Limits(concurrency=1, tokens_per_day=40))

    async def body(world: World) -> None:
        order = claim(payer)
        await world.quota.reserve(order)
        await world.quota.renew("umbrella", [progress()], world.lease_seconds)
        successor = owned_by(order, "gateway-2")
        await world.quota.reserve(successor)
        assert await world.quota.release(successor) is SettleOutcome.SETTLED
        assert await world.quota.release(successor) is SettleOutcome.SETTLED, "told twice, charged once"
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (16, 0)
        third = owned_by(order, "gateway-3")
        await world.quota.reserve(third)
        await world.quota.settle(third, Delivered(10, 0, 20))
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (30, 0)
        assert [(e.reason, e.requests, e.output_tokens) for e in await world.ledger.entries("umbrella")] == [
            (LedgerReason.SETTLED, 1, 6),
            (LedgerReason.SETTLED, 0, 14),
        ]

    in_each_world(body)


def test_a_request_resumed_after_its_lease_pays_only_the_rest(in_each_world: InWorlds) -> None:
    payer = account(Limits(tokens_per_day=30))

    async def body(world: World) -> None:
        order = claim(payer, lease=5)
        await world.quota.reserve(order)
        await world.quota.renew("umbrella", [progress()], world.lease_seconds)
        await world.lapse()
        successor = owned_by(order, "gateway-2")
        await world.quota.reserve(successor)
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (16, 14)
        assert await world.quota.settle(order, Delivered(10, 0, 8)) is SettleOutcome.SUPERSEDED
        await world.quota.settle(successor, Delivered(10, 0, 20))
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (30, 0)
        assert sum(e.requests for e in await world.ledger.entries("umbrella")) == 1

    in_each_world(body)


def test_an_id_in_use_by_a_request_of_another_size_is_refused_by_name(in_each_world: InWorlds) -> None:
    payer = account()

    async def body(world: World) -> None:
        await world.quota.reserve(claim(payer, tokens=(10, 20)))
        with pytest.raises(InvalidRequest, match=r"request_id: 'req-1' is in use"):
            await world.quota.reserve(claim(payer, tokens=(10, 21), owner="gateway-2"))

    in_each_world(body)


def test_what_was_served_without_a_reservation_is_charged_once(in_each_world: InWorlds) -> None:
    payer = account(TOKENS)

    async def body(world: World) -> None:
        order = claim(payer)
        assert await world.quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.SETTLED
        assert await world.quota.settle(order, Delivered(10, 0, 5)) is SettleOutcome.ALREADY
        assert (await standing(world, payer))["tenant/tokens_per_day"] == (15, 0)
        (entry,) = await world.ledger.entries("umbrella")
        assert (entry.reason, entry.requests) == (LedgerReason.UNRESERVED, 1)

    in_each_world(body)


def test_renewing_what_nobody_reserved_says_so(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        assert await world.quota.renew("umbrella", [progress()], 5) == [LeaseState.MISSING]
        assert await world.quota.renew("umbrella", [], 5) == []
        assert await world.quota.release(claim(account())) is SettleOutcome.ALREADY

    in_each_world(body)


def test_a_request_longer_than_every_window_still_counts_as_running(in_timed_worlds: InWorlds) -> None:
    payer = account(key=Limits(requests_per_minute=9, concurrency=1))

    async def body(world: World) -> None:
        await world.quota.reserve(claim(payer))
        for _ in range(60):
            world.pass_time(10)
            assert await world.quota.renew("umbrella", [progress()], 15) == [LeaseState.RENEWED]
        with pytest.raises(QuotaExceeded, match="key 'k1': concurrency: limit 1"):
            await world.quota.reserve(claim(payer, "req-2"))

    in_timed_worlds(body)


def test_how_an_admission_ended_is_remembered_for_as_long_as_it_says() -> None:
    """Whoever settles again later than that, charges again: admission keeps count and does not."""

    async def settled_again_after(seconds: float, quota: QuotaApi, clock: ManualClock) -> SettleOutcome:
        order = claim(account())
        await quota.reserve(order)
        await quota.settle(order, Delivered(10, 0, 5))
        clock.advance(seconds)
        return await quota.settle(order, Delivered(10, 0, 5))

    async def body() -> None:
        for seconds, outcome in ((599.0, SettleOutcome.ALREADY), (601.0, SettleOutcome.SETTLED)):
            async with fake_client() as (client, clock):
                shared = SharedQuota(client, StateConfig(quota_budget_ms=10_000), clock)
                assert await settled_again_after(seconds, shared, clock) is outcome
            clock = ManualClock(NOON)
            assert await settled_again_after(seconds, MemoryQuota(clock), clock) is outcome

    asyncio.run(body())
