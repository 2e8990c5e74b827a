"""The tier's disk: bounded, behind the caller's back, and never a reason for anything to fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.core.background import background
from baton.core.clock import ManualClock
from services.kvtransfer.block_files import file_bytes
from services.kvtransfer.disk import REST_SECONDS, DiskLevel
from tests.tier_blocks import FlakyFiles, block, blocks, name_of, names, until

SIZE = file_bytes(block(1))


class _Clock(ManualClock):
    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here waits for time")


@asynccontextmanager
async def opened(files: FlakyFiles, clock: ManualClock, most: int = 4) -> AsyncIterator[DiskLevel]:
    disk = DiskLevel(files, most * SIZE, clock)
    await disk.open()
    async with background(disk.run(), "writer"):
        yield disk


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        files, clock = FlakyFiles(tmp_path), _Clock()
        async with opened(files, clock) as disk:
            for one in blocks(1, 2, 3):
                disk.offer(one)
            await until(lambda: len(files.writes) == 3 and (tmp_path / name_of(3).hex()[:2]).exists())
            await until(lambda: len(list(tmp_path.glob("*/*.kv"))) == 3)
        async with opened(files, clock) as disk:
            assert len(disk) == 3 and disk.bytes == 3 * SIZE
            assert await disk.read(name_of(2)) == block(2)

    asyncio.run(main())


def test_a_smaller_disk_after_a_restart_keeps_the_newest(tmp_path: Path) -> None:
    async def main() -> None:
        files, clock = FlakyFiles(tmp_path), _Clock()
        async with opened(files, clock) as disk:
            for one in blocks(1, 2, 3):
                disk.offer(one)
            await until(lambda: len(list(tmp_path.glob("*/*.kv"))) == 3)
        async with opened(files, clock, most=1) as disk:
            assert [number for number in (1, 2, 3) if name_of(number) in disk] == [3]
            assert len(list(tmp_path.glob("*/*.kv"))) == 1

    asyncio.run(main())


def test_the_directory_never_holds_more_than_it_may(tmp_path: Path) -> None:
    async def main() -> None:
        files = FlakyFiles(tmp_path)
        async with opened(files, _Clock(), most=2) as disk:
            for one in blocks(1, 2, 3, 4, 5):
                disk.offer(one)
                await until(lambda one=one: one.name in disk)
            await until(lambda: sum(path.stat().st_size for path in tmp_path.glob("*/*.kv")) == 2 * SIZE)
            assert disk.bytes == 2 * SIZE

    asyncio.run(main())


def test_a_full_disk_stops_the_writing_with_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        files, clock = FlakyFiles(tmp_path, full=True), ManualClock()
        async with opened(files, clock) as disk:
            for one in blocks(1, 2, 3):
                disk.offer(one)
            await until(lambda: disk.dropped == 3)
            disk.offer(block(4))
            assert (disk.dropped, disk.errors, len(files.writes), disk.is_writable) == (4, 1, 1, False)
            assert len(disk) == 0 and list(tmp_path.glob("*/*")) == []
            clock.advance(REST_SECONDS)
            disk.offer(block(5))
            await until(lambda: disk.errors == 2)
            files.full = False
            clock.advance(REST_SECONDS)
            disk.offer(block(6))
            await until(lambda: disk.is_writable)
            assert await disk.read(name_of(6)) == block(6)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert len(caplog.records) == 1


def test_a_corrupt_block_is_dropped_and_counted_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(FlakyFiles(tmp_path), _Clock()) as disk:
            disk.offer(block(1))
            await until(lambda: len(list(tmp_path.glob("*/*.kv"))) == 1)
            (path,) = tmp_path.glob("*/*.kv")
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
            assert await disk.read(name_of(1)) is None
            assert (disk.corrupt, len(disk), path.exists()) == (1, 0, False)
            assert await disk.read(name_of(1)) is None
            assert disk.corrupt == 1

    asyncio.run(main())


def test_a_block_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        files = FlakyFiles(tmp_path)
        async with opened(files, _Clock()) as disk:
            files.goes_on.clear()
            disk.offer(block(1))
            await until(lambda: files.writes == names(1))
            try:
                assert name_of(1) in disk
                assert await disk.read(name_of(1)) == block(1)
            finally:
                files.goes_on.set()
            await until(lambda: len(list(tmp_path.glob("*/*.kv"))) == 1)
            assert await disk.read(name_of(1)) == block(1)

    asyncio.run(main())


def test_a_block_dropped_while_it_waits_is_not_written(tmp_path: Path) -> None:
    async def main() -> None:
        files = FlakyFiles(tmp_path)
        disk = DiskLevel(files, 4 * SIZE, _Clock())
        await disk.open()
        disk.offer(block(1, graph_version="v"))
        disk.offer(block(2))
        assert disk.of_version("v") == {name_of(1)}
        await disk.remove(names(1))
        async with background(disk.run(), "writer"):
            await until(lambda: len(list(tmp_path.glob("*/*.kv"))) == 1)
        assert files.writes == names(2)

    asyncio.run(main())
