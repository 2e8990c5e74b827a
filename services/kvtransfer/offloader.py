"""Write-through to the cache tier: full blocks go there soon after they entered this worker's prefix cache.

Not when they are evicted: a block that is about to be reused would have to be waited for, in the middle of a step. The
price is that blocks are sent that are never evicted here; other workers profit from them, and a rate bounds it, a low
one while the engine is busy: a read makes the engine wait for the steps that it has launched.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from baton.core.api import TierApi
from baton.core.background import background
from baton.core.clock import Clock
from baton.core.errors import BatonError, PeerUnavailable
from baton.core.streams import closing
from baton.core.telemetry import Meter
from baton.core.types import KvFormat, TierBlock
from services.kvtransfer.checksum import named_checksum
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.tier_peer import LOOK_SECONDS, Tiers

log = logging.getLogger(__name__)

READ_BYTES = 2 << 20  # of one read from the engine, which computes nothing meanwhile: well below a millisecond


class Change(Protocol):
    @property
    def sequence(self) -> int: ...

    @property
    def added(self) -> Sequence[bytes]: ...

    @property
    def removed(self) -> Sequence[bytes]: ...


class PrefixCache(Protocol):
    """An engine's prefix cache: what enters and leaves it, and its bytes."""

    def cached_blocks(self) -> tuple[int, frozenset[bytes]]: ...

    def block_changes(self) -> AsyncIterator[Change]: ...

    async def read_cached(self, names: Sequence[bytes]) -> bytes: ...


class Offloader:
    """``run`` goes on beside the worker, at ``bytes_per_second`` of the moment.

    Behind by more than ``queue_blocks``, it drops the oldest, and counts them.
    """

    def __init__(
        self,
        cache: PrefixCache,
        layout: KvFormat,
        tiers: Tiers,
        economy: FetchEconomy,
        *,
        bytes_per_second: Callable[[], float],
        queue_blocks: int,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._tiers = tiers
        self._economy = economy
        self._rate = bytes_per_second
        self._most = queue_blocks
        self._batch = max(1, READ_BYTES // layout.block_bytes)
        self._clock = clock
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._news = asyncio.Event()
        self._sent = meter.counter("tier_offloaded_bytes", "KV bytes written through to the cache tier")
        self._dropped = meter.counter("tier_offload_dropped", "Blocks not written through", ("cause",))

    async def run(self) -> NoReturn:
        """Follow the prefix cache and send what enters it, no faster than the rate."""
        async with background(self._follow(), "prefix cache changes"):
            while True:
                await self._news.wait()
                await self._clock.sleep(await self.ship() / self._rate() if self._queue else 0)
                if not self._queue:
                    self._news.clear()
        raise AssertionError("it never ends by itself")

    async def _follow(self) -> None:
        last, held = self._cache.cached_blocks()
        self.add(sorted(held))
        with suppress(PeerUnavailable):  # the engine has ended, and its worker is about to
            async with closing(self._cache.block_changes()) as changes:
                async for change in changes:
                    if change.sequence not in (last, last + 1):
                        self.add(sorted(self._cache.cached_blocks()[1]))
                    last = change.sequence
                    self.add(change.added)
                    for name in change.removed:
                        self._queue.pop(name, None)

    def add(self, names: Sequence[bytes]) -> None:
        """These are in the prefix cache now."""
        for name in names:
            self._queue[name] = None
        while len(self._queue) > self._most:
            self._queue.popitem(last=False)
            self._dropped.add(cause="behind")
        if names:
            self._news.set()

    async def ship(self) -> int:
        """Send one batch of what waits; returns the bytes read."""
        tier = self._tiers.find()
        if tier is None:
            await self._clock.sleep(LOOK_SECONDS)
            return 0
        batch = [self._queue.popitem(last=False)[0] for _ in range(min(self._batch, len(self._queue)))]
        try:
            missing = await tier.missing(batch)
            payload = await self._cache.read_cached(missing) if missing else b""
            count = len(payload) // self._layout.block_bytes
            if count < len(missing):
                self._dropped.add(cause="evicted")
                self._return(missing[count + 1 :])
            began = self._clock.now()
            await put_blocks(tier, missing[:count], payload, self._layout)
        except BatonError as error:
            self._dropped.add(len(batch), cause=error.reason)
            if isinstance(error, PeerUnavailable):
                self._tiers.lost(error.message)
            return 0
        self._economy.moved(len(payload), self._clock.now() - began)
        self._sent.add(len(payload))
        return len(payload)

    def _return(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._queue[name] = None
            self._queue.move_to_end(name, last=False)


async def put_blocks(tier: TierApi, names: Sequence[bytes], payload: bytes, layout: KvFormat) -> None:
    """Put consecutive blocks under their names, with checksums made here."""
    view, size = memoryview(payload), layout.block_bytes
    parts = (bytes(view[index * size : (index + 1) * size]) for index in range(len(names)))
    blocks = [TierBlock(name, part, named_checksum(name, part)) for name, part in zip(names, parts, strict=True)]
    if blocks:
        await tier.put(blocks)
