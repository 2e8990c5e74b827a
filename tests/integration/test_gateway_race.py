"""Four gateway processes race for one tenant's limits: not one request or token too many, and refusals cost nothing.

On few cores Redis may get no processor for longer than it may be silent, by the settings as they are: seldom, since it
goes before its clients where that is permitted, but what else runs on a machine is in nobody's hands. Then a gateway
decides by itself, and counts that: what is too much is no more. With ``PATIENCE`` none does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.client import Client, ResumePolicy
from baton.core.errors import QuotaExceeded
from baton.core.types import GenerateRequest, LedgerEntry, Level, Limits, Metric, QuotaBalance, Sampling, StopRules
from tests.gateways import GatewayProcess, eventually, first_gateway, further_gateways
from tests.launched import prompt_request, running_stack
from tests.tenants import Tenants, delivered, tenants_at

GATEWAYS, REQUESTS = 4, 2_000
LIMITS = Limits(requests_per_minute=100, tokens_per_minute=10_000)
MINUTE = 60 * 10**6
PATIENCE = ("state.quota_budget_ms=2000", "state.quota_slow_ms=20000")
UNASSISTED = ResumePolicy(attempts=0, attempts_unanswered=0)
SMALL = prompt_request(range(10, 14), 4)  # a hundred of them are far from the limit of tokens
LARGE = prompt_request(range(10, 110), 150)  # forty of them are all the tokens of a minute


@dataclass
class Outcome:
    """``admitted``: the tokens that the client of each request was delivered, its prompt left out; ``alone``: how many
    of them a gateway admitted without Redis."""

    alone: int = 0
    admitted: dict[str, int] = field(default_factory=dict)
    refused_by: Counter[Metric] = field(default_factory=Counter)
    refused: int = 0

    async def ask(self, client: Client, request: GenerateRequest) -> None:
        try:
            answer = await client.ask(request)
        except QuotaExceeded as error:
            self.refused += 1
            self.refused_by.update(metric for metric in Metric if f": {metric}: limit" in error.message)
        else:
            self.admitted[request.request_id] = len(answer.choices[0].token_ids)


@dataclass
class Race:
    tenants: Tenants
    gateways: list[GatewayProcess]

    async def run(self, tenant: str, ask: GenerateRequest) -> Outcome:
        """``REQUESTS`` of a new tenant at once, as many at each gateway."""
        key, outcome, before = await self.tenants.made(tenant, LIMITS), Outcome(), await self.alone()
        async with AsyncExitStack() as stack:
            opened = [Client(gateway.address, key, resume=UNASSISTED) for gateway in self.gateways]
            clients = [await stack.enter_async_context(client) for client in opened]
            async with asyncio.TaskGroup() as group:
                for number in range(REQUESTS):
                    request = replace(ask, request_id=f"{tenant}-{number}")
                    group.create_task(outcome.ask(clients[number % GATEWAYS], request))
        assert len(outcome.admitted) + outcome.refused == REQUESTS
        await eventually(self._all_is_told, "Redis knows of all that was delivered")
        outcome.alone = await self.alone() - before
        return outcome

    async def _all_is_told(self) -> bool:
        return not any([await each.metric("baton_quota_settlements_waiting") for each in self.gateways])

    async def alone(self) -> int:
        return round(sum([await each.metric("baton_quota_degraded_admissions_total") for each in self.gateways]))


@asynccontextmanager
async def four_gateways(*settings: str) -> AsyncIterator[Race]:
    names = [f"gateway-{number}" for number in range(1, GATEWAYS)]
    async with (
        running_stack("fake", *settings, "engine.max_waiting=1000", prefill=0) as running,
        further_gateways(running, *names) as others,
        tenants_at(running) as tenants,
    ):
        yield Race(tenants, [await first_gateway(running), *others])
        await running.assert_idle()


def by_minute(entries: list[LedgerEntry]) -> dict[int, list[LedgerEntry]]:
    minutes = sorted({entry.debited_at // MINUTE for entry in entries})
    return {minute: [entry for entry in entries if entry.debited_at // MINUTE == minute] for minute in minutes}


def tokens(entries: list[LedgerEntry]) -> int:
    return sum(entry.input_tokens + entry.output_tokens for entry in entries)


def used(balances: list[QuotaBalance], metric: Metric) -> int:
    [found] = [b.used for b in balances if b.level is Level.TENANT and b.metric is metric and not b.model]
    return found


async def check_books(race: Race, tenant: str, outcome: Outcome, ask: GenerateRequest) -> list[LedgerEntry]:
    """The ledger has what clients were delivered and nothing of refusals; no minute has more than its limits, but for
    what gateways admitted without Redis."""
    prompt = len(ask.prompt_token_ids or ())
    balances, entries = list(await race.tenants.settled(tenant)), await race.tenants.charged(tenant)
    assert delivered(entries) == outcome.admitted
    assert len(entries) == sum(entry.requests for entry in entries) == len(outcome.admitted)
    assert {entry.input_tokens for entry in entries} == {prompt}
    for within in by_minute(entries).values():
        assert len(within) <= 100 + outcome.alone
        assert tokens(within) <= 10_000 + outcome.alone * (prompt + (ask.max_tokens or 0))
    assert used(balances, Metric.TOKENS_PER_MONTH) == tokens(entries)
    return entries


WHOLE = StopRules(ignore_eos=True)
MANY, LONG = replace(SMALL, stop=WHOLE), replace(LARGE, stop=WHOLE)
MIXED = replace(LARGE, sampling=Sampling(temperature=1.0))  # answers that end early give back what they reserved


def test_four_gateways_admit_together_a_hundred_requests_a_minute_and_ten_thousand_tokens() -> None:
    async def main() -> None:
        async with four_gateways(*PATIENCE) as race:
            outcome = await race.run("many", MANY)
            entries = await check_books(race, "many", outcome, MANY)
            assert set(outcome.refused_by) == {Metric.REQUESTS_PER_MINUTE}
            assert max(map(len, by_minute(entries).values())) == 100, "all that the limit allows"

            outcome = await race.run("long", LONG)
            entries = await check_books(race, "long", outcome, LONG)
            assert set(outcome.refused_by) == {Metric.TOKENS_PER_MINUTE}
            assert max(map(tokens, by_minute(entries).values())) == 10_000, "all that the limit allows"

            outcome = await race.run("mixed", MIXED)
            await check_books(race, "mixed", outcome, MIXED)
            assert min(outcome.admitted.values()) < 150, "some ended early"
            assert Metric.TOKENS_PER_MINUTE in outcome.refused_by
            assert await race.alone() == 0

    asyncio.run(main())


def test_by_the_settings_as_they_are_no_more_is_admitted_than_that_and_what_gateways_admit_without_redis() -> None:
    async def main() -> None:
        async with four_gateways() as race:
            for tenant, ask in (("many", MANY), ("long", LONG), ("mixed", MIXED)):
                outcome = await race.run(tenant, ask)
                await check_books(race, tenant, outcome, ask)
                assert outcome.refused and outcome.admitted

    asyncio.run(main())
