"""The usage ledger and the alerts, as the quota scripts write them: one Redis stream each for an organisation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

from redis.asyncio import Redis

from baton.core.streams import closing
from baton.core.types import LedgerEntry, LedgerExtent, LedgerReason, Level, QuotaAlert, ledger_position
from baton.state.config import StateConfig
from baton.state.quota.buckets import METRICS
from baton.state.quota.keys import organisation_prefix, organisations_with
from baton.state.quota.windows import MICROSECONDS, WindowKind
from baton.state.redis_client import within_budget

Fields = Mapping[bytes, bytes]


class RedisLedger:
    """Implements ``LedgerApi``. Nothing is ever dropped but by ``trim``."""

    def __init__(self, client: Redis, config: StateConfig) -> None:
        self._client = client
        self._config = config

    async def entries(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[LedgerEntry]:
        found = await self._read(organisation, "ledger", after, limit)
        return [_entry(entry_id.decode(), fields) for entry_id, fields in found]

    async def alerts(self, organisation: str, after: str = "", limit: int = 1000) -> Sequence[QuotaAlert]:
        found = await self._read(organisation, "alerts", after, limit)
        return [_alert(alert_id.decode(), fields) for alert_id, fields in found]

    async def organisations(self) -> AsyncIterator[str]:
        budget = (self._config.timeout_ms + self._config.connect_timeout_ms) / 1000
        found = organisations_with("ledger", self._client, self._config.namespace, budget)
        async with closing(found) as names:
            async for name in names:
                yield name

    async def extent(self, organisation: str) -> LedgerExtent:
        key = self._key(organisation, "ledger")
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.xlen(key)
            pipe.xrange(key, "-", "+", 1)  # pyright: ignore
            pipe.zscore(self._key(organisation, "trimmed"), "ledger")
            answers = await within_budget(pipe.execute(), self._config, "measure the ledger")
        length, first, trimmed = cast("tuple[int, list[tuple[bytes, Fields]], float | None]", tuple(answers))
        return LedgerExtent(length, first[0][0].decode() if first else "", int(trimmed or 0))

    async def trim(self, organisation: str, through: str) -> None:
        """What was trimmed is noted with it, as a score that only grows: gateways may trim at the same time."""
        milliseconds, count = ledger_position(through)
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.xtrim(self._key(organisation, "ledger"), minid=f"{milliseconds}-{count + 1}", approximate=False)  # pyright: ignore
            pipe.zadd(self._key(organisation, "trimmed"), {"ledger": milliseconds}, gt=True)  # pyright: ignore
            await within_budget(pipe.execute(), self._config, "trim the ledger")

    async def _read(self, organisation: str, stream: str, after: str, limit: int) -> list[tuple[bytes, Fields]]:
        start = f"({after}" if after else "-"
        call = self._client.xrange(self._key(organisation, stream), start, "+", limit)  # pyright: ignore
        answer = await within_budget(call, self._config, f"read the {stream} of {organisation}")
        return cast("list[tuple[bytes, Fields]]", answer)

    def _key(self, organisation: str, stream: str) -> str:
        return organisation_prefix(self._config.namespace, organisation) + stream


def _entry(entry_id: str, fields: Fields) -> LedgerEntry:
    requests, prompts, cached, answers, cost, energy = map(int, fields[b"used"].split())
    return LedgerEntry(
        id=entry_id,
        debited_at=int(fields[b"at"]),
        reason=LedgerReason(fields[b"reason"].decode()),
        request_id=fields[b"request"].decode(),
        tenant=fields[b"tenant"].decode(),
        key_id=fields[b"key"].decode(),
        model=fields[b"model"].decode(),
        requests=requests,
        input_tokens=prompts,
        cached_tokens=cached,
        output_tokens=answers,
        cost=cost,
        energy_millijoules=energy,
    )


def _alert(alert_id: str, fields: Fields) -> QuotaAlert:
    kind, start, level, subject, model = fields[b"bucket"].decode().split(":", 4)
    return QuotaAlert(
        level=Level(level),
        subject=subject,
        model=model,
        metric=METRICS[WindowKind(kind)][0],
        window_start=int(start) * MICROSECONDS,
        percent=int(fields[b"percent"]),
        limit=int(fields[b"limit"]),
        used=int(fields[b"used"]),
        id=alert_id,
    )
