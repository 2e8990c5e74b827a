"""Write-through: bounded, paced, and never sending what is there already or what is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.api import TierApi
from baton.core.background import background
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, CorruptTransfer, PeerUnavailable
from baton.core.types import EngineStats, KvFormat, TierBlock
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.offloader import Offloader
from services.kvtransfer.tier import Tier
from tests.tier_blocks import name_of, names, until

FORMAT = KvFormat("fake", 4, 1, 1, 8)
SIZE = FORMAT.block_bytes
WAIT = 10.0


@dataclass
class Cache:
    """A prefix cache whose block n is full of n, of an engine that is idle unless it is told otherwise."""

    order: list[bytes] = field(default_factory=list)
    stats: EngineStats = EngineStats()
    reads: list[Sequence[bytes]] = field(default_factory=list)
    read_gone: bytes = b""

    def add(self, *numbers: int) -> None:
        self.order += names(*numbers)

    def evict(self, number: int) -> None:
        self.order[self.order.index(name_of(number))] = b""

    def cached_since(self, sequence: int) -> tuple[int, Sequence[bytes]]:
        return len(self.order), [name for name in self.order[sequence:] if name]

    def leading_cached(self, names: Sequence[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in self.order), len(names))

    async def read_cached(self, names: Sequence[bytes]) -> bytes:
        self.reads.append(names)
        payload = b""
        for name in names:
            if name not in self.order or name == self.read_gone:
                break
            payload += bytes([name[-1]]) * SIZE
        return payload


@dataclass
class Peer:
    tier: Tier = field(default_factory=lambda: Tier(memory_bytes=1 << 20, disk=None, message_bytes=1 << 20))
    puts: list[Sequence[TierBlock]] = field(default_factory=list)
    error: BatonError | None = None
    causes: list[str] = field(default_factory=list)
    is_there: bool = True
    on_put: Callable[[], None] | None = None
    held: set[bytes] = field(default_factory=set)

    def find(self) -> TierApi | None:
        return self if self.is_there else None  # type: ignore[return-value]

    def lost(self, cause: str) -> None:
        self.causes.append(cause)

    def leading(self, names: Sequence[bytes]) -> int:
        raise AssertionError("who offloads does not look up")

    def holds(self, names: Sequence[bytes]) -> None:
        self.held.update(names)

    def lacks(self, name: bytes) -> None:
        raise AssertionError("who offloads does not fetch")

    async def missing(self, wanted: Sequence[bytes]) -> tuple[bytes, ...]:
        return await self.tier.missing(wanted)

    async def put(self, blocks: Sequence[TierBlock]) -> None:
        if self.error is not None:
            raise self.error
        self.puts.append(blocks)
        if self.on_put is not None:
            self.on_put()
        await self.tier.put(blocks)


class Counted:
    """A meter whose counters add up."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Any:
        totals = self.totals

        class _Counter:
            def add(self, amount: float = 1.0, **given: str) -> None:
                key = "/".join([name, *given.values()])
                totals[key] = totals.get(key, 0) + amount

        return _Counter()


def offloader(
    cache: Cache, peer: Peer, meter: Counted | None = None, *, most: int = 100, clock: ManualClock | None = None
) -> Offloader:
    """A block takes one second of an idle engine's time, and two of a busy one's."""
    config = KvTransferConfig(
        tier_offload_mb_per_second=SIZE / 1e6,
        tier_offload_busy_mb_per_second=SIZE / 2e6,
        tier_offload_wait_seconds=WAIT,
        tier_offload_blocks=most,
    )
    return Offloader(
        cache,
        FORMAT,
        peer,
        FetchEconomy(bytes_per_second=1e9, tokens_per_second=1e3, min_tokens=1),
        config=config,
        meter=meter or Counted(),  # type: ignore[arg-type]
        clock=clock or ManualClock(),
    )


def cache_of(*numbers: int) -> Cache:
    cache = Cache()
    cache.add(*numbers)
    return cache


async def ship_all(one: Offloader) -> None:
    one.gather()
    while await one.ship():
        pass


def test_what_enters_the_prefix_cache_arrives_whole() -> None:
    async def main() -> None:
        cache, peer, clock = cache_of(1), Peer(), ManualClock()
        async with background(offloader(cache, peer, clock=clock).run(), "offload"):
            cache.add(2, 3)
            await until(lambda: peer.tier.stats.memory_blocks == 3)
            assert (await peer.tier.get(names(2)))[0].payload == b"\x02" * SIZE
            assert peer.held == set(names(1, 2, 3))
            await until(lambda: clock.now() >= 3)

    asyncio.run(main())


def test_an_engine_that_steps_is_left_alone_until_blocks_have_waited() -> None:
    async def main() -> None:
        cache, peer, clock = cache_of(1, 2), Peer(), ManualClock()
        one = offloader(cache, peer, clock=clock)
        for step in range(3):
            cache.stats = EngineStats(steps=step, running=step % 2)
            await one.look()
        assert peer.puts == [] and clock.now() == 0
        clock.advance(WAIT)
        cache.stats = EngineStats(steps=9, running=1)
        await one.look()
        assert peer.held == set(names(1, 2)) and clock.now() == WAIT + 4

    asyncio.run(main())


def test_an_idle_engine_that_gets_work_is_left_alone_at_once() -> None:
    async def main() -> None:
        cache, peer = cache_of(1, 2, 3), Peer()
        one = offloader(cache, peer)
        one._batch = 1
        await one.look()
        peer.on_put = lambda: setattr(cache, "stats", EngineStats(running=1))
        await one.look()
        assert peer.held == set(names(1))

    asyncio.run(main())


def test_blocks_that_the_tier_has_are_not_read() -> None:
    async def main() -> None:
        cache, peer = cache_of(1, 2, 3), Peer()
        for _ in range(2):
            await ship_all(offloader(cache, peer))
        assert len(cache.reads) == 1

    asyncio.run(main())


def test_what_was_sent_is_not_looked_at_again() -> None:
    async def main() -> None:
        cache, peer = cache_of(1, 2), Peer()
        one = offloader(cache, peer)
        await ship_all(one)
        peer.tier = Tier(memory_bytes=1 << 20, disk=None, message_bytes=1 << 20)
        cache.add(3)
        await ship_all(one)
        assert await peer.tier.missing(names(1, 2, 3)) == tuple(names(1, 2))

    asyncio.run(main())


def test_a_block_that_was_evicted_is_skipped_and_those_after_it_are_sent() -> None:
    async def main() -> None:
        cache, peer, meter = cache_of(1, 2, 3, 4, 5), Peer(), Counted()
        one = offloader(cache, peer, meter)
        one.gather()
        cache.evict(2)
        cache.read_gone = name_of(4)  # in the moment of the reading
        while await one.ship():
            pass
        assert await peer.tier.missing(names(1, 2, 3, 4, 5)) == tuple(names(2, 4))
        assert meter.totals == {"tier_offload_dropped/evicted": 2, "tier_offloaded_bytes": 3 * SIZE}

    asyncio.run(main())


def test_behind_by_too_much_the_oldest_are_dropped_and_counted() -> None:
    async def main() -> None:
        cache, peer, meter = cache_of(*range(10)), Peer(), Counted()
        await ship_all(offloader(cache, peer, meter, most=4))
        assert await peer.tier.missing(names(*range(10))) == tuple(names(*range(6)))
        assert meter.totals["tier_offload_dropped/behind"] == 6

    asyncio.run(main())


def test_failures_are_counted_and_only_a_lost_tier_is_left_alone() -> None:
    async def main() -> None:
        for error, causes in ((CorruptTransfer("rot"), []), (PeerUnavailable("gone"), ["gone"])):
            cache, peer, meter = cache_of(1), Peer(error=error), Counted()
            one = offloader(cache, peer, meter)
            one.gather()
            assert await one.ship() == 0
            assert peer.causes == causes and peer.held == set()
            assert meter.totals == {f"tier_offload_dropped/{error.reason}": 1}

    asyncio.run(main())


def test_without_a_tier_nothing_is_done_and_one_that_comes_gets_everything() -> None:
    async def main() -> None:
        cache, peer = cache_of(1), Peer(is_there=False)
        one = offloader(cache, peer)
        for _ in range(3):
            await one.look()
        assert cache.reads == []
        peer.is_there = True
        await one.look()
        await one.look()
        assert peer.held == set(names(1))

    asyncio.run(main())
