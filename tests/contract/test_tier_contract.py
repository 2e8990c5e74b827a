"""One suite over every ``TierApi``: in memory, on disk, on both, and each of them over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.core.api import TierApi
from baton.core.clock import SystemClock
from baton.core.errors import CorruptTransfer, InvalidRequest, Overloaded, PeerUnavailable
from baton.rpc.channels import open_channel
from baton.rpc.tier import TierClient, tier_service
from services.kvtransfer.block_files import BlockFiles, file_bytes
from services.kvtransfer.disk import DiskLevel
from services.kvtransfer.tier import Tier
from tests.contract.wire_doubles import PATIENCE, soon, wire
from tests.tier_blocks import block, blocks, names, until

SIZE = 64
PLACES = 8
EPOCH = 7
LEVELS = ("memory", "disk", "both")


@dataclass
class Opened:
    api: TierApi
    tier: Tier
    disk: DiskLevel | None


@asynccontextmanager
async def opened(kind: str, way: str, directory: Path) -> AsyncIterator[Opened]:
    """A tier of ``PLACES`` blocks a level; a message holds four."""
    disk = None
    if kind != "memory":
        disk = DiskLevel(BlockFiles(directory), PLACES * file_bytes(block(1)), SystemClock())
    memory = 0 if kind == "disk" else PLACES * SIZE
    tier = Tier(memory_bytes=memory, disk=disk, message_bytes=4 * SIZE, epoch=EPOCH)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(tier.opened())
        api: TierApi = tier
        if way == "wire":
            _, channel = await stack.enter_async_context(wire(tier_service(tier)))
            api = TierClient(channel, PATIENCE)
        yield Opened(api, tier, disk)


@pytest.fixture(params=[f"{kind} {way}" for kind in LEVELS for way in ("direct", "wire")])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Opened], Awaitable[None]]], None]:
    kind, way = request.param.split()

    def run(scenario: Callable[[Opened], Awaitable[None]]) -> None:
        async def main() -> None:
            async with opened(kind, way, tmp_path) as found:
                await soon(scenario(found))

        asyncio.run(main())

    return run


async def put(found: Opened, *numbers: int) -> None:
    """Put them one by one and wait until the tier has them: a disk is written behind its caller's back."""
    for number in numbers:
        await found.api.put(blocks(number))

        async def has(number: int = number) -> bool:
            return not await found.api.missing(names(number))

        await until(has)


Run = Callable[[Callable[[Opened], Awaitable[None]]], None]


def test_what_was_put_comes_back_in_order_and_whole(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, 1, 2, 3)
        assert await found.api.get(names(2, 1, 3)) == tuple(blocks(2, 1, 3))

    run(scenario)


def test_only_the_leading_ones_count(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, 1, 2, 4)
        assert await found.api.missing(names(1, 3, 4, 5)) == tuple(names(3, 5))
        assert await found.api.get(names(1, 2, 3, 4)) == tuple(blocks(1, 2))
        assert (found.tier.stats.hits, found.tier.stats.misses) == (2, 2)
        assert await found.api.get(names(9)) == ()
        assert (found.tier.stats.hits, found.tier.stats.misses) == (2, 3)

    run(scenario)


def test_changes_add_up_to_what_is_held(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, 1, 2)
        first = await found.api.changes(0, 0)
        assert first.epoch == EPOCH and first.is_all and set(first.added) == set(names(1, 2))
        await put(found, *range(11, 11 + 2 * PLACES))
        newest = names(10 + 2 * PLACES)[0]
        await until(lambda: found.disk is None or newest in found.disk)  # written in order: nothing changes after it
        assert names(1)[0] not in found.tier
        then = await found.api.changes(first.epoch, first.version)
        held = (set(first.added) - set(then.removed)) | set(then.added)
        assert held == {name for name in names(*range(40)) if name in found.tier} and not then.is_all
        last = await found.api.changes(then.epoch, then.version)
        assert (last.version, last.is_all, last.added, last.removed) == (then.version, False, (), ())
        assert (await found.api.changes(EPOCH + 1, then.version)).is_all

    run(scenario)


def test_an_answer_fits_a_message(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, 1, 2, 3, 4, 5, 6)
        assert len(await found.api.get(names(1, 2, 3, 4, 5, 6))) == 4

    run(scenario)


def test_a_block_larger_than_a_message_comes_alone(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        large = block(1, 5 * SIZE)
        await found.api.put([large])
        await until(lambda: large.name in found.tier)
        assert await found.api.get([large.name, *names(2)]) == (large,)

    run(scenario)


def test_the_least_used_leaves_first(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, *range(1, PLACES + 1))
        await found.api.get(names(1, 2, 3, 4))
        await put(found, 11, 12, 13, 14)
        await until(lambda: found.tier.stats.disk_blocks in (0, PLACES))
        assert await found.api.missing(names(1, 2, 3, 4)) == ()
        assert len(await found.api.missing(names(5, 6, 7, 8))) in (4, 0)  # both levels together hold more

    run(scenario)


def test_a_prefix_loses_its_tail_before_its_head(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await found.api.put(blocks(1, 2, 3, 4))
        await until(lambda: all(name in found.tier for name in names(1, 2, 3, 4)))
        await put(found, *range(11, 17))  # two places too few on each level
        held = [number for number in (1, 2, 3, 4) if not await found.api.missing(names(number))]
        assert held == list(range(1, len(held) + 1))

    run(scenario)


def test_pinned_blocks_are_never_evicted(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, 1, 2)
        assert await found.api.pin(names(1, 2, 3)) == 2
        await put(found, *range(11, 11 + 2 * PLACES))
        assert await found.api.missing(names(1, 2)) == ()
        assert found.tier.stats.pinned_blocks == 2
        await found.api.unpin(names(1, 2))
        await put(found, *range(41, 41 + 2 * PLACES))

        async def evicted() -> bool:
            return await found.api.missing(names(1, 2)) == tuple(names(1, 2))

        await until(evicted)

    run(scenario)


def test_no_more_than_a_share_may_be_pinned(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, *range(1, PLACES + 1))
        with pytest.raises(Overloaded, match="pinned"):
            await found.api.pin(names(*range(1, PLACES + 1)))
        assert found.tier.stats.pinned_blocks == 0

    run(scenario)


def test_a_version_of_the_graph_is_dropped_and_the_rest_stays(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        await put(found, 1)
        for number, version in ((2, "v1"), (3, "v2")):
            await found.api.put([block(number, graph_version=version)])
        await until(lambda: names(2)[0] in found.tier and names(3)[0] in found.tier)
        assert await found.api.invalidate("v1") == 1
        assert await found.api.missing(names(1, 2, 3)) == tuple(names(2))
        assert (await found.api.get(names(3)))[0].graph_version == "v2"
        with pytest.raises(InvalidRequest):
            await found.api.invalidate("")

    run(scenario)


def test_a_block_that_does_not_match_its_checksum_or_name_is_refused(run: Run) -> None:
    async def scenario(found: Opened) -> None:
        one = block(1)
        spoiled = replace(one, payload=b"\x00" + one.payload[1:-1] + b"\x01")
        for bad in (spoiled, replace(one, checksum=bytes(16)), replace(one, name=names(2)[0])):
            with pytest.raises(CorruptTransfer):
                await found.api.put([bad])
        with pytest.raises(InvalidRequest):
            await found.api.put([replace(one, name=b"short")])
        assert await found.api.missing(names(1, 2)) == tuple(names(1, 2))

    run(scenario)


def test_a_tier_that_is_gone_is_a_lost_peer() -> None:
    async def main() -> None:
        channel = open_channel("127.0.0.1:9")
        try:
            with pytest.raises(PeerUnavailable):
                await TierClient(channel, PATIENCE).missing(names(1))
        finally:
            await channel.close()

    asyncio.run(main())


def test_bytes_that_rot_in_memory_are_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened("memory", "direct", tmp_path) as found:
            await put(found, 1, 2)
            found.tier._blocks[names(1)[0]] = replace(block(1), payload=bytes(SIZE))
            assert await found.api.get(names(1, 2)) == ()
            assert found.tier.stats.corrupt == 1
            assert await found.api.missing(names(1, 2)) == tuple(names(1))

    asyncio.run(main())


def test_pins_and_blocks_outlive_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened("both", "direct", tmp_path) as found:
            await put(found, 1, 2, 3)
            await found.api.pin(names(1))
            await until(lambda: found.tier.stats.disk_blocks == 3 and len(list(tmp_path.glob("*/*.kv"))) == 3)
        async with opened("both", "direct", tmp_path) as found:
            stats = found.tier.stats
            assert (stats.disk_blocks, stats.memory_blocks, stats.pinned_blocks) == (3, 0, 1)
            assert await found.api.get(names(1, 2, 3)) == tuple(blocks(1, 2, 3))
            assert found.tier.stats.memory_blocks == 3

    asyncio.run(main())
