"""A real Redis that freezes, or restarts empty, under a gateway's admissions."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.core.clock import RandomIds, SystemClock
from baton.core.deadline import Deadline
from baton.core.errors import QuotaExceeded
from baton.core.telemetry import SilentMeter
from baton.core.types import Account, Delivered, KeyRecord, LedgerReason, Limits, Organisation, QuotaClaim, Tenant
from baton.state.config import StateConfig
from baton.state.embedded import embedded_server
from baton.state.quota.ledger import RedisLedger
from baton.state.quota.local_share import LocalShare
from baton.state.quota.memory import MemoryQuota
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect
from gateway.admission import Admission, AdmissionPolicy

ACCOUNT = Account(
    Organisation("umbrella"),
    Tenant("acme", "umbrella", limits=Limits(tokens_per_day=1_000)),
    KeyRecord("k1", "acme", "k1.abcd", "00"),
)
POLICY, REPLICAS = AdmissionPolicy(probe_seconds=0.02), 4


@asynccontextmanager
async def gateway(url: str) -> AsyncIterator[tuple[Admission, RedisLedger]]:
    config = StateConfig(url, "secret", timeout_ms=5_000, connect_timeout_ms=5_000, quota_budget_ms=500)
    clock = SystemClock()
    async with connect(config) as client:
        share = LocalShare(lambda: REPLICAS)
        shared, local = SharedQuota(client, config, clock, share.heard), MemoryQuota(clock, terms=share.of)
        admission = Admission(shared, local, clock=clock, ids=RandomIds(), meter=SilentMeter(), policy=POLICY)
        async with admission.running():
            yield admission, RedisLedger(client, replace(config, timeout_ms=10_000))


async def serve(admission: Admission, name: str) -> str:
    """How it was admitted."""
    try:
        async with admission.admitted(QuotaClaim(name, "", ACCOUNT, "m", 10, 40), Deadline(None)) as grant:
            grant.note(Delivered(10, 0, 10))
            return "degraded" if grant.degraded else "shared"
    except QuotaExceeded:
        return "refused"


async def until_steady(admission: Admission) -> None:
    async with asyncio.timeout(60):
        while admission.degraded or admission.waiting:
            await asyncio.sleep(0.01)


def test_requests_go_on_while_redis_is_frozen_and_are_accounted_for_afterwards() -> None:
    async def body(url: str, pid: int) -> None:
        async with gateway(url) as (admission, ledger):
            assert [await serve(admission, f"a{n}") for n in range(3)] == ["shared"] * 3
            os.kill(pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(30):
                    meanwhile = await asyncio.gather(*(serve(admission, f"b{n}") for n in range(40)))
                    while not admission.degraded:
                        meanwhile.append(await serve(admission, f"b{len(meanwhile)}"))
            finally:
                os.kill(pid, signal.SIGCONT)
            await until_steady(admission)
            admitted = meanwhile.count("degraded")
            assert 1 <= admitted * 20 <= 1_000 / 4, "its share of the limit, and no more"
            assert await serve(admission, "c") == "shared"
            entries = await ledger.entries("umbrella")
            assert len({entry.request_id for entry in entries}) == len(entries) == 3 + admitted + 1
            assert sum(entry.input_tokens + entry.output_tokens for entry in entries) == 20 * len(entries)

    with embedded_server("secret") as (url, pid):
        asyncio.run(body(url, pid))


def test_a_redis_that_restarts_empty_forgets_reservations_and_charges_them_all_the_same() -> None:
    async def body(url: str) -> None:
        async with gateway(url) as (admission, ledger), connect(StateConfig(url, "secret", timeout_ms=5_000)) as client:
            async with admission.admitted(QuotaClaim("a", "", ACCOUNT, "m", 10, 40), Deadline(None)) as grant:
                grant.note(Delivered(10, 0, 10))
                await client.flushall()
            (entry,) = await ledger.entries("umbrella")
            assert (entry.reason, entry.output_tokens) == (LedgerReason.UNRESERVED, 10)
            assert await serve(admission, "b") == "shared"

    with embedded_server("secret") as (url, _):
        asyncio.run(body(url))


def test_a_gateway_starts_while_redis_is_absent() -> None:
    async def body() -> None:
        async with gateway("redis://127.0.0.1:1/0") as (admission, _):
            assert await serve(admission, "a") == "degraded"

    asyncio.run(body())
