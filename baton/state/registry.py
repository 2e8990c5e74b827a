"""Who is alive: process records under leases, in Redis or in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import resources

from redis.asyncio import Redis

from baton.core.clock import Clock
from baton.core.types import ProcessRecord
from baton.state.config import StateConfig
from baton.state.records import decode_record, encode_record
from baton.state.redis_client import within_budget

log = logging.getLogger(__name__)


class RedisRegistry:
    """One key a process, ``<namespace>:process:<id>``, which expires with its lease.

    Nothing is kept beside those keys, so a Redis that restarts empty is whole again after one heartbeat of everyone.
    """

    def __init__(self, client: Redis, config: StateConfig) -> None:
        self._client = client
        self._config = config
        self._prefix = f"{config.namespace}:process:"
        self._deregister = resources.files("baton.state").joinpath("deregister.lua").read_text(encoding="utf-8")

    async def register(self, record: ProcessRecord, ttl: float) -> None:
        lease_ms = max(1, int(ttl * 1000))
        call = self._client.set(self._prefix + record.id, encode_record(record), px=lease_ms)
        await within_budget(call, self._config, f"register {record.id}")

    async def deregister(self, process_id: str, epoch: int) -> None:
        await within_budget(self._compare_and_delete(process_id, epoch), self._config, f"deregister {process_id}")

    async def processes(self) -> Sequence[ProcessRecord]:
        return await within_budget(self._read_all(), self._config, "read the registry")

    async def _compare_and_delete(self, process_id: str, epoch: int) -> None:
        key, expected = self._prefix + process_id, str(epoch)
        await self._client.eval(self._deregister, 1, key, expected)  # pyright: ignore

    async def _read_all(self) -> list[ProcessRecord]:
        keys = sorted([key async for key in self._client.scan_iter(match=self._prefix + "*", count=500)])  # pyright: ignore
        values = await self._client.mget(keys) if keys else []  # pyright: ignore
        found: list[ProcessRecord] = []
        for key, value in zip(keys, values, strict=True):  # pyright: ignore
            if value is None:
                continue  # its lease ended between the two calls
            try:
                found.append(decode_record(value))  # pyright: ignore
            except ValueError as error:
                log.warning("registry entry ignored", extra={"key": str(key), "error": str(error)})  # pyright: ignore
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
