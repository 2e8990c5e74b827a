"""Gateways with delivery logs, killed in the middle of their streams: the ledger has what was delivered.

Leases are so long here that no gateway renews one before it is killed: what Redis knows then, a log has told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.client import Client, ResumePolicy
from baton.core.clock import SystemClock
from baton.core.errors import PeerUnavailable
from baton.core.types import GenerateRequest, LedgerEntry, LedgerReason, Limits, StopRules
from baton.state.config import StateConfig
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect
from gateway.delivery_log import ENDING
from tests.gateways import GatewayProcess, eventually, first_gateway, further_gateways
from tests.launched import RunningStack, prompt_request, running_stack
from tests.tenants import Tenants, delivered, tenants_at

STREAMS = 4  # at each gateway
LENGTH = 150
ASK = replace(prompt_request(range(10, 26), LENGTH), stop=StopRules(ignore_eos=True))
LEASE = ("gateway.quota_lease_seconds=900", "gateway.quota_renew_seconds=300")
SETTINGS = ("state.quota_budget_ms=20000", "gateway.planner_budget_ms=20000", "engine.fake_step_ms=50")
LIMITS = Limits(tokens_per_day=10**9, concurrency=10**4)
PERSISTENT = ResumePolicy(attempts=50, attempts_unanswered=50, first_pause=0.05, longest_pause=0.2)
UNASSISTED = ResumePolicy(attempts=0, attempts_unanswered=0)
LONG_AGO = "for _, m in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do redis.call('ZADD', KEYS[1], 1, m) end"
TOLD = "baton_quota_recovered_streams_total"


@dataclass
class Streams:
    """By request: output tokens that the client has, and of the largest message among them."""

    seen: dict[str, int] = field(default_factory=dict)
    largest: int = 1

    async def follow(self, client: Client, request: GenerateRequest) -> None:
        self.seen[request.request_id] = 0
        with pytest.raises(PeerUnavailable):
            async with aclosing(client.stream(request)) as chunks:
                async for chunk in chunks:
                    self.seen[request.request_id] += len(chunk.token_ids)
                    self.largest = max(self.largest, len(chunk.token_ids))

    async def have(self, tokens: int) -> bool:
        return len(self.seen) == STREAMS and min(self.seen.values()) >= tokens

    def assert_charged(self, entries: Sequence[LedgerEntry]) -> None:
        """All but the message of each stream that was under way."""
        charged = delivered([entry for entry in entries if entry.request_id in self.seen])
        assert charged.keys() == self.seen.keys()
        assert all(abs(charged[name] - seen) <= self.largest for name, seen in self.seen.items()), (charged, self.seen)
        assert min(charged.values()) > self.largest


async def streamed_until_killed(gateway: GatewayProcess, key: str, tokens: int) -> Streams:
    """Streams at ``gateway``, which is killed once each has some tokens and before it has renewed any lease."""
    streams = Streams()
    async with Client(gateway.address, key, resume=UNASSISTED) as client, asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(streams.follow(client, replace(ASK, request_id=f"{gateway.id}-{number}")))
        await eventually(lambda: streams.have(tokens), "each stream has some tokens")
        assert await gateway.metric("baton_quota_renewals_total") == 0
        gateway.process.kill()
    return streams


async def lapse(running: RunningStack) -> None:
    """As if all leases of the organisation had ended by now."""
    record = running.stack.record
    config = StateConfig(record.state_url, record.state_password, namespace=record.state_namespace)
    async with connect(config) as client:
        leases = f"{config.namespace}:{{umbrella}}:quota:open"
        await client.eval(LONG_AGO, 1, leases)  # pyright: ignore[reportUnknownMemberType, reportGeneralTypeIssues]
        await SharedQuota(client, config, SystemClock()).expire()


def has_told(gateway: GatewayProcess, streams: int) -> Callable[[], Awaitable[bool]]:
    async def told() -> bool:
        return await gateway.metric(TOLD) >= streams

    return told


async def expired_entries(running: RunningStack, tenants: Tenants) -> list[LedgerEntry]:
    await lapse(running)
    await tenants.settled("acme")
    return await tenants.charged("acme")


def test_what_a_killed_gateway_had_delivered_is_charged_by_one_that_lives_and_by_its_successor(tmp_path: Path) -> None:
    async def main() -> None:
        own = (f"gateway.delivery_log_directory={tmp_path / 'own'}",)
        async with running_stack("fake", *LEASE, *SETTINGS, prefill=0) as running, AsyncExitStack() as stack:
            tenants = await stack.enter_async_context(tenants_at(running))
            survivor = await first_gateway(running)
            [beside] = await stack.enter_async_context(further_gateways(running, "gateway-1"))
            [apart] = await stack.enter_async_context(further_gateways(running, "gateway-2", settings=own))
            key = await tenants.made("acme", LIMITS)
            left = await asyncio.gather(streamed_until_killed(beside, key, 23), streamed_until_killed(apart, key, 41))
            await eventually(has_told(survivor, STREAMS), "the survivor told what is beside its own log")
            assert await survivor.metric(TOLD) == STREAMS
            [successor] = await stack.enter_async_context(further_gateways(running, "gateway-2", settings=own))
            await eventually(has_told(successor, STREAMS), "the successor told what it found")
            entries = await expired_entries(running, tenants)
            for streams in left:
                streams.assert_charged(entries)
            assert {entry.reason for entry in entries} == {LedgerReason.EXPIRED}
            assert sum(entry.requests for entry in entries) == len(entries) == 2 * STREAMS
            assert len([*(tmp_path / "own").glob(f"*{ENDING}")]) == 1  # the successor's
            await running.assert_idle()

    asyncio.run(main())


def test_a_log_that_is_found_after_the_leases_is_charged_late_and_resumed_streams_are_charged_once(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        own = (f"gateway.delivery_log_directory={tmp_path / 'own'}",)
        async with running_stack("fake", *LEASE, *SETTINGS, prefill=0) as running, AsyncExitStack() as stack:
            tenants = await stack.enter_async_context(tenants_at(running))
            survivor = await first_gateway(running)
            [victim] = await stack.enter_async_context(further_gateways(running, "gateway-1", settings=own))
            key = await tenants.made("acme", LIMITS)
            there = await stack.enter_async_context(Client([victim.address, survivor.address], key, resume=PERSISTENT))
            resumed = [
                asyncio.create_task(there.ask(replace(ASK, request_id=f"resumed-{number}")))
                for number in range(STREAMS)
            ]
            left = await streamed_until_killed(victim, key, 30)
            answers = await asyncio.gather(*resumed)
            await lapse(running)
            await stack.enter_async_context(further_gateways(running, "gateway-1", settings=own))

            async def all_is_charged() -> bool:
                return len(await tenants.charged("acme")) == 3 * STREAMS

            await eventually(all_is_charged, "what was delivered is charged late")
            entries = await tenants.charged("acme")
            left.assert_charged(entries)
            reasons = [entry.reason for entry in entries if entry.request_id in left.seen]
            assert sorted(reasons) == [LedgerReason.EXPIRED] * STREAMS + [LedgerReason.LATE] * STREAMS
            assert [len(answer.choices[0].token_ids) for answer in answers] == [LENGTH] * STREAMS
            charged = delivered(entries)
            assert [charged[f"resumed-{number}"] for number in range(STREAMS)] == [LENGTH] * STREAMS
            assert sum(entry.requests for entry in entries) == 2 * STREAMS
            await running.assert_idle()

    asyncio.run(main())
