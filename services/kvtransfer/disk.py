"""The tier's lower level: blocks on disk, written behind the caller's back, read when memory has them no more."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

from baton.core.clock import Clock
from baton.core.errors import CorruptTransfer
from baton.core.types import TierBlock
from services.kvtransfer.block_files import StoredBlock, file_bytes
from services.kvtransfer.shelf import Shelf

log = logging.getLogger(__name__)

QUEUE_BYTES = 128 << 20  # blocks that wait to be written; more are not kept
WRITE_BYTES = 4 << 20  # written in one turn
REST_SECONDS = 30.0  # after a failed write, until the disk is tried again


class Files(Protocol):
    """What a disk does for the tier; ``BlockFiles`` is the real one."""

    def write(self, block: TierBlock) -> None: ...

    def read(self, name: bytes) -> TierBlock: ...

    def remove(self, names: Iterable[bytes]) -> None: ...

    def scan(self) -> tuple[list[StoredBlock], int]: ...

    def read_pins(self) -> frozenset[bytes]: ...

    def write_pins(self, names: Iterable[bytes]) -> None: ...


class DiskLevel:
    """Bounded; survives its process. ``run`` has to go on beside its users.

    A disk that refuses a write is left alone for a while: one log line, and what was to be written is dropped.
    """

    def __init__(self, files: Files, max_bytes: int, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._shelf = Shelf(max_bytes)
        self._versions: dict[bytes, str] = {}
        self._queue: OrderedDict[bytes, TierBlock] = OrderedDict()
        self._queued_bytes = 0
        self._writing: dict[bytes, TierBlock] = {}  # counted in already, their files not yet there
        self._news = asyncio.Event()
        self._resting_until = float("-inf")
        self._failing = False
        self.corrupt = 0
        self.errors = 0
        self.dropped = 0  # blocks that were not written: the disk is too slow, full or broken

    def __len__(self) -> int:
        return len(self._shelf)

    def __contains__(self, name: bytes) -> bool:
        return name in self._shelf

    @property
    def bytes(self) -> int:
        return self._shelf.bytes

    @property
    def max_bytes(self) -> int:
        return self._shelf.max_bytes

    @property
    def is_writable(self) -> bool:
        return not self._failing

    def watch(self, entered: Callable[[bytes], None], left: Callable[[bytes], None]) -> None:
        """See ``Shelf.watch``."""
        self._shelf.watch(entered, left)

    async def open(self) -> frozenset[bytes]:
        """Find what an earlier process has left; returns the names that it had pinned."""
        found, self.corrupt = await asyncio.to_thread(self._files.scan)
        surplus: list[bytes] = []
        for block in found:
            surplus += self._enter(block)
        await asyncio.to_thread(self._files.remove, surplus)
        pins = frozenset(name for name in await asyncio.to_thread(self._files.read_pins) if name in self._shelf)
        self.pin(pins)
        return pins

    def offer(self, block: TierBlock) -> None:
        """Have the block written some time soon, unless too many wait already."""
        if block.name in self._shelf or block.name in self._queue:
            return
        if self._queued_bytes + len(block.payload) > QUEUE_BYTES or self._clock.now() < self._resting_until:
            self.dropped += 1
            return
        self._queue[block.name] = block
        self._queued_bytes += len(block.payload)
        self._news.set()

    async def run(self) -> NoReturn:
        """Write what is offered, in the order of its coming."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._queue:
                blocks = self._take()
                self._writing = {block.name: block for block in blocks}
                try:
                    await self._write(blocks)
                finally:
                    self._writing = {}

    async def read(self, name: bytes) -> TierBlock | None:
        """The verified block; None, and it is forgotten, when it cannot be read or is not what was written."""
        if name in self._writing:
            return self._writing[name]
        try:
            return await asyncio.to_thread(self._files.read, name)
        except CorruptTransfer as error:
            self.corrupt += 1
            log.warning("block on disk is corrupt and dropped", extra={"error": error.message})
        except FileNotFoundError:
            pass  # evicted meanwhile
        except OSError as error:
            self.errors += 1
            log.warning("block on disk cannot be read and is dropped", extra={"error": str(error)})
        await self.remove([name])
        return None

    def size(self, name: bytes) -> int:
        """Bytes of a block that is here, else 0."""
        return self._shelf.size(name)

    def use(self, names: Iterable[bytes]) -> None:
        self._shelf.use(names)

    async def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._shelf.remove(name)
            self._versions.pop(name, None)
            waiting = self._queue.pop(name, None)
            self._queued_bytes -= 0 if waiting is None else len(waiting.payload)
        await asyncio.to_thread(self._files.remove, names)

    def of_version(self, graph_version: str) -> frozenset[bytes]:
        """The blocks with this tag, those that wait to be written included."""
        waiting = {name for name, block in self._queue.items() if block.graph_version == graph_version}
        return frozenset(waiting | {name for name, tag in self._versions.items() if tag == graph_version})

    def pin(self, names: Iterable[bytes]) -> None:
        self._shelf.pin(names)

    def unpin(self, names: Iterable[bytes]) -> None:
        self._shelf.unpin(names)

    async def keep_pins(self, names: frozenset[bytes]) -> None:
        """Remember them beyond this process, if the disk lets us."""
        try:
            await asyncio.to_thread(self._files.write_pins, names)
        except OSError as error:
            self._on_failure(error)

    def _enter(self, block: StoredBlock) -> list[bytes]:
        """Count a file in; returns whose files have to go, itself where it does not fit."""
        evicted = self._shelf.add(block.name, block.size)
        if evicted is None:
            return [block.name]
        self._versions[block.name] = block.graph_version
        for name in evicted:
            self._versions.pop(name, None)
        return evicted

    def _take(self) -> list[TierBlock]:
        """Who is written next: together, for every turn of a thread costs the process two changes of context."""
        taken: list[TierBlock] = []
        size = 0
        while self._queue and size < WRITE_BYTES:
            _, block = self._queue.popitem(last=False)
            size += len(block.payload)
            taken.append(block)
        self._queued_bytes -= size
        return taken

    async def _write(self, blocks: Sequence[TierBlock]) -> None:
        if self._clock.now() < self._resting_until:
            self.dropped += len(blocks)
            return
        evicted: list[bytes] = []
        for block in blocks:
            evicted += self._enter(StoredBlock(block.name, file_bytes(block), block.graph_version))
        kept = [block for block in blocks if block.name in self._shelf]
        self.dropped += len(blocks) - len(kept)
        written, error = await asyncio.to_thread(self._exchange, evicted, kept)
        if error is not None:
            for block in kept[written:]:
                self._shelf.remove(block.name)
                self._versions.pop(block.name, None)
            self.dropped += len(kept) - written
            self._on_failure(error)
            return
        gone = [block.name for block in kept if block.name not in self._shelf]  # dropped while they were written
        if gone:
            await asyncio.to_thread(self._files.remove, gone)
        if kept and self._failing:
            self._failing = False
            log.info("disk of the cache tier can be written again")

    def _exchange(self, evicted: Sequence[bytes], blocks: Sequence[TierBlock]) -> tuple[int, OSError | None]:
        """How many of ``blocks`` were written in the place of ``evicted``, and what stopped it. Runs in a thread."""
        self._files.remove(evicted)
        for index, block in enumerate(blocks):
            try:
                self._files.write(block)
            except OSError as error:
                return index, error
        return len(blocks), None

    def _on_failure(self, error: OSError) -> None:
        self.errors += 1
        self._resting_until = self._clock.now() + REST_SECONDS
        if not self._failing:
            log.error("disk of the cache tier cannot be written; memory goes on alone", extra={"error": str(error)})
        self._failing = True
