"""Four gateway processes race for one tenant's limits: not one request or token too many, and refusals cost nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.client import Client, ResumePolicy
from baton.core.errors import QuotaExceeded
from baton.core.types import GenerateRequest, LedgerEntry, Level, Limits, Metric, QuotaBalance, Sampling, StopRules
from tests.gateways import further_gateways
from tests.launched import prompt_request, running_stack
from tests.tenants import Tenants, delivered, tenants_at

GATEWAYS, REQUESTS = 4, 2_000
LIMITS = Limits(requests_per_minute=100, tokens_per_minute=10_000)
MINUTE = 60 * 10**6
PATIENCE = ("state.quota_budget_ms=20000", "gateway.planner_budget_ms=20000")  # a crowd of processes on few cores
UNASSISTED = ResumePolicy(attempts=0, attempts_unanswered=0)
SMALL = prompt_request(range(10, 14), 4)  # a hundred of them are far from the limit of tokens
LARGE = prompt_request(range(10, 110), 150)  # forty of them are all the tokens of a minute


@dataclass
class Outcome:
    """``admitted``: the tokens that the client of each request was delivered, its prompt left out."""

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
    addresses: list[str]

    async def run(self, tenant: str, ask: GenerateRequest) -> Outcome:
        """``REQUESTS`` of a new tenant at once, as many at each gateway."""
        key, outcome = await self.tenants.made(tenant, LIMITS), Outcome()
        async with AsyncExitStack() as stack:
            opened = [Client(address, key, resume=UNASSISTED) for address in self.addresses]
            clients = [await stack.enter_async_context(client) for client in opened]
            async with asyncio.TaskGroup() as group:
                for number in range(REQUESTS):
                    request = replace(ask, request_id=f"{tenant}-{number}")
                    group.create_task(outcome.ask(clients[number % GATEWAYS], request))
        assert len(outcome.admitted) + outcome.refused == REQUESTS
        return outcome


@asynccontextmanager
async def four_gateways() -> AsyncIterator[Race]:
    names = [f"gateway-{number}" for number in range(1, GATEWAYS)]
    async with (
        running_stack("fake", *PATIENCE, "engine.max_waiting=1000", prefill=0) as running,
        further_gateways(running, *names) as others,
        tenants_at(running) as tenants,
    ):
        yield Race(tenants, [running.stack.record.gateway, *(other.address for other in others)])
        await running.assert_idle()


def by_minute(entries: list[LedgerEntry]) -> dict[int, list[LedgerEntry]]:
    minutes = sorted({entry.debited_at // MINUTE for entry in entries})
    return {minute: [entry for entry in entries if entry.debited_at // MINUTE == minute] for minute in minutes}


def tokens(entries: list[LedgerEntry]) -> int:
    return sum(entry.input_tokens + entry.output_tokens for entry in entries)


def used(balances: list[QuotaBalance], metric: Metric) -> int:
    [found] = [b.used for b in balances if b.level is Level.TENANT and b.metric is metric and not b.model]
    return found


async def check_books(race: Race, tenant: str, outcome: Outcome, prompt: int) -> list[LedgerEntry]:
    """The ledger has what clients were delivered and nothing of refusals; no minute has more than its limits."""
    balances, entries = list(await race.tenants.settled(tenant)), await race.tenants.charged(tenant)
    assert delivered(entries) == outcome.admitted
    assert len(entries) == sum(entry.requests for entry in entries) == len(outcome.admitted)
    assert {entry.input_tokens for entry in entries} == {prompt}
    for within in by_minute(entries).values():
        assert len(within) <= 100 and tokens(within) <= 10_000
    assert used(balances, Metric.TOKENS_PER_MONTH) == tokens(entries)
    return entries


def test_four_gateways_admit_together_a_hundred_requests_a_minute_and_ten_thousand_tokens() -> None:
    async def main() -> None:
        async with four_gateways() as race:
            whole = replace(SMALL, stop=StopRules(ignore_eos=True))
            outcome = await race.run("many", whole)
            entries = await check_books(race, "many", outcome, prompt=4)
            assert set(outcome.refused_by) == {Metric.REQUESTS_PER_MINUTE}
            assert max(map(len, by_minute(entries).values())) == 100, "all that the limit allows"

            outcome = await race.run("long", replace(LARGE, stop=StopRules(ignore_eos=True)))
            entries = await check_books(race, "long", outcome, prompt=100)
            assert set(outcome.refused_by) == {Metric.TOKENS_PER_MINUTE}
            assert max(map(tokens, by_minute(entries).values())) == 10_000, "all that the limit allows"

            outcome = await race.run(
                "mixed", replace(LARGE, sampling=Sampling(temperature=1.0))
            )  # answers that end early give back what they reserved
            entries = await check_books(race, "mixed", outcome, prompt=100)
            assert min(outcome.admitted.values()) < 150, "some ended early"
            assert Metric.TOKENS_PER_MINUTE in outcome.refused_by

    asyncio.run(main())
