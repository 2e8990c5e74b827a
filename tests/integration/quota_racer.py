"""One gateway's admissions, as a process: ``python -m tests.integration.quota_racer URL NAMESPACE NAME REQUESTS``.

Prints a JSON line of what was admitted. A third of the admitted requests is left open and the process killed at the
end, as a gateway dies in the middle of its streams; what a request was delivered is drawn from its name.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import zlib

from baton.core.clock import SystemClock
from baton.core.errors import QuotaExceeded
from baton.core.types import Account, Delivered, KeyRecord, Limits, Organisation, Progress, QuotaClaim, Tenant
from baton.state.config import StateConfig
from baton.state.quota.shared import SharedQuota
from baton.state.redis_client import connect

PASSWORD = "secret"
LEASE_SECONDS = 3.0
LIMITS = Limits(requests_per_minute=100, tokens_per_minute=10_000, tokens_per_day=6_000, concurrency=90)
ACCOUNT = Account(
    Organisation("umbrella", Limits(tokens_per_month=5_000)),
    Tenant("acme", "umbrella", limits=LIMITS),
    KeyRecord("k1", "acme", "k1.abcd", "00"),
)


def state_config(url: str, namespace: str) -> StateConfig:
    return StateConfig(url, PASSWORD, timeout_ms=60_000, quota_budget_ms=60_000, namespace=namespace)


def delivered(name: str) -> Delivered:
    return Delivered(40, 0, zlib.crc32(name.encode()) % 60)


async def ask(quota: SharedQuota, name: str) -> tuple[str, int] | None:
    """The request's name and its tokens delivered; None when it was refused."""
    order = QuotaClaim(name, name, ACCOUNT, "m", 40, 60, lease_seconds=LEASE_SECONDS)
    try:
        await quota.reserve(order)
    except QuotaExceeded:
        return None
    told = delivered(name)
    await quota.renew("umbrella", [Progress(name, "acme", name, told)], LEASE_SECONDS)
    if zlib.crc32(name.encode()) % 3:
        await quota.settle(order, told)
    return name, told.input_tokens + told.output_tokens


async def main(url: str, namespace: str, name: str, requests: int) -> None:
    config = state_config(url, namespace)
    async with connect(config) as client:
        quota = SharedQuota(client, config, SystemClock())
        asked = await asyncio.gather(*(ask(quota, f"{name}-{number}") for number in range(requests)))
    print(json.dumps(dict(answer for answer in asked if answer is not None)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
