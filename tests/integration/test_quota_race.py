"""Four gateways race for one tenant's limits and die in the middle: no limit is overshot, nothing stays reserved."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.core.clock import SystemClock
from baton.core.types import LedgerEntry, Metric, QuotaBalance
from baton.state.embedded import embedded_server
from baton.state.quota.ledger import RedisLedger
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect
from tests.integration.quota_racer import ACCOUNT, PASSWORD, state_config

ROOT = Path(__file__).parents[2]
GATEWAYS, REQUESTS = 4, 500
MINUTE = 60 * 10**6


def race(url: str) -> dict[str, int]:
    """Tokens delivered to each request that was admitted."""
    command = [sys.executable, "-m", "tests.integration.quota_racer", url, "race"]
    racers = [
        subprocess.Popen([*command, f"g{number}", str(REQUESTS)], cwd=ROOT, stdout=subprocess.PIPE)
        for number in range(GATEWAYS)
    ]
    admitted: dict[str, int] = {}
    for racer in racers:
        with racer:
            output, _ = racer.communicate(timeout=120)
        admitted |= json.loads(output)
    return admitted


async def after_expiry(url: str) -> tuple[Sequence[LedgerEntry], Sequence[QuotaBalance]]:
    config = state_config(url, "race")
    async with connect(config) as client:
        quota, ledger = SharedQuota(client, config, SystemClock()), RedisLedger(client, config)
        async with asyncio.timeout(60):
            while True:
                await quota.expire()
                balances = await quota.balances(ACCOUNT, "m")
                if not any(balance.reserved for balance in balances):
                    return await ledger.entries("umbrella", limit=10_000), balances
                await asyncio.sleep(0.05)


def test_racing_gateways_overshoot_no_limit_and_leave_nothing_reserved() -> None:
    with embedded_server(PASSWORD) as (url, _):
        admitted = race(url)
        entries, balances = asyncio.run(after_expiry(url))
    assert {entry.request_id: entry.input_tokens + entry.output_tokens for entry in entries} == admitted
    day = next(b for b in balances if b.metric is Metric.TOKENS_PER_DAY)
    month = next(b for b in balances if b.metric is Metric.TOKENS_PER_MONTH and b.limit is not None)
    assert month.used == sum(admitted.values()) <= 5_000
    assert day.used <= 6_000
    for minute in {entry.debited_at // MINUTE for entry in entries}:
        within = [entry for entry in entries if entry.debited_at // MINUTE == minute]
        assert len(within) <= 100
    assert len(admitted) >= 5_000 // 100
