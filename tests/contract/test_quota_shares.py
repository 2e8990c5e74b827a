"""While Redis is away each gateway admits its part of what it heard was left, as a reference that adds up says, too."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.clock import ManualClock
from baton.core.errors import QuotaExceeded
from baton.core.tenancy_api import QuotaApi
from baton.core.types import Delivered, Limits, QuotaClaim
from baton.state.config import StateConfig
from baton.state.quota import local_share
from baton.state.quota.local_share import LocalShare
from baton.state.quota.memory import MemoryQuota
from baton.state.quota.shared import SharedQuota
from tests.contract.quota_worlds import account, claim, fake_client

PATIENT = StateConfig(quota_budget_ms=10_000)
REQUESTS, TOKENS, TOKENS_A_DAY = 12, 300, 400
LIMITS = Limits(requests_per_minute=REQUESTS, tokens_per_minute=TOKENS, tokens_per_day=TOKENS_A_DAY)


@dataclass
class Reference:
    """One gateway's. Sums are (requests, tokens of the minute, tokens of the day)."""

    replicas: int
    left: tuple[int, ...] = (REQUESTS, TOKENS, TOKENS_A_DAY)
    since: tuple[int, ...] = (0, 0, 0)
    in_all: tuple[int, ...] = (0, 0, 0)

    def hear(self, left: tuple[int, ...]) -> None:
        self.left, self.since = left, (0, 0, 0)

    def admits(self, cost: tuple[int, ...]) -> bool:
        limits = (REQUESTS, TOKENS, TOKENS_A_DAY)
        since, in_all = plus(self.since, cost), plus(self.in_all, cost)
        if not (fits(since, self._part(self.left)) and fits(in_all, self._part(limits))):
            return False
        self.since, self.in_all = since, in_all
        return True

    def _part(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(value // self.replicas for value in whole)


@dataclass
class Gateway:
    shared: QuotaApi
    local: QuotaApi
    reference: Reference
    alone: list[bool] = field(default_factory=list[bool])
    expected: list[bool] = field(default_factory=list[bool])


def plus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def fits(asked: tuple[int, ...], most: tuple[int, ...]) -> bool:
    return all(x <= y for x, y in zip(asked, most, strict=True))


async def is_admitted(quota: QuotaApi, order: QuotaClaim) -> bool:
    try:
        await quota.reserve(order)
    except QuotaExceeded:
        return False
    return True


def gateway_at(client: object, clock: ManualClock, replicas: int) -> Gateway:
    share = LocalShare(lambda: replicas)
    shared = SharedQuota(client, PATIENT, clock, share.heard)  # type: ignore[arg-type]
    return Gateway(shared, MemoryQuota(clock, terms=share.of), Reference(replicas))


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 10, 25, 60]), st.booleans()), max_size=40)


@settings(max_examples=60, deadline=None)
@given(replicas=st.integers(1, 4), steps=STEPS)
def test_a_gateway_admits_alone_its_part_of_what_was_left_and_no_more_than_its_part_of_the_limit(
    replicas: int, steps: list[tuple[int, int, bool]]
) -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            gateways = [gateway_at(client, clock, replicas) for _ in range(3)]
            left: tuple[int, ...] = (REQUESTS, TOKENS, TOKENS_A_DAY)
            for number, (who, size, is_heard) in enumerate(steps):
                gateway, cost = gateways[who], (1, size, size)
                order = claim(account(LIMITS, key_id=f"k{who}"), f"r{number}", tokens=(size, 0))
                if is_heard:
                    if await is_admitted(gateway.shared, order):
                        left = tuple(x - y for x, y in zip(left, cost, strict=True))
                    gateway.reference.hear(left)
                else:
                    gateway.expected.append(gateway.reference.admits(cost))
                    gateway.alone.append(await is_admitted(gateway.local, order))
            assert [gateway.alone for gateway in gateways] == [gateway.expected for gateway in gateways]

    asyncio.run(body())


def test_what_was_left_counts_for_the_window_that_it_was_left_of() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            gateway, payer = gateway_at(client, clock, 1), account(Limits(requests_per_minute=2))
            for number in range(2):
                assert await is_admitted(gateway.shared, claim(payer, f"r{number}"))
            assert not await is_admitted(gateway.local, claim(payer, "in this minute"))
            clock.advance(60)
            assert await is_admitted(gateway.local, claim(payer, "in the next one"))

    asyncio.run(body())


def test_an_answer_shorter_than_it_might_have_been_makes_room_for_another_one() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            gateway, payer = gateway_at(client, clock, 1), account(Limits(tokens_per_minute=90))
            assert await is_admitted(gateway.shared, claim(payer, "a"))
            first = claim(payer, "b", tokens=(10, 40))
            assert await is_admitted(gateway.local, first)
            assert not await is_admitted(gateway.local, claim(payer, "c"))
            await gateway.local.settle(first, Delivered(10, 0, 0))
            assert await is_admitted(gateway.local, claim(payer, "d"))

    asyncio.run(body())


def test_what_a_refusal_tells_is_heard_as_well() -> None:
    async def body() -> None:
        async with fake_client() as (client, clock):
            other, gateway = gateway_at(client, clock, 1), gateway_at(client, clock, 1)
            payer = account(Limits(requests_per_minute=1))
            assert await is_admitted(other.shared, claim(payer, "a"))
            assert not await is_admitted(gateway.shared, claim(payer, "b"))
            assert not await is_admitted(gateway.local, claim(payer, "c"))

    asyncio.run(body())


def test_scopes_that_were_not_heard_of_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_share, "KNOWN_SCOPES", 3)
    share = LocalShare(lambda: 1)

    async def body() -> None:
        async with fake_client() as (client, clock):
            quota = SharedQuota(client, PATIENT, clock, share.heard)
            limits = Limits(requests_per_minute=9)
            for number, key in enumerate(("k1", "k2", "k3", "k1", "k4")):
                await quota.reserve(claim(account(key=limits, key_id=key), f"r{number}"))

    asyncio.run(body())
    assert {scope for _, scope in share._standings} == {"tenant:acme:", "key:k1:", "key:k4:"}
