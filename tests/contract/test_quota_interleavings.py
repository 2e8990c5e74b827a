"""Any interleaving of reserving, renewing, settling, expiring and crashing keeps counters equal to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest, QuotaExceeded
from baton.core.types import Delivered, LedgerEntry, Limits, Metric, Prices, Progress, QuotaClaim
from tests.contract.quota_model import METRICS, QuotaModel
from tests.contract.quota_worlds import World, account, claim, fake_world, memory_world

ORGANISATION = Limits(tokens_per_day=400, requests_per_minute=9)
TENANT = Limits(requests_per_minute=6, input_tokens_per_minute=90, tokens_per_minute=150, concurrency=4)
KEY = Limits(output_tokens_per_minute=110, concurrency=3)
PRICES = Prices(3, 1, 7, joule=1_500)


@dataclass(frozen=True)
class Step:
    """What happens next. ``seconds`` pass first; the rest is meant as the action needs it."""

    action: str
    seconds: float
    who: int
    request: int
    owner: int
    tokens: tuple[int, int]
    shares: tuple[float, float]  # of the tokens, delivered

    def claim(self) -> QuotaClaim:
        tenant = ("acme", "zeta")[self.who // 2]
        payer = account(TENANT, organisation=ORGANISATION, key=KEY, name=tenant, key_id=f"{tenant}-{self.who}")
        lease = 0.0 if self.action == "reserve and crash" else 15.0
        order = claim(payer, f"req-{self.request}", tokens=self.tokens, owner=f"g{self.owner}", prices=PRICES)
        return replace(order, lease_seconds=lease)

    def delivered(self, order: QuotaClaim) -> Delivered:
        tokens = round(order.input_tokens * self.shares[0]), round(order.output_tokens * self.shares[1])
        return Delivered(tokens[0], tokens[0] // 2, tokens[1], energy_millijoules=3 * tokens[0] + 7 * tokens[1])


ACTIONS = (
    "reserve",
    "reserve",
    "reserve",
    "reserve and crash",
    "settle",
    "settle",
    "renew",
    "recover",
    "release",
    "expire",
    "charge",
)
SIZES = st.sampled_from([(10, 20), (40, 60), (0, 30), (30, 0)])
STEPS = st.builds(
    Step,
    action=st.sampled_from(["reserve", "reserve", "settle", *ACTIONS]),
    seconds=st.sampled_from([0.0, 0.0, 0.0, 1.0, 14.0, 16.0, 61.0]),
    who=st.integers(0, 3),
    request=st.integers(0, 3),
    owner=st.integers(0, 1),
    tokens=SIZES,
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)


class Run:
    """Plays steps in a world and in the model. An owner's name is used once, as every admission has its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = QuotaModel()
        self.claims: list[QuotaClaim] = []
        self.log: list[object] = []
        self.may_exceed = False  # by what is served without asking, or after its lease gave its room to others

    async def play(self, step: Step, number: int) -> None:
        self.world.pass_time(step.seconds)
        order = replace(step.claim(), owner=f"{step.owner}-{number}")
        if step.action.startswith("reserve"):
            await self.reserve(order)
            return
        if step.action == "charge":
            self.may_exceed = True
            delivered = step.delivered(order)
            self.model.charge(order, delivered, self.now)
            self.log.append(await self.world.quota.settle(order, delivered))
            return
        if step.action == "expire":
            self.model.expire(self.now)
            self.log.append(await self.world.quota.expire())
            return
        if not self.claims:
            return
        made = self.claims[step.request * 7 % len(self.claims)]
        delivered = step.delivered(made)
        if step.action == "settle":
            self.may_exceed |= self.model.settle(made, delivered)
            self.log.append(await self.world.quota.settle(made, delivered))
        elif step.action == "release":
            self.model.release(made)
            self.log.append(await self.world.quota.release(made))
            return
        told = Progress(made.request_id, made.account.tenant.name, made.owner, delivered)
        if step.action == "recover":
            found = await self.world.quota.recover("umbrella", [told])
            assert (found == 1) is self.model.recover(made, delivered)
            self.may_exceed = True  # what came late has given its room to others
        elif step.action == "renew":
            self.may_exceed |= self.model.renew(made, delivered, self.now)
            self.log.append(await self.world.quota.renew("umbrella", [told], made.lease_seconds))

    async def reserve(self, order: QuotaClaim) -> None:
        expected = self.model.reserve(order, self.now)
        try:
            grant = await self.world.quota.reserve(order)
            got: object = "taken" if grant.taken_over else "granted"
            self.claims.append(order)
            self.log.append(grant)
        except QuotaExceeded as refusal:
            got = "refused"
            self.log.append(refusal.refusals)
        except InvalidRequest:
            got = "in_use"
        assert got == expected

    async def check(self) -> None:
        """Counters are what the model adds up, and what the ledger says was used."""
        entries = await self.world.ledger.entries("umbrella")
        for who in range(4):
            order = Step("", 0.0, who, 0, 0, (1, 1), (0, 0)).claim()
            for balance in await self.world.quota.balances(order.account, "m"):
                if balance.metric is Metric.CONCURRENCY:
                    assert balance.reserved == self.model.running(order, balance.level)
                elif balance.metric in METRICS:
                    used, reserved = self.model.sums(order, balance.level, balance.metric, self.now)
                    assert (balance.used, balance.reserved) == (used, reserved), balance
                    booked = sum(
                        counted(entry, balance.metric)
                        for entry in entries
                        if entry.debited_at // 10**6 // METRICS[balance.metric] == self.now // METRICS[balance.metric]
                        and balance.subject in {"umbrella", entry.tenant, entry.key_id}
                    )
                    assert booked == balance.used, balance
                    fits = balance.limit is None or balance.used + balance.reserved <= balance.limit
                    assert fits or self.may_exceed

    @property
    def now(self) -> float:
        assert self.world.clock is not None
        return self.world.clock.wall()


def counted(entry: LedgerEntry, metric: Metric) -> int:
    if metric is Metric.REQUESTS_PER_MINUTE:
        return entry.requests
    if metric is Metric.INPUT_TOKENS_PER_MINUTE:
        return entry.input_tokens
    if metric is Metric.OUTPUT_TOKENS_PER_MINUTE:
        return entry.output_tokens
    return entry.input_tokens + entry.output_tokens


async def played(world: World, steps: list[Step]) -> tuple[list[object], list[LedgerEntry]]:
    run = Run(world)
    for number, step in enumerate(steps):
        await run.play(step, number)
        await run.check()
    world.pass_time(16.0)
    run.model.expire(run.now)
    await world.quota.expire()
    await run.check()
    for who in range(4):
        payer = Step("", 0.0, who, 0, 0, (1, 1), (0, 0)).claim().account
        assert {balance.reserved for balance in await world.quota.balances(payer, "m")} == {0}
    return run.log, [replace(entry, id="") for entry in await world.ledger.entries("umbrella")]


def in_world(
    world: Callable[[], AbstractAsyncContextManager[World]], body: Callable[[World], Awaitable[object]]
) -> object:
    async def main() -> object:
        async with world() as built:
            return await body(built)

    return asyncio.run(main())


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_any_interleaving_keeps_counters_equal_to_the_ledger(steps: list[Step]) -> None:
    in_world(memory_world, lambda world: played(world, steps))


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_the_scripts_and_their_twin_answer_and_book_the_same(steps: list[Step]) -> None:
    scripts = in_world(fake_world, lambda world: played(world, steps))
    twin = in_world(memory_world, lambda world: played(world, steps))
    assert scripts == twin
