"""The counters in memory answer whatever they are told as those in Redis do, in the order of any network."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest, QuotaExceeded
from baton.core.types import Delivered, Limits, Metric, ModelLimits, Prices, Progress, QuotaClaim
from tests.contract.quota_worlds import World, account, claim, fake_world, memory_world

PRICES = Prices(3, 1, 7, joule=1_500)
TENANT = Limits(requests_per_minute=6, tokens_per_minute=150, concurrency=3, burst=4)
MODEL = Limits(output_tokens_per_minute=110, tokens_per_day=300, shadow=frozenset({Metric.OUTPUT_TOKENS_PER_MINUTE}))
PAYERS = (
    account(TENANT, organisation=Limits(tokens_per_month=700), models=(ModelLimits("m", MODEL),)),
    account(
        Limits(tokens_per_day=200), key=Limits(concurrency=1, tokens_per_day=0), key_id="k2", time_zone="Asia/Tokyo"
    ),
)
SIZES = ((10, 20), (10, 20), (0, 0), (40, 30))


@dataclass(frozen=True)
class Step:
    """``admission``: which of those that there are, or with a number beyond them one more, told of or not."""

    action: str
    seconds: float
    admission: int
    payer: int
    request: int
    size: int
    delivered: tuple[int, int]


STEPS = st.builds(
    Step,
    action=st.sampled_from(["reserve"] * 3 + ["settle"] * 2 + ["release", "renew", "recover", "expire"]),
    seconds=st.sampled_from([0.0, 0.0, 0.0, 1.0, 7.0, 16.0, 61.0, 7200.0]),
    admission=st.integers(0, 12),
    payer=st.integers(0, len(PAYERS) - 1),
    request=st.integers(1, 2),
    size=st.integers(0, len(SIZES) - 1),
    delivered=st.tuples(st.integers(0, 10), st.integers(0, 40)),
)


def chosen(step: Step, claims: list[QuotaClaim]) -> QuotaClaim:
    """An admission's owner is its own."""
    if step.admission >= len(claims):
        owner = f"gateway-{len(claims)}"
        payer, tokens = PAYERS[step.payer], SIZES[step.size]
        claims.append(claim(payer, f"req-{step.request}", tokens=tokens, owner=owner, prices=PRICES))
    return claims[min(step.admission, len(claims) - 1)]


async def answer(world: World, step: Step, order: QuotaClaim) -> object:
    quota, delivered = world.quota, Delivered(step.delivered[0], 0, step.delivered[1], energy_millijoules=900)
    progress = Progress(order.request_id, order.account.tenant.name, order.owner, delivered)
    world.pass_time(step.seconds)
    try:
        match step.action:
            case "reserve":
                return await quota.reserve(order)
            case "settle":
                return await quota.settle(order, delivered)
            case "release":
                return await quota.release(order)
            case "renew":
                return await quota.renew("umbrella", [progress], 15.0)
            case "recover":
                return await quota.recover("umbrella", [progress])
            case _:
                return await quota.expire()
    except QuotaExceeded as error:
        return error.refusals
    except InvalidRequest as error:
        return error.message


async def told(world: World) -> list[object]:
    """All that can be read: the balances, the ledger, the alerts."""
    balances = [await world.quota.balances(payer, "m") for payer in PAYERS]
    entries = [replace(entry, id="") for entry in await world.ledger.entries("umbrella")]
    return [balances, entries, [replace(alert, id="") for alert in await world.ledger.alerts("umbrella")]]


@settings(max_examples=80, deadline=None)
@given(steps=st.lists(STEPS, max_size=40))
def test_both_kinds_of_counters_give_the_same_answers(steps: list[Step]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            worlds = [await stack.enter_async_context(made()) for made in (memory_world, fake_world)]
            claims: list[QuotaClaim] = []
            for step in steps:
                order = chosen(step, claims)
                here, there = [await answer(world, step, order) for world in worlds]
                assert here == there
            first, second = [await told(world) for world in worlds]
            assert first == second

    asyncio.run(main())
