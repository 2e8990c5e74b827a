"""The directory: sequence numbers without gaps, bounded memory, peers that fade."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import TransferRejected
from baton.core.types import KvFormat, KvHandshake
from services.kvtransfer.directory import Directory

FORMAT = KvFormat("fake", 16, 1, 1, 8)


def hello(worker_id: str, epoch: int = 1) -> KvHandshake:
    return KvHandshake(worker_id, epoch, "m", "h", FORMAT)


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def directory(clock: ManualClock, max_blocks: int = 100) -> Directory:
    return Directory(clock, max_blocks=max_blocks, peer_lease_seconds=10.0)


async def with_worker(found: Directory, worker_id: str, *held: int) -> None:
    await found.announce(hello(worker_id), f"{worker_id}:1")
    await found.reset(worker_id, 1, 0, hashes(*held))


def test_holders_counts_leading_blocks_of_each_worker() -> None:
    async def run() -> None:
        found = directory(ManualClock())
        await with_worker(found, "a", 1, 2, 3)
        await with_worker(found, "b", 1, 3)
        await with_worker(found, "c", 9)
        assert await found.holders(hashes(1, 2, 3, 4)) == {"a": 3, "b": 1}

    asyncio.run(run())


def test_publish_applies_in_sequence_and_a_gap_asks_for_everything() -> None:
    async def run() -> None:
        found = directory(ManualClock())
        await found.announce(hello("a"), "a:1")
        assert not await found.publish("a", 1, 1, hashes(1), [])  # nothing to build on yet
        await found.reset("a", 1, 4, hashes(1))
        assert await found.publish("a", 1, 5, hashes(2), hashes(1))
        assert await found.holders(hashes(2)) == {"a": 1}
        assert await found.holders(hashes(1)) == {}
        assert not await found.publish("a", 1, 7, hashes(3), [])
        assert not await found.publish("a", 1, 5, hashes(3), [])
        assert await found.publish("a", 1, 6, hashes(3), [])
        assert await found.holders(hashes(2, 3)) == {"a": 2}

    asyncio.run(run())


def test_new_epoch_forgets_the_blocks_of_the_old_one() -> None:
    async def run() -> None:
        found = directory(ManualClock())
        await with_worker(found, "a", 1, 2)
        await found.announce(hello("a", epoch=2), "a:2")
        assert await found.holders(hashes(1)) == {}
        assert not await found.publish("a", 1, 1, hashes(3), [])
        assert found.blocks == 0
        assert await found.peers() == [(hello("a", epoch=2), "a:2")]

    asyncio.run(run())


def test_reset_by_an_unannounced_worker_is_refused() -> None:
    async def run() -> None:
        found = directory(ManualClock())
        await found.announce(hello("a", epoch=2), "a:1")
        with pytest.raises(TransferRejected, match="worker a with epoch 1 has not announced itself"):
            await found.reset("a", 1, 0, hashes(1))

    asyncio.run(run())


def test_memory_is_bounded_and_the_largest_loses_its_oldest_unused() -> None:
    async def run() -> None:
        found = directory(ManualClock(), max_blocks=10)
        await with_worker(found, "small", 1, 2)
        await with_worker(found, "large", *range(100, 108))
        assert await found.holders(hashes(100)) == {"large": 1}  # used: not the oldest any more
        assert await found.publish("small", 1, 1, hashes(3, 4), [])
        assert found.blocks == 10
        assert await found.holders(hashes(1, 2, 3, 4)) == {"small": 4}
        assert await found.holders(hashes(100)) == {"large": 1}
        assert await found.holders(hashes(101)) == {}
        assert await found.holders(hashes(103)) == {"large": 1}
        await found.reset("large", 1, 1, [])
        assert found.blocks == 4

    asyncio.run(run())


def test_silent_peer_is_forgotten_with_its_blocks() -> None:
    async def run() -> None:
        clock = ManualClock()
        found = directory(clock)
        await with_worker(found, "a", 1)
        await with_worker(found, "b", 1)
        clock.advance(9.0)
        await found.announce(hello("b"), "b:1")
        clock.advance(2.0)
        assert await found.holders(hashes(1)) == {"b": 1}
        assert [peer.worker_id for peer, _ in await found.peers()] == ["b"]
        assert found.blocks == 1

    asyncio.run(run())
