"""Redis that is frozen, or killed and restarted empty, under the load of a whole stack's gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest

from baton.cli.status import as_table, entries
from baton.client import Client, ResumePolicy
from baton.core.errors import QuotaExceeded, StateUnavailable, Unauthenticated
from baton.core.reserved_port import reserved_port
from baton.core.types import AwayPolicy, GenerateRequest, LedgerReason, Level, Limits, Metric, StopRules, Tenant
from tests.admin_world import WHICHEVER
from tests.faults.deployment import PASSWORD, RedisServer
from tests.gateways import GatewayProcess, eventually, first_gateway
from tests.launched import RunningStack, prompt_request, running_stack
from tests.tenants import UMBRELLA, Tenants, delivered, tenants_at

ASK = replace(prompt_request(range(10, 18), 12), stop=StopRules(ignore_eos=True))  # 20 tokens
LIMITS = Limits(tokens_per_day=4_000, requests_per_minute=10**6)
REPLICAS = 4
SETTINGS = ("gateway.planner_budget_ms=20000", "engine.max_waiting=1000", f"gateway.replicas={REPLICAS}")
UNASSISTED = ResumePolicy(attempts=0, attempts_unanswered=0)


async def outcome(client: Client, request: GenerateRequest) -> str:
    try:
        await client.ask(request)
    except (QuotaExceeded, StateUnavailable) as error:
        return error.reason
    return "OK"


async def load(client: Client, name: str, requests: int) -> dict[str, str]:
    """What became of each of so many requests at once."""
    asked = [replace(ASK, request_id=f"{name}-{number}") for number in range(requests)]
    said = await asyncio.gather(*(outcome(client, request) for request in asked))
    return {request.request_id: one for request, one in zip(asked, said, strict=True)}


async def is_degraded(running: RunningStack, gateway: GatewayProcess) -> bool:
    """As ``baton status`` and the gateway's metrics say, which agree once a change is over."""
    shown = await entries(running.stack.record)
    [entry] = [entry for entry in shown if entry["id"] == gateway.id]
    measured = await gateway.metric("baton_quota_degraded")
    if "degraded" in entry:
        assert "ready (quota counters are away)" in as_table(shown)
    return bool(measured) and "degraded" in entry


async def is_steady(running: RunningStack, gateway: GatewayProcess) -> bool:
    waiting = await gateway.metric("baton_quota_settlements_waiting")
    return not await is_degraded(running, gateway) and not waiting


def changes(gateway: RunningStack) -> list[str]:
    """What the gateway's log says of the counters, in order."""
    [log] = [child.log for child in gateway.stack.children if child.id == "gateway-0"]
    lines = log.read_text(encoding="utf-8").splitlines()
    return ["away" if "counters are away" in line else "back" for line in lines if '"quota counters are' in line]


async def made(tenants: Tenants, name: str, away: AwayPolicy) -> str:
    key = await tenants.made(name, LIMITS)
    await tenants.admin.update(UMBRELLA.child(name), Tenant("", "", away=away), ["away"], WHICHEVER)
    return key


def test_while_redis_is_frozen_each_policy_decides_within_its_share_and_all_is_accounted_for_afterwards() -> None:
    async def main() -> None:
        async with running_stack("fake", *SETTINGS, prefill=0) as running, AsyncExitStack() as stack:
            tenants, gateway = await stack.enter_async_context(tenants_at(running)), await first_gateway(running)
            clients: dict[AwayPolicy, Client] = {}
            for policy in AwayPolicy:
                client = Client(running.stack.record.gateway, await made(tenants, policy.value, policy))
                clients[policy] = await stack.enter_async_context(client)
                assert set((await load(client, f"before-{policy}", 3)).values()) == {"OK"}
            assert running.stack.redis_pid is not None
            os.kill(running.stack.redis_pid, signal.SIGSTOP)
            try:
                said = {policy: await load(client, "during", 90) for policy, client in clients.items()}
                await eventually(lambda: is_degraded(running, gateway), "status and metrics say so")
            finally:
                os.kill(running.stack.redis_pid, signal.SIGCONT)
            counted = {policy: Counter(each.values()) for policy, each in said.items()}
            share = LIMITS.of(Metric.TOKENS_PER_DAY) or 0
            assert counted[AwayPolicy.BOUNDED_LOCAL]["OK"] * 20 <= share / REPLICAS, "overshoot within its share"
            assert set(counted[AwayPolicy.BOUNDED_LOCAL]) == {"OK", "QUOTA_EXCEEDED"}
            assert set(counted[AwayPolicy.OPEN]) == {"OK"}
            assert set(counted[AwayPolicy.CLOSED]) == {"STATE_UNAVAILABLE"}, "an outage, and never a quota"
            await eventually(lambda: is_steady(running, gateway), "the counters are back")
            for policy, client in clients.items():
                assert set((await load(client, "after", 2)).values()) == {"OK"}
                balances, booked = await tenants.settled(policy.value), await tenants.charged(policy.value)
                served = counted[policy]["OK"] + 5
                assert list(delivered(booked).values()) == [12] * served == [e.output_tokens for e in booked]
                [used] = [b.used for b in balances if b.level is Level.TENANT and b.metric is Metric.TOKENS_PER_DAY]
                assert used == 20 * served
            told = changes(running)
            assert told == ["away", "back"] * (len(told) // 2), "one line a change"
            await running.assert_idle()

    asyncio.run(main())


def test_a_redis_that_was_killed_and_comes_back_empty_has_forgotten_tenants_and_use_and_charges_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As documented: what runs goes on and is charged once, to counters that begin anew; keys of the file go on; keys
    and tenants that were only in Redis are gone."""
    monkeypatch.setenv("BATON_STATE__PASSWORD", PASSWORD)
    slow = replace(ASK, max_tokens=300, request_id="running")

    async def body(server: RedisServer) -> None:
        settings = (*SETTINGS, f"state.url={server.url}", "engine.fake_step_ms=5")
        async with running_stack("fake", *settings, prefill=0) as running, AsyncExitStack() as stack:
            gateway, got = await first_gateway(running), 0
            tenants = await stack.enter_async_context(tenants_at(running))
            key = await tenants.made("acme", LIMITS)
            stored = await stack.enter_async_context(Client(running.stack.record.gateway, key, resume=UNASSISTED))
            await stored.ask(ASK)
            async with aclosing(running.client.stream(slow)) as chunks:
                async for chunk in chunks:
                    if not got:
                        server.restart()
                    got += len(chunk.token_ids)
            await running.client.ask(replace(ASK, request_id="next"))
            await eventually(lambda: is_steady(running, gateway), "the counters are back")
            booked = await tenants.charged_to_local()
            assert [(e.request_id, e.output_tokens) for e in sorted(booked, key=lambda e: e.request_id)] == [
                ("next", 12),
                ("running", got),
            ]
            [running_entry] = [entry for entry in booked if entry.request_id == "running"]
            assert (got, running_entry.reason) == (300, LedgerReason.UNRESERVED)

            async def is_unknown() -> bool:
                try:
                    await stored.models()
                except Unauthenticated:
                    return True
                return False

            async def all_are_registered() -> bool:
                return len(await running.stack.processes()) == len(running.stack.children)

            await eventually(is_unknown, "the stored key is gone with the data")
            await eventually(all_are_registered, "the registry is filled again")
            await running.assert_idle()

    with reserved_port("127.0.0.1", 0) as port, RedisServer(port) as server:
        asyncio.run(body(server))
