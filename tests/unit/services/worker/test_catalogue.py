"""What a worker tells the directory: everything once, then the changes, and everything again after any doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from baton.core.clock import ManualClock
from baton.core.errors import PeerUnavailable
from baton.core.types import KvFormat, KvHandshake, ProcessRecord, Role, WorkerState
from baton.state.registry import MemoryRegistry
from services.kvtransfer.directory import Directory
from services.worker.catalogue import Catalogue

ME = KvHandshake("d", 5, "m", "h", KvFormat("fake", 16, 1, 1, 8))


class Cache:
    """A prefix cache that a test fills."""

    def __init__(self) -> None:
        self.version = 0
        self.names: frozenset[bytes] = frozenset()

    def hold(self, *numbers: int) -> None:
        self.version += 1
        self.names = frozenset(n.to_bytes(16, "big") for n in numbers)

    def cached_blocks(self) -> tuple[int, frozenset[bytes]]:
        return self.version, self.names


class Recorded(Directory):
    def __init__(self) -> None:
        super().__init__(ManualClock(), max_blocks=1000, peer_lease_seconds=10)
        self.calls: list[tuple[str, int]] = []
        self.away = False

    async def announce(self, peer: KvHandshake, address: str) -> None:
        if self.away:
            raise PeerUnavailable("gone")
        await super().announce(peer, address)

    async def publish(
        self, worker_id: str, epoch: int, sequence: int, added: Sequence[bytes], removed: Sequence[bytes]
    ) -> bool:
        self.calls.append(("publish", len(added) + len(removed)))
        return await super().publish(worker_id, epoch, sequence, added, removed)

    async def reset(self, worker_id: str, epoch: int, sequence: int, held: Sequence[bytes]) -> None:
        self.calls.append(("reset", len(held)))
        await super().reset(worker_id, epoch, sequence, held)

    async def held(self, *numbers: int) -> int:
        return (await self.holders([n.to_bytes(16, "big") for n in numbers])).get("d", 0)


class World:
    def __init__(self) -> None:
        self.cache = Cache()
        self.registry = MemoryRegistry(ManualClock())
        self.directories = {"k:1": Recorded()}
        self.catalogue = Catalogue(self.cache, self.registry, lambda at: self.directories[at], ME, "d:1")

    async def serve(self, address: str = "k:1", epoch: int = 1) -> Recorded:
        record = ProcessRecord("k", Role.KVTRANSFER, address, epoch, pid=1, state=WorkerState.READY)
        await self.registry.register(record, ttl=100)
        return self.directories.setdefault(address, Recorded())


def test_everything_first_then_only_changes() -> None:
    async def run() -> None:
        world = World()
        directory = await world.serve()
        world.cache.hold(1, 2, 3)
        await world.catalogue.publish()
        await world.catalogue.publish()  # nothing new
        world.cache.hold(2, 3, 4)
        await world.catalogue.publish()
        assert directory.calls == [("reset", 3), ("publish", 2)]
        assert await directory.held(2, 3, 4) == 3
        assert await directory.held(1) == 0

    asyncio.run(run())


def test_directory_that_forgot_gets_everything_again() -> None:
    async def run() -> None:
        world = World()
        await world.serve()
        world.cache.hold(1)
        await world.catalogue.publish()
        world.directories["k:1"] = Recorded()  # restarted at the same address
        world.cache.hold(1, 2)
        await world.catalogue.publish()
        assert world.directories["k:1"].calls == [("publish", 1), ("reset", 2)]
        moved = await world.serve("k:2")
        await world.catalogue.publish()
        assert moved.calls == [("reset", 2)]
        world.cache.hold(1, 2, 3)
        await world.catalogue.publish()
        assert moved.calls == [("reset", 2), ("publish", 1)]

    asyncio.run(run())


def test_restarted_directory_gets_everything_even_if_nothing_changed() -> None:
    async def run() -> None:
        world = World()
        await world.serve()
        world.cache.hold(1)
        await world.catalogue.publish()
        world.directories["k:1"] = Recorded()
        await world.serve(epoch=2)
        await world.catalogue.publish()
        assert world.directories["k:1"].calls == [("reset", 1)]

    asyncio.run(run())


def test_without_a_directory_nothing_happens() -> None:
    async def run() -> None:
        world = World()
        await world.catalogue.publish()
        assert world.directories["k:1"].calls == []

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


def test_goes_on_after_a_failure_with_everything() -> None:
    async def run() -> None:
        world = World()
        directory = await world.serve()
        world.cache.hold(1)
        task = asyncio.create_task(world.catalogue.run(ManualClock(), interval=1.0))
        await until(lambda: directory.calls == [("reset", 1)])
        directory.away = True
        for _ in range(20):
            await asyncio.sleep(0)
        directory.away = False
        await until(lambda: directory.calls == [("reset", 1), ("reset", 1)])
        task.cancel()

    asyncio.run(run())
