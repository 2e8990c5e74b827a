"""Write-through: bounded, paced, and never sending what is there already or what is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from baton.core.api import TierApi
from baton.core.background import background
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, CorruptTransfer, PeerUnavailable
from baton.core.types import KvFormat, TierBlock
from baton.engine.blocks import BlockChange
from services.kvtransfer.economy import FetchEconomy
from services.kvtransfer.offloader import Offloader
from services.kvtransfer.tier import Tier
from tests.tier_blocks import name_of, names, until

FORMAT = KvFormat("fake", 4, 1, 1, 8)
SIZE = FORMAT.block_bytes


@dataclass
class Cache:
    """A prefix cache whose block n is full of n."""

    held: set[bytes] = field(default_factory=set)
    sequence: int = 0
    changes: asyncio.Queue[BlockChange | None] = field(default_factory=asyncio.Queue)
    reads: list[Sequence[bytes]] = field(default_factory=list)

    def add(self, *numbers: int, skip: int = 0) -> None:
        """``skip`` changes are lost on the way."""
        self.held |= set(names(*numbers))
        self.sequence += 1 + skip
        self.changes.put_nowait(BlockChange(self.sequence, tuple(names(*numbers)), ()))

    def cached_blocks(self) -> tuple[int, frozenset[bytes]]:
        return self.sequence, frozenset(self.held)

    async def block_changes(self) -> AsyncIterator[BlockChange]:
        while True:
            change = await self.changes.get()
            if change is None:
                raise PeerUnavailable("the engine has ended")
            yield change

    async def read_cached(self, names: Sequence[bytes]) -> bytes:
        self.reads.append(names)
        payload = b""
        for name in names:
            if name not in self.held:
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

    def find(self) -> TierApi | None:
        return self if self.is_there else None  # type: ignore[return-value]

    def lost(self, cause: str) -> None:
        self.causes.append(cause)

    async def missing(self, wanted: Sequence[bytes]) -> tuple[bytes, ...]:
        return await self.tier.missing(wanted)

    async def put(self, blocks: Sequence[TierBlock]) -> None:
        if self.error is not None:
            raise self.error
        self.puts.append(blocks)
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
    cache: Cache, peer: Peer, meter: Counted, *, most: int = 100, clock: ManualClock | None = None
) -> Offloader:
    economy = FetchEconomy(bytes_per_second=1e9, tokens_per_second=1e3, min_tokens=1)
    return Offloader(
        cache,
        FORMAT,
        peer,
        economy,
        bytes_per_second=lambda: SIZE,
        queue_blocks=most,
        meter=meter,  # type: ignore[arg-type]
        clock=clock or ManualClock(),
    )


async def ship_all(one: Offloader) -> None:
    while await one.ship():
        pass


def test_what_enters_the_prefix_cache_arrives_whole() -> None:
    async def main() -> None:
        cache, peer, clock = Cache(), Peer(), ManualClock()
        cache.add(1)
        async with background(offloader(cache, peer, Counted(), clock=clock).run(), "offload"):
            cache.add(2, 3)
            await until(lambda: peer.tier.stats.memory_blocks == 3)
            assert (await peer.tier.get(names(2)))[0].payload == b"\x02" * SIZE
            await until(lambda: clock.now() >= 3)  # a block a second

    asyncio.run(main())


def test_a_gap_in_the_changes_means_everything() -> None:
    async def main() -> None:
        cache, peer = Cache(), Peer()
        async with background(offloader(cache, peer, Counted()).run(), "offload"):
            await asyncio.sleep(0)
            cache.held |= set(names(7))
            cache.add(8, skip=1)
            await until(lambda: peer.tier.stats.memory_blocks == 2)

    asyncio.run(main())


def test_blocks_that_the_tier_has_are_not_read() -> None:
    async def main() -> None:
        cache, peer = Cache(set(names(1, 2, 3))), Peer()
        for _ in range(2):
            one = offloader(cache, peer, Counted())
            one.add(names(1, 2, 3))
            await ship_all(one)
        assert len(cache.reads) == 1

    asyncio.run(main())


def test_a_block_that_was_evicted_is_skipped_and_those_after_it_are_sent() -> None:
    async def main() -> None:
        cache, peer, meter = Cache(set(names(1, 3, 4))), Peer(), Counted()
        one = offloader(cache, peer, meter)
        one.add(names(1, 2, 3, 4))
        await ship_all(one)
        assert await peer.tier.missing(names(1, 2, 3, 4)) == tuple(names(2))
        assert meter.totals == {"tier_offload_dropped/evicted": 1, "tier_offloaded_bytes": 3 * SIZE}

    asyncio.run(main())


def test_behind_by_too_much_the_oldest_are_dropped_and_counted() -> None:
    async def main() -> None:
        cache, peer, meter = Cache(set(names(*range(10)))), Peer(), Counted()
        one = offloader(cache, peer, meter, most=4)
        one.add(names(*range(10)))
        await ship_all(one)
        assert await peer.tier.missing(names(*range(10))) == tuple(names(*range(6)))
        assert meter.totals["tier_offload_dropped/behind"] == 6

    asyncio.run(main())


def test_failures_are_counted_and_only_a_lost_tier_is_left_alone() -> None:
    async def main() -> None:
        for error, causes in ((CorruptTransfer("rot"), []), (PeerUnavailable("gone"), ["gone"])):
            cache, peer, meter = Cache(set(names(1))), Peer(error=error), Counted()
            one = offloader(cache, peer, meter)
            one.add(names(1))
            assert await one.ship() == 0
            assert peer.causes == causes
            assert meter.totals == {f"tier_offload_dropped/{error.reason}": 1}

    asyncio.run(main())


def test_without_a_tier_what_is_new_waits() -> None:
    async def main() -> None:
        cache, peer = Cache(set(names(1))), Peer(is_there=False)
        one = offloader(cache, peer, Counted())
        one.add([name_of(1)])
        with suppress(TimeoutError):
            assert await one.ship() == 0
        peer.is_there = True
        assert await one.ship() == SIZE

    asyncio.run(main())


def test_the_engines_end_is_for_others_to_report() -> None:
    async def main() -> None:
        cache, peer = Cache(), Peer()
        cache.add(1)
        cache.changes.put_nowait(None)
        async with background(offloader(cache, peer, Counted()).run(), "offload"):
            await until(lambda: peer.tier.stats.memory_blocks == 1 and cache.changes.empty())
            for _ in range(10):
                await asyncio.sleep(0)  # what a failure would take to be seen

    asyncio.run(main())
