"""Who is alive: process records under leases, in Redis or in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import resources
from typing import cast

from redis.asyncio import Redis

from baton.core.clock import Clock
from baton.core.types import ProcessRecord
from baton.state.config import StateConfig
from baton.state.records import decode_record, encode_record
from baton.state.redis_client import within_budget

log = logging.getLogger(__name__)


class RedisRegistry:
    """One key a process, ``<namespace>:process:<id>``, which expires with its lease.

    Their ids are in the sorted set ``<namespace>:processes``: a walk over all keys would take the longer, the more
    requests were admitted lately. Each heartbeat writes all of its process, so a Redis that restarts empty is whole
    again after one of everyone.
    """

    def __init__(self, client: Redis, config: StateConfig) -> None:
        self._client = client
        self._config = config
        self._prefix = f"{config.namespace}:process:"
        self._index = f"{config.namespace}:processes"
        self._register, self._deregister = (
            resources.files("baton.state").joinpath(f"{name}.lua").read_text(encoding="utf-8")
            for name in ("register", "deregister")
        )

    async def register(self, record: ProcessRecord, ttl: float) -> None:
        lease_ms = max(1, int(ttl * 1000))
        key, data = self._prefix + record.id, encode_record(record)
        call = self._client.eval(self._register, 2, self._index, key, record.id, data, lease_ms)  # pyright: ignore
        await within_budget(call, self._config, f"register {record.id}")  # pyright: ignore

    async def deregister(self, process_id: str, epoch: int) -> None:
        await within_budget(self._compare_and_delete(process_id, epoch), self._config, f"deregister {process_id}")

    async def processes(self) -> Sequence[ProcessRecord]:
        return await within_budget(self._read_all(), self._config, "read the registry")

    async def _compare_and_delete(self, process_id: str, epoch: int) -> None:
        key, expected = self._prefix + process_id, str(epoch)
        await self._client.eval(self._deregister, 2, self._index, key, process_id, expected)  # pyright: ignore

    async def _read_all(self) -> list[ProcessRecord]:
        ids = cast("list[bytes]", await self._client.zrange(self._index, 0, -1))  # pyright: ignore
        keys = sorted(self._prefix + process_id.decode() for process_id in ids)
        values = await self._client.mget(keys) if keys else []  # pyright: ignore
        found: list[ProcessRecord] = []
        for key, value in zip(keys, values, strict=True):  # pyright: ignore
            if value is None:
                continue  # its lease ended between the two calls
            try:
                found.append(decode_record(value))  # pyright: ignore
            except ValueError as error:
                log.warning("registry entry ignored", extra={"key": key, "error": str(error)})
        return found


class MemoryRegistry:
    """The twin of ``RedisRegistry`` for one process; leases end by the injected clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[bytes, float]] = {}

    async def register(self, record: ProcessRecord, ttl: float) -> None:
        self._leases[record.id] = (encode_record(record), self._clock.now() + max(ttl, 0.001))

    async def deregister(self, process_id: str, epoch: int) -> None:
        lease = self._leases.get(process_id)
        if lease is not None and decode_record(lease[0]).epoch == epoch:
            del self._leases[process_id]

    async def processes(self) -> Sequence[ProcessRecord]:
        now = self._clock.now()
        self._leases = {key: lease for key, lease in self._leases.items() if lease[1] > now}
        return [decode_record(data) for _, (data, _) in sorted(self._leases.items())]
