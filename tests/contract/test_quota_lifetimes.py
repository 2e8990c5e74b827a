"""How long counters live in Redis: to the end of their last window, and a day after any claim, whatever its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import fakeredis
import pytest

from baton.core.clock import ManualClock
from baton.core.types import Account, Delivered, Limits, ModelLimits
from baton.state.config import StateConfig
from baton.state.quota.shared import SharedQuota
from tests.contract.quota_worlds import account, claim, fake_client

HOUR, DAY = 3600.0, 86400.0
REST_OF_NOVEMBER = 1.5 * DAY  # after noon of the 29th
PATIENT = StateConfig(quota_budget_ms=10_000, timeout_ms=10_000)
PREFIX = "baton:{umbrella}:quota:"


class Keys:
    """Of one server, and a gateway that claims there."""

    def __init__(self, client: fakeredis.FakeAsyncRedis, clock: ManualClock) -> None:
        self.clock = clock
        self._client = client
        self._quota = SharedQuota(client, PATIENT, clock)
        self._claims = 0

    async def claim(self, payer: Account, *, settled: bool = False) -> None:
        self._claims += 1
        order = claim(payer, f"req-{self._claims}")
        await self._quota.reserve(order)
        if settled:
            await self._quota.settle(order, Delivered(10, 0, 5))

    async def seconds_left(self, scope: str) -> float:
        return await self._client.pttl(PREFIX + scope) / 1000  # pyright: ignore


def run(body: Callable[[Keys], Awaitable[None]]) -> None:
    async def main() -> None:
        async with fake_client() as (client, clock):
            await body(Keys(client, clock))

    asyncio.run(main())


def test_counters_outlive_their_month() -> None:
    async def body(keys: Keys) -> None:
        for settled in (False, True, False):
            await keys.claim(account(Limits(tokens_per_minute=1000)), settled=settled)
            assert await keys.seconds_left("tenant:acme:") >= REST_OF_NOVEMBER

    run(body)


def test_a_claim_that_counts_no_month_leaves_a_month_that_others_count_alive() -> None:
    async def body(keys: Keys) -> None:
        await keys.claim(account(organisation=Limits(requests_per_minute=9, tokens_per_month=1000)))
        for _ in range(2):  # the first of a minute writes anew, the second does not
            keys.clock.advance(60)
            for _ in range(2):
                await keys.claim(account(organisation=Limits(requests_per_minute=9)))
                assert await keys.seconds_left("organization:umbrella:") >= REST_OF_NOVEMBER - 120

    run(body)


@pytest.mark.parametrize("meanwhile", [Limits(concurrency=9), Limits(tokens_per_day=1000)], ids=["flow", "day"])
def test_a_limit_of_a_month_that_is_lifted_and_set_again_finds_what_was_used_before(meanwhile: Limits) -> None:
    month = replace(meanwhile, tokens_per_month=1000)

    async def body(keys: Keys) -> None:
        for limits in (month, meanwhile, month):
            for _ in range(2):
                keys.clock.advance(60)
                await keys.claim(account(organisation=limits))
                assert await keys.seconds_left("organization:umbrella:") >= REST_OF_NOVEMBER - 6 * 60

    run(body)


def test_what_counts_requests_in_progress_lives_for_a_day_after_each_claim() -> None:
    async def body(keys: Keys) -> None:
        payer = account(models=(ModelLimits("m", Limits(concurrency=9)),))
        for _ in range(3):
            keys.clock.advance(10 * HOUR)
            await keys.claim(payer)
            assert await keys.seconds_left("tenant:acme:m") >= DAY

    run(body)


def test_at_the_end_of_a_month_counters_live_for_a_day_after_each_claim() -> None:
    async def body(keys: Keys) -> None:
        keys.clock.advance(REST_OF_NOVEMBER - 3 * HOUR)
        for _ in range(5):
            await keys.claim(account(), settled=True)
            assert await keys.seconds_left("tenant:acme:") >= DAY
            keys.clock.advance(HOUR)

    run(body)


def test_counters_of_a_minute_live_for_a_day_after_each_claim_in_it() -> None:
    async def body(keys: Keys) -> None:
        for _ in range(5):
            await keys.claim(account(key=Limits(requests_per_minute=9)))
            assert await keys.seconds_left("key:k1:") >= DAY
            keys.clock.advance(25)

    run(body)
