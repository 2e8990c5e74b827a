"""Where the quota scripts keep what: an organisation's keys, and which organisations have some."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

from redis.asyncio import Redis

from baton.state.redis_client import within

SCANNED_AT_ONCE = 1000  # keys


def organisation_prefix(namespace: str, organisation: str) -> str:
    return f"{namespace}:{{{organisation}}}:quota:"


async def organisations_with(key: str, client: Redis, namespace: str, budget: float) -> AsyncIterator[str]:
    """Names of organisations that have ``key`` (``open``, ``ledger``): a walk over all keys, in steps of ``budget``
    seconds each. Raises StateUnavailable."""
    before, _, after = (organisation_prefix(namespace, "*") + key).partition("*")
    cursor, seen = 0, set[bytes]()
    while True:
        step = client.scan(cursor, match=f"{before}*{after}", count=SCANNED_AT_ONCE)  # pyright: ignore
        cursor, keys = cast("tuple[int, list[bytes]]", await within(step, budget, f"find organisations with {key}"))
        for found in set(keys) - seen:
            yield found.decode().removeprefix(before).removesuffix(after)
        seen.update(keys)
        if cursor == 0:
            return
