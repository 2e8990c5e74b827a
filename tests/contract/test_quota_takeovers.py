"""Requests that others take over: whatever any of their owners delivered is charged, once, in whatever order."""

from __future__ import annotations

from itertools import permutations

import pytest

from baton.core.types import Delivered, LeaseState, LedgerReason, Limits, Prices, Progress, QuotaClaim, SettleOutcome
from tests.contract.quota_worlds import InWorlds, World, account, claim, standing

PAYER = account(Limits(tokens_per_day=1_000, concurrency=1))
PRICES = Prices(1, 2, 3, joule=1_000)
MOST = Delivered(10, 2, 200, energy_millijoules=90)
SOME = Delivered(10, 2, 40, energy_millijoules=30)


def order(owner: str = "gateway-1", **more: float) -> QuotaClaim:
    return claim(PAYER, tokens=(10, 200), owner=owner, prices=PRICES, **more)  # pyright: ignore[reportArgumentType]


def told(owner: str, delivered: Delivered) -> list[Progress]:
    return [Progress("req-1", "acme", owner, delivered)]


async def charges(world: World) -> list[tuple[LedgerReason, int, int, int]]:
    """Reason, requests, input and output tokens of each entry."""
    entries = await world.ledger.entries("umbrella")
    return [(e.reason, e.requests, e.input_tokens, e.output_tokens) for e in entries]


async def assert_charged(world: World, total: Delivered, *, requests: int = 1) -> None:
    """In the ledger and in the counters, in which nothing is left."""
    entries = await world.ledger.entries("umbrella")
    assert sum(e.requests for e in entries) == requests
    assert sum(e.input_tokens for e in entries) == total.input_tokens
    assert sum(e.output_tokens for e in entries) == total.output_tokens
    assert sum(e.energy_millijoules for e in entries) == total.energy_millijoules
    assert sum(e.cost for e in entries) == total.cost(PRICES)
    now = await standing(world, PAYER)
    assert now["tenant/tokens_per_day"] == (total.input_tokens + total.output_tokens, 0)
    assert now["tenant/concurrency"] == (0, 0)


def test_who_asks_again_elsewhere_and_hangs_up_there_pays_for_what_the_first_gateway_delivers(
    in_each_world: InWorlds,
) -> None:
    async def body(world: World) -> None:
        first, second = order(), order("gateway-2")
        await world.quota.reserve(first)
        await world.quota.reserve(second)
        assert await world.quota.settle(second, Delivered()) is SettleOutcome.SETTLED
        assert await world.quota.renew("umbrella", told("gateway-1", SOME), 5) == [LeaseState.SUPERSEDED]
        for _ in range(2):
            assert await world.quota.settle(first, MOST) is SettleOutcome.SUPERSEDED
        assert await charges(world) == [
            (LedgerReason.SETTLED, 1, 0, 0),
            (LedgerReason.LATE, 0, 10, 40),
            (LedgerReason.LATE, 0, 0, 160),
        ]
        await assert_charged(world, MOST)

    in_each_world(body)


def test_whoever_does_so_again_and_again_pays_for_the_most_that_one_gateway_delivered(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        claims = [order(f"gateway-{number}") for number in range(5)]
        for each in claims:
            await world.quota.reserve(each)
        for each in reversed(claims):
            await world.quota.settle(each, Delivered() if each is claims[-1] else SOME)
        await world.quota.settle(claims[2], MOST)
        await assert_charged(world, MOST)

    in_each_world(body)


@pytest.mark.parametrize("is_recovered_first", [False, True])
def test_what_came_after_a_dead_gateways_last_renewal_is_charged_though_its_successor_delivers_nothing(
    in_each_world: InWorlds, is_recovered_first: bool
) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(order())
        await world.quota.renew("umbrella", told("gateway-1", SOME), 5)
        await world.quota.reserve(order("gateway-2"))
        if is_recovered_first:
            await world.quota.recover("umbrella", told("gateway-1", MOST))
        await world.quota.settle(order("gateway-2"), Delivered())
        for _ in range(2):
            await world.quota.recover("umbrella", told("gateway-1", MOST))
        await assert_charged(world, MOST)

    in_each_world(body)


@pytest.mark.parametrize("ends", list(permutations(("settle 0", "settle 1", "settle 2", "recover 1"))), ids=" ".join)
def test_owners_that_end_in_any_order_are_charged_the_most_of_them_once(
    in_timed_worlds: InWorlds, ends: tuple[str, ...]
) -> None:
    delivered = (SOME, MOST, Delivered(10, 2, 7))

    async def body(world: World) -> None:
        claims = [order(f"gateway-{number}") for number in range(3)]
        for each in claims:
            await world.quota.reserve(each)
        for end in ends:
            kind, number = end.split()
            if kind == "settle":
                await world.quota.settle(claims[int(number)], delivered[int(number)])
            else:
                await world.quota.recover("umbrella", told(f"gateway-{number}", delivered[int(number)]))
        await assert_charged(world, MOST)

    in_timed_worlds(body)


@pytest.mark.parametrize("is_taken_after_its_lease", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_lease_that_ends_between_changes_nothing_of_that(
    in_each_world: InWorlds, is_taken_after_its_lease: bool, is_late: bool
) -> None:
    async def body(world: World) -> None:
        first = order(lease=world.lease_seconds)
        await world.quota.reserve(first)
        if is_taken_after_its_lease:
            await world.lapse()
        await world.quota.reserve(order("gateway-2", lease=world.lease_seconds))
        if not is_late:
            await world.quota.settle(first, MOST)
        await world.lapse()
        if is_late:
            await world.quota.settle(first, MOST)
        await assert_charged(world, MOST)

    in_each_world(body)


def test_who_resumed_after_a_lease_and_has_ended_is_charged_what_the_former_owner_tells_late(
    in_each_world: InWorlds,
) -> None:
    async def body(world: World) -> None:
        first = order(lease=world.lease_seconds)
        await world.quota.reserve(first)
        await world.lapse()
        await world.quota.reserve(order("gateway-2"))
        await world.quota.settle(order("gateway-2"), SOME)
        await world.quota.settle(first, MOST)
        await assert_charged(world, MOST)

    in_each_world(body)


@pytest.mark.parametrize("is_told_late", [False, True])
def test_a_client_that_was_refused_at_one_gateway_and_goes_on_at_the_next_is_charged_once(
    in_each_world: InWorlds, is_told_late: bool
) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(order())
        await world.quota.reserve(order("gateway-2"))
        for _ in range(2):
            assert await world.quota.release(order("gateway-2")) is SettleOutcome.SETTLED
        assert await charges(world) == []
        if not is_told_late:
            await world.quota.recover("umbrella", told("gateway-1", SOME))
        await world.quota.reserve(order("gateway-3"))
        await world.quota.settle(order("gateway-3"), MOST)
        await world.quota.recover("umbrella", told("gateway-1", SOME))
        await assert_charged(world, MOST)

    in_each_world(body)


def test_a_request_taken_over_and_served_by_nobody_costs_nothing_until_somebody_tells_otherwise(
    in_each_world: InWorlds,
) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(order())
        await world.quota.reserve(order("gateway-2"))
        await world.quota.release(order())
        await world.quota.release(order("gateway-2"))
        await world.quota.recover("umbrella", told("gateway-1", Delivered()))
        await assert_charged(world, Delivered(), requests=0)
        await world.quota.settle(order(), MOST)
        await assert_charged(world, MOST)

    in_each_world(body)


@pytest.mark.parametrize("tokens", [(10, 200), (10, 30)])
def test_a_new_request_of_the_same_id_pays_its_own_and_nothing_of_what_is_told_late_of_the_former(
    in_each_world: InWorlds, tokens: tuple[int, int]
) -> None:
    async def body(world: World) -> None:
        first, second = order(), order("gateway-2")
        await world.quota.reserve(first)
        await world.quota.reserve(second)
        await world.quota.settle(second, Delivered())
        new = claim(PAYER, tokens=tokens, owner="new", prices=PRICES)
        assert not (await world.quota.reserve(new)).taken_over
        assert (await standing(world, PAYER))["tenant/tokens_per_day"] == (0, sum(tokens))
        await world.quota.settle(first, MOST)
        await world.quota.settle(new, Delivered(10, 0, 30))
        await world.quota.settle(first, MOST)
        assert await charges(world) == [
            (LedgerReason.SETTLED, 1, 0, 0),
            (LedgerReason.LATE, 0, 10, 200),
            (LedgerReason.SETTLED, 1, 10, 30),
        ]

    in_each_world(body)


def test_a_late_settlement_is_charged_though_a_request_of_another_size_has_the_id_by_then(
    in_each_world: InWorlds,
) -> None:
    async def body(world: World) -> None:
        first = order(lease=world.lease_seconds)
        await world.quota.reserve(first)
        await world.quota.renew("umbrella", told("gateway-1", SOME), world.lease_seconds)
        await world.lapse()
        new = claim(PAYER, tokens=(10, 30), owner="new", prices=PRICES)
        await world.quota.reserve(new)
        for _ in range(2):
            assert await world.quota.settle(first, MOST) is SettleOutcome.SUPERSEDED
        await world.quota.release(new)
        await assert_charged(world, MOST)

    in_each_world(body)


def test_who_never_had_the_reservation_tells_nothing_of_it(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(order())
        for _ in range(2):
            assert await world.quota.settle(order("stranger"), MOST) is SettleOutcome.SUPERSEDED
        await world.quota.settle(order(), SOME)
        await world.quota.recover("umbrella", told("stranger", MOST))
        await assert_charged(world, SOME)

    in_each_world(body)
