"""Blocks for tests of the cache tier, and a disk that can be told to fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.types import TierBlock
from services.kvtransfer.block_files import BlockFiles, StoredBlock
from services.kvtransfer.checksum import named_checksum

PATIENCE = 30.0


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, size: int = 64, graph_version: str = "") -> TierBlock:
    payload = bytes((number + i) % 251 for i in range(size))
    return TierBlock(name_of(number), payload, named_checksum(name_of(number), payload), graph_version)


def blocks(*numbers: int, size: int = 64) -> list[TierBlock]:
    return [block(number, size) for number in numbers]


def names(*numbers: int) -> list[bytes]:
    return [name_of(number) for number in numbers]


@dataclass
class FlakyFiles:
    """Real files on a disk that is full while ``full`` is set, and writes nothing while ``goes_on`` is not."""

    directory: Path
    full: bool = False
    writes: list[bytes] = field(default_factory=list)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.files = BlockFiles(self.directory)
        self.goes_on.set()

    def write(self, block: TierBlock) -> None:
        self.writes.append(block.name)
        assert self.goes_on.wait(PATIENCE)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.files.write(block)

    def read(self, name: bytes) -> TierBlock:
        return self.files.read(name)

    def remove(self, names: Iterable[bytes]) -> None:
        self.files.remove(names)

    def scan(self) -> tuple[list[StoredBlock], int]:
        return self.files.scan()

    def read_pins(self) -> frozenset[bytes]:
        return self.files.read_pins()

    def write_pins(self, names: Iterable[bytes]) -> None:
        self.files.write_pins(names)


async def until(holds: Callable[[], object]) -> None:
    """Poll until true; ``holds`` may be a coroutine function."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = holds()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
            await asyncio.sleep(0.002)
