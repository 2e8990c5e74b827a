"""Why requests were refused, kept for whoever asks: a bounded stream for each tenant, in Redis or in memory."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import Redis

from baton.core.types import Level, Metric, QuotaRefusal, RefusalNote
from baton.state.config import StateConfig
from baton.state.redis_client import within_budget

KEPT = 1000  # of each tenant; a stream is shortened by whole nodes, so a few more may be there
FORGET_SECONDS = 7 * 86_400  # after a tenant's latest refusal


class RedisRefusals:
    """Implements ``RefusalsApi``: ``<namespace>:refusals:<tenant>``."""

    def __init__(self, client: Redis, config: StateConfig) -> None:
        self._client = client
        self._config = config

    async def note(self, notes: Sequence[RefusalNote]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for note in notes:
            fields = {"request": note.request_id, "note": _encode(note)}
            pipe.xadd(self._key(note.tenant), fields, maxlen=KEPT, approximate=True)  # pyright: ignore
        for tenant in {note.tenant for note in notes}:
            pipe.expire(self._key(tenant), FORGET_SECONDS)
        await within_budget(pipe.execute(), self._config, "note refusals")

    async def find(self, tenant: str, request_id: str) -> RefusalNote | None:
        call = self._client.xrevrange(self._key(tenant), "+", "-", 2 * KEPT)  # pyright: ignore
        found = cast("list[tuple[bytes, dict[bytes, bytes]]]", await within_budget(call, self._config, "read refusals"))
        sought = request_id.encode()
        return next((_decode(fields[b"note"]) for _, fields in found if fields[b"request"] == sought), None)

    def _key(self, tenant: str) -> str:
        return f"{self._config.namespace}:refusals:{tenant}"


class MemoryRefusals:
    """The twin of ``RedisRefusals`` for one process."""

    def __init__(self) -> None:
        self._notes: defaultdict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=KEPT))

    async def note(self, notes: Sequence[RefusalNote]) -> None:
        for note in notes:
            self._notes[note.tenant].append(_encode(note))

    async def find(self, tenant: str, request_id: str) -> RefusalNote | None:
        found = map(_decode, reversed(self._notes[tenant]))
        return next((note for note in found if note.request_id == request_id), None)


def _encode(note: RefusalNote) -> bytes:
    return json.dumps(dataclasses.asdict(note), separators=(",", ":")).encode()


def _decode(data: bytes) -> RefusalNote:
    fields = cast("dict[str, Any]", json.loads(data))
    refusals = cast("list[dict[str, Any]]", fields.pop("refusals"))
    return RefusalNote(**fields, refusals=tuple(_refusal(refusal) for refusal in refusals))


def _refusal(fields: dict[str, Any]) -> QuotaRefusal:
    level, metric = Level(fields.pop("level")), Metric(fields.pop("metric"))
    return QuotaRefusal(level=level, metric=metric, **fields)
