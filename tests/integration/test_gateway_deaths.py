"""Gateways killed in the middle of their streams: what was delivered is charged, and nothing stays reserved.

Without delivery logs, so that renewals alone tell what was; with them, see ``test_delivery_logs.py``.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.client import Client, ResumePolicy
from baton.core.errors import PeerUnavailable
from baton.core.types import GenerateRequest, LedgerReason, Level, Limits, Metric, StopRules
from tests.gateways import GatewayProcess, eventually, first_gateway, further_gateways
from tests.launched import RunningStack, prompt_request, running_stack
from tests.tenants import Tenants, delivered, tenants_at

STREAMS = 6  # of each kind at each gateway
LENGTH = 400
ASK = replace(prompt_request(range(10, 26), LENGTH), stop=StopRules(ignore_eos=True))
LEASE = ("gateway.quota_lease_seconds=1.5", "gateway.quota_renew_seconds=0.1", "engine.max_waiting=1000")
UNLOGGED = "gateway.delivery_log_directory="
PATIENCE = ("state.quota_budget_ms=20000", "gateway.planner_budget_ms=20000")
PERSISTENT = ResumePolicy(attempts=50, attempts_unanswered=50, first_pause=0.05, longest_pause=0.2)
UNASSISTED = ResumePolicy(attempts=0, attempts_unanswered=0)
LIMITS = Limits(requests_per_minute=10**6, tokens_per_day=10**9, concurrency=10**4)


@dataclass
class Streams:
    """``seen``: output tokens that the client of each request has, so far."""

    seen: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    async def follow(self, client: Client, request: GenerateRequest) -> None:
        self.seen[request.request_id] = 0
        try:
            async with aclosing(client.stream(request)) as chunks:
                async for chunk in chunks:
                    self.seen[request.request_id] += len(chunk.token_ids)
        except PeerUnavailable as error:
            self.lost[request.request_id] = error.message

    async def have_begun(self) -> bool:
        return bool(self.seen) and all(self.seen.values())


@dataclass
class Gateways:
    running: RunningStack
    tenants: Tenants
    all: list[GatewayProcess]

    async def told(self, gateway: GatewayProcess, streams: Streams) -> dict[str, int]:
        """At most what ``gateway`` has told Redis of the streams, by now."""
        seen, rounds = dict(streams.seen), await gateway.metric("baton_quota_renewals_total")

        async def a_whole_round_has_passed() -> bool:
            return await gateway.metric("baton_quota_renewals_total") >= rounds + 2  # one may have been under way

        await eventually(a_whole_round_has_passed, "progress is told")
        return seen


@asynccontextmanager
async def three_gateways(*flags: str) -> AsyncIterator[Gateways]:
    """The admin API is asked at the first one, which is not to be killed."""
    async with (
        running_stack("fake", *PATIENCE, *LEASE, UNLOGGED, *flags, prefill=0) as running,
        further_gateways(running, "gateway-1", "gateway-2") as others,
        tenants_at(running) as tenants,
    ):
        yield Gateways(running, tenants, [await first_gateway(running), *others])
        await running.assert_idle()


def test_whenever_gateways_are_killed_the_ledger_has_what_was_delivered_and_nothing_stays_reserved() -> None:
    """A client that resumes elsewhere is charged its whole answer, once; of one that does not, what its gateway told
    last is charged: no token that it has not got, and none missing that it had a round of renewals before."""
    chance = random.Random(5)

    async def main() -> None:
        async with three_gateways("engine.fake_step_ms=15") as to, AsyncExitStack() as stack:
            key = await to.tenants.made("acme", LIMITS)
            survivor, *victims = to.all
            resumed, left = Streams(), Streams()
            async with asyncio.TaskGroup() as group:
                for victim in victims:
                    there = Client([victim.address, survivor.address], key, resume=PERSISTENT)
                    alone = Client(victim.address, key, resume=UNASSISTED)
                    for client, streams, kind in ((there, resumed, "resumed"), (alone, left, "left")):
                        opened = await stack.enter_async_context(client)
                        for number in range(STREAMS):
                            request = replace(ASK, request_id=f"{kind}-{victim.id}-{number}")
                            group.create_task(streams.follow(opened, request))
                await eventually(resumed.have_begun, "each stream has a token")
                await eventually(left.have_begun, "each stream has a token")
                told: dict[str, int] = {}
                for victim in victims:
                    goal = chance.randrange(20, 120)
                    await eventually(lambda name=victim.id, goal=goal: grown(left, name, goal), "some more tokens")
                    told |= {name: n for name, n in (await to.told(victim, left)).items() if victim.id in name}
                    victim.process.kill()
            balances, entries = await to.tenants.settled("acme"), await to.tenants.charged("acme")
            charged = delivered(entries)
            assert (resumed.lost, set(resumed.seen.values())) == ({}, {LENGTH})
            assert set(left.lost) == set(left.seen)
            assert {name: charged[name] for name in resumed.seen} == resumed.seen
            for name, seen in left.seen.items():
                assert 0 < told[name] <= charged[name] <= seen < LENGTH
            assert set(charged) == set(resumed.seen) | set(left.seen)
            assert sum(entry.requests for entry in entries) == len(charged) == 4 * STREAMS
            spent = sum(entry.input_tokens + entry.output_tokens for entry in entries)
            [today] = [b.used for b in balances if b.level is Level.TENANT and b.metric is Metric.TOKENS_PER_DAY]
            assert today == spent
            assert {e.reason for e in entries if e.request_id in left.seen} == {LedgerReason.EXPIRED}

    asyncio.run(main())


async def grown(streams: Streams, gateway: str, goal: int) -> bool:
    return all(seen >= goal for name, seen in streams.seen.items() if gateway in name)


def test_of_streams_that_stand_still_when_their_gateway_is_killed_each_delivered_token_is_charged() -> None:
    """So there is no token that its gateway has not told yet."""

    async def main() -> None:
        async with three_gateways("engine.fake_step_ms=15") as to, AsyncExitStack() as stack:
            key = await to.tenants.made("acme", LIMITS)
            victim, left = to.all[1], Streams()
            client = await stack.enter_async_context(Client(victim.address, key, resume=UNASSISTED))
            async with asyncio.TaskGroup() as group:
                for number in range(STREAMS):
                    group.create_task(left.follow(client, replace(ASK, request_id=f"r{number}")))
                await eventually(left.have_begun, "each stream has a token")
                to.running.kill("decode-0", signal.SIGSTOP)
                await to.told(victim, left)
                victim.process.kill()
                to.running.kill("decode-0", signal.SIGCONT)
            await to.tenants.settled("acme")
            assert delivered(await to.tenants.charged("acme")) == left.seen

    asyncio.run(main())
