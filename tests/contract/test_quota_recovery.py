"""What gateways that died had delivered, told by others: charged once, where it is still due, nobody disturbed."""

from __future__ import annotations

from baton.core.types import Delivered, LedgerEntry, LedgerReason, Limits, Prices, Progress
from tests.contract.quota_worlds import InWorlds, World, account, claim, owned_by, standing

PAYER = account(Limits(tokens_per_day=100, concurrency=1))
PRICES = Prices(1, 2, 3)
LAST = Delivered(10, 2, 9, energy_millijoules=70)
RENEWED = Delivered(10, 2, 6, energy_millijoules=50)


def told(delivered: Delivered, owner: str = "gateway-1") -> list[Progress]:
    return [Progress("req-1", "acme", owner, delivered)]


async def charges(world: World) -> list[tuple[LedgerReason, int, int]]:
    """Reason, requests and output tokens of each entry."""
    entries: list[LedgerEntry] = [*await world.ledger.entries("umbrella")]
    return [(entry.reason, entry.requests, entry.output_tokens) for entry in entries]


def test_a_dead_gateways_reservation_expires_charged_for_what_was_recovered(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(claim(PAYER, lease=60, prices=PRICES))
        for _ in range(2):
            assert await world.quota.recover("umbrella", told(LAST)) == 1
        assert (await standing(world, PAYER))["tenant/tokens_per_day"] == (0, 30)
        await world.quota.renew("umbrella", told(RENEWED), world.lease_seconds)
        await world.lapse()
        assert await charges(world) == [(LedgerReason.EXPIRED, 1, 9)]
        (entry,) = await world.ledger.entries("umbrella")
        assert (entry.cost, entry.energy_millijoules) == (LAST.cost(PRICES), 70)

    in_each_world(body)


def test_no_lease_grows_longer_by_what_is_recovered(in_timed_worlds: InWorlds) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(claim(PAYER, lease=15))
        world.pass_time(14)
        await world.quota.recover("umbrella", told(LAST))
        world.pass_time(1.001)
        assert await world.quota.expire() == 1
        assert await charges(world) == [(LedgerReason.EXPIRED, 1, 9)]

    in_timed_worlds(body)


def test_what_is_recovered_after_the_lease_is_charged_once_and_late(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        await world.quota.reserve(claim(PAYER, lease=world.lease_seconds, prices=PRICES))
        await world.lapse()
        for _ in range(2):
            assert await world.quota.recover("umbrella", told(LAST)) == 1
        await world.quota.recover("umbrella", told(RENEWED))
        assert await charges(world) == [(LedgerReason.EXPIRED, 1, 0), (LedgerReason.LATE, 0, 9)]
        assert sum(entry.cost for entry in await world.ledger.entries("umbrella")) == LAST.cost(PRICES)
        now = await standing(world, PAYER)
        assert (now["tenant/tokens_per_day"], now["tenant/concurrency"]) == ((19, 0), (0, 0))

    in_each_world(body)


def test_a_client_that_resumes_after_a_late_recovery_pays_only_the_rest(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        order = claim(PAYER, lease=world.lease_seconds)
        await world.quota.reserve(order)
        await world.lapse()
        await world.quota.recover("umbrella", told(LAST))
        successor = owned_by(order, "gateway-2")
        await world.quota.reserve(successor)
        await world.quota.settle(successor, Delivered(10, 2, 20))
        assert (await standing(world, PAYER))["tenant/tokens_per_day"] == (30, 0)

    in_each_world(body)


def test_what_is_told_of_a_reservation_that_was_taken_over_is_charged_with_the_rest_of_it(
    in_each_world: InWorlds,
) -> None:
    async def body(world: World) -> None:
        order = claim(PAYER)
        await world.quota.reserve(order)
        successor = owned_by(order, "gateway-2")
        await world.quota.reserve(successor)
        assert await world.quota.recover("umbrella", told(Delivered(10, 2, 12, energy_millijoules=80))) == 0
        await world.quota.settle(successor, LAST)
        assert await world.quota.recover("umbrella", told(Delivered(10, 0, 20), "gateway-2")) == 0, "it has settled"
        assert await charges(world) == [(LedgerReason.SETTLED, 1, 12)]

    in_each_world(body)


def test_a_count_is_never_lowered(in_each_world: InWorlds) -> None:
    """Neither by what comes late, nor by a gateway that took over and has delivered nothing of its own yet."""

    async def body(world: World) -> None:
        order = claim(PAYER, lease=60)
        await world.quota.reserve(order)
        await world.quota.recover("umbrella", told(LAST))
        await world.quota.recover("umbrella", told(RENEWED))
        await world.quota.reserve(owned_by(order, "gateway-2"))
        await world.quota.renew("umbrella", told(Delivered(0, 0, 0), "gateway-2"), world.lease_seconds)
        await world.lapse()
        assert await charges(world) == [(LedgerReason.EXPIRED, 1, 9)]

    in_each_world(body)


def test_what_nobody_reserved_is_charged_to_nobody(in_each_world: InWorlds) -> None:
    async def body(world: World) -> None:
        assert await world.quota.recover("umbrella", told(LAST)) == 0
        assert await world.quota.recover("umbrella", []) == 0
        assert await charges(world) == []

    in_each_world(body)
