"""Write-through to the cache tier: full blocks go there some time after they entered this worker's prefix cache.

Not when they are evicted: a block that is about to be reused would have to be waited for, in the middle of a step. The
price is that blocks are sent that are never evicted here; other workers profit from them.

No request pays for it: nothing is woken by the engine's reports, and blocks are sent while the engine has nothing to
do. Where it always has, those that have waited long enough go at a low rate, for a read makes the engine wait for the
steps that it has launched, and all of it takes processors from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NoReturn, Protocol

from baton.core.api import TierApi
from baton.core.clock import Clock
from baton.core.errors import BatonError, PeerUnavailable
from baton.core.telemetry import Meter
from baton.core.types import EngineStats, KvFormat, TierBlock
from services.kvtransfer.checksum import named_checksum
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.tier_peer import Tiers

READ_BYTES = 2 << 20  # of one read from the engine, which computes nothing meanwhile: well below a millisecond
LOOK_SECONDS = 0.5  # an engine that has made no step between two looks is idle


class PrefixCache(Protocol):
    """An engine's prefix cache: what it holds, its bytes, and whether the engine is busy."""

    @property
    def stats(self) -> EngineStats: ...

    def cached_since(self, sequence: int) -> tuple[int, Sequence[bytes]]: ...

    def leading_cached(self, names: Sequence[bytes]) -> int: ...

    async def read_cached(self, names: Sequence[bytes]) -> bytes: ...


class Offloader:
    """``run`` goes on beside the worker. Behind by more blocks than may wait, it drops the oldest, and counts them."""

    def __init__(
        self,
        cache: PrefixCache,
        layout: KvFormat,
        tiers: Tiers,
        economy: FetchEconomy,
        *,
        config: KvTransferConfig,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._tiers = tiers
        self._economy = economy
        self._config = config
        self._batch = max(1, READ_BYTES // layout.block_bytes)
        self._clock = clock
        self._queue: OrderedDict[bytes, float] = OrderedDict()  # names, and since when they wait
        self._sequence = 0
        self._steps = -1
        self._sent = meter.counter("tier_offloaded_bytes", "KV bytes written through to the cache tier")
        self._dropped = meter.counter("tier_offload_dropped", "Blocks not written through", ("cause",))

    async def run(self) -> NoReturn:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Take in what is new in the prefix cache, and send what is due."""
        if not self._tiers.is_there:
            return
        self.gather()
        before, self._steps = self._steps, self._cache.stats.steps
        if self._steps == before:
            while self._queue and self._tiers.is_there and self._is_idle:
                await self._clock.sleep(await self.ship() / (self._config.tier_offload_mb_per_second * 1e6))
        while self._queue and self._tiers.is_there and self._has_waited:
            await self._clock.sleep(await self.ship() / (self._config.tier_offload_busy_mb_per_second * 1e6))

    def gather(self) -> None:
        """What has entered the prefix cache since the last time waits to be sent from now on."""
        self._sequence, names = self._cache.cached_since(self._sequence)
        now = self._clock.now()
        for name in names:
            self._queue[name] = now
        while len(self._queue) > self._config.tier_offload_blocks:
            self._queue.popitem(last=False)
            self._dropped.add(cause="behind")

    async def ship(self) -> int:
        """Send one batch of what waits; returns the bytes read."""
        tier = self._tiers.find()
        if tier is None:
            return 0
        batch = [self._queue.popitem(last=False)[0] for _ in range(min(self._batch, len(self._queue)))]
        cached = [name for name in batch if self._cache.leading_cached((name,))]
        if len(cached) < len(batch):
            self._dropped.add(len(batch) - len(cached), cause="evicted")
        try:
            return await self._send(tier, cached) if cached else 0
        except BatonError as error:
            self._dropped.add(len(cached), cause=error.reason)
            if isinstance(error, PeerUnavailable):
                self._tiers.lost(error.message)
            return 0

    async def _send(self, tier: TierApi, names: Sequence[bytes]) -> int:
        missing = await tier.missing(names)
        payload = await self._cache.read_cached(missing) if missing else b""
        count = len(payload) // self._layout.block_bytes
        if count < len(missing):  # the first one that was not read has just been evicted
            self._dropped.add(cause="evicted")
            self._return(missing[count + 1 :])
        began = self._clock.now()
        await put_blocks(tier, missing[:count], payload, self._layout)
        self._tiers.holds([name for name in names if name not in missing[count:]])
        self._economy.moved(len(payload), self._clock.now() - began)
        self._sent.add(len(payload))
        return len(payload)

    def _return(self, names: Sequence[bytes]) -> None:
        now = self._clock.now()
        for name in reversed(names):
            self._queue[name] = now
            self._queue.move_to_end(name, last=False)

    @property
    def _is_idle(self) -> bool:
        stats = self._cache.stats
        return not (stats.running or stats.waiting)

    @property
    def _has_waited(self) -> bool:
        since = next(iter(self._queue.values()))
        return self._clock.now() - since >= self._config.tier_offload_wait_seconds


async def put_blocks(tier: TierApi, names: Sequence[bytes], payload: bytes, layout: KvFormat) -> None:
    """Put consecutive blocks under their names, with checksums made here."""
    view, size = memoryview(payload), layout.block_bytes
    parts = (bytes(view[index * size : (index + 1) * size]) for index in range(len(names)))
    blocks = [TierBlock(name, part, named_checksum(name, part)) for name, part in zip(names, parts, strict=True)]
    if blocks:
        await tier.put(blocks)
