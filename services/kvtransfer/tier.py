"""The pools' shared cache: KV blocks by name in host memory, and below it on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from baton.core.background import background
from baton.core.blockhash import HASH_BYTES
from baton.core.errors import CorruptTransfer, InvalidRequest, Overloaded
from baton.core.types import TierBlock, TierChanges, TierStats
from services.kvtransfer.checksum import verify_named
from services.kvtransfer.disk import DiskLevel
from services.kvtransfer.ledger import Ledger
from services.kvtransfer.shelf import Shelf


class Tier:
    """Implements ``TierApi``. A name says all that decides a block's bytes (tenant salt, weights, format, tokens), so
    whoever can name a block may have it, and nobody else can.

    Everything put goes to memory and is written to disk behind the caller's back; what is read from disk comes up to
    memory again. Bytes are verified when they come in and whenever they go out.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        disk: DiskLevel | None,
        message_bytes: int,
        pinned_share: float = 0.5,
        epoch: int = 0,
    ) -> None:
        """``message_bytes`` bounds what one ``get`` returns, but for the first block. ``pinned_share`` is the part of
        the memory (or, without any, of the disk) that may be pinned. ``epoch``: of this life of the tier."""
        self._ledger = Ledger(epoch)
        self._shelf = Shelf(memory_bytes)
        for level in (self._shelf, *([] if disk is None else [disk])):
            level.watch(self._ledger.entered, self._ledger.left)
        self._blocks: dict[bytes, TierBlock] = {}
        self._disk = disk
        self._message_bytes = message_bytes
        self._pinned_share = pinned_share
        self._pins: frozenset[bytes] = frozenset()
        self._hits = self._misses = self._corrupt = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """What an earlier process has left is found, and writing goes on while the block lasts."""
        if self._disk is None:
            yield
            return
        self._pins = await self._disk.open()
        self._shelf.pin(self._pins)
        async with background(self._disk.run(), "cache tier writer"):
            yield

    @property
    def stats(self) -> TierStats:
        disk = self._disk
        return TierStats(
            memory_blocks=len(self._shelf),
            memory_bytes=self._shelf.bytes,
            disk_blocks=0 if disk is None else len(disk),
            disk_bytes=0 if disk is None else disk.bytes,
            pinned_blocks=len(self._pins),
            hits=self._hits,
            misses=self._misses,
            corrupt=self._corrupt + (0 if disk is None else disk.corrupt),
            disk_errors=0 if disk is None else disk.errors,
        )

    async def changes(self, epoch: int, version: int) -> TierChanges:
        return self._ledger.since(epoch, version)

    async def missing(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(name for name in names if name not in self)

    async def put(self, blocks: Sequence[TierBlock]) -> None:
        for block in blocks:
            if len(block.name) != HASH_BYTES:
                raise InvalidRequest(f"name: must have {HASH_BYTES} bytes, got {len(block.name)}", field="name")
            verify_named(block.name, block.payload, block.checksum, when="as received")
        for block in reversed(blocks):  # the head of a prefix counts as used after its tail: without it that is useless
            if block.name in self:
                continue
            self._remember(block)
            if self._disk is not None:
                self._disk.offer(block)

    async def get(self, names: Sequence[bytes]) -> tuple[TierBlock, ...]:
        found: list[TierBlock] = []
        size = 0
        for name in names:
            block = await self._read(name)
            if block is None:
                self._misses += len(names) - len(found)
                break
            if found and size + len(block.payload) > self._message_bytes:
                break
            found.append(block)
            size += len(block.payload)
        self._hits += len(found)
        used = [block.name for block in reversed(found)]
        self._shelf.use(used)
        if self._disk is not None:
            self._disk.use(used)
        return tuple(found)

    async def pin(self, names: Sequence[bytes]) -> int:
        held = frozenset(name for name in names if name in self)
        pinned = sum(self._size(name) for name in self._pins | held)
        limit = self._pinned_share * self._capacity()
        if pinned > limit:
            raise Overloaded(f"names: pinned blocks may take {limit:.0f} bytes, with these they would take {pinned}")
        await self._keep_pins(self._pins | held)
        return len(held)

    async def unpin(self, names: Sequence[bytes]) -> None:
        await self._keep_pins(self._pins - frozenset(names))

    async def invalidate(self, graph_version: str) -> int:
        if not graph_version:
            raise InvalidRequest("graph_version: missing", field="graph_version")
        gone = {name for name, block in self._blocks.items() if block.graph_version == graph_version}
        if self._disk is not None:
            gone |= self._disk.of_version(graph_version)
        await self._drop(tuple(gone))
        return len(gone)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks or (self._disk is not None and name in self._disk)

    async def _read(self, name: bytes) -> TierBlock | None:
        block = self._blocks.get(name)
        if block is not None:
            try:
                verify_named(name, block.payload, block.checksum, when="as kept in memory")
                return block
            except CorruptTransfer:
                self._corrupt += 1
                self._forget(name)
        if self._disk is None or name not in self._disk:
            return None
        block = await self._disk.read(name)
        if block is not None and name not in self._blocks:
            self._remember(block)
        return block

    def _remember(self, block: TierBlock) -> None:
        evicted = self._shelf.add(block.name, len(block.payload))
        if evicted is None:
            return
        self._blocks[block.name] = block
        for name in evicted:
            del self._blocks[name]

    def _forget(self, name: bytes) -> None:
        self._shelf.remove(name)
        self._blocks.pop(name, None)

    async def _drop(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._forget(name)
        if self._disk is not None:
            await self._disk.remove(names)
        if self._pins & frozenset(names):
            await self._keep_pins(self._pins - frozenset(names))

    async def _keep_pins(self, pins: frozenset[bytes]) -> None:
        levels: list[Shelf | DiskLevel] = [self._shelf]
        if self._disk is not None:
            levels.append(self._disk)
        before, self._pins = self._pins, pins
        for level in levels:
            level.pin(pins - before)
            level.unpin(before - pins)
        if self._disk is not None and pins != before:
            await self._disk.keep_pins(pins)

    def _size(self, name: bytes) -> int:
        on_disk = 0 if self._disk is None else self._disk.size(name)
        return max(self._shelf.size(name), on_disk)

    def _capacity(self) -> int:
        if self._shelf.max_bytes or self._disk is None:
            return self._shelf.max_bytes
        return self._disk.max_bytes
