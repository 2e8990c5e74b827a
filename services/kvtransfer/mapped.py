"""The two ends of a transport whose receiver copies out of the sender's pool, which it has mapped: its front does, or
its engine where the pool is a GPU's.

Only names of blocks are offered; their checksums come with the offer or with the confirmation. A sender that goes on
while the receiver copies (the call was cancelled, its blocks were used again) can spoil only the copy, and a spoilt
copy is never valid. Such transports differ in where the pool lies and who digests its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from baton.core.api import KvReceiverApi, PrefillRun, WritableBlocks
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, KvChunk, KvFormat, KvHandshake, KvSource, Ticket
from baton.engine.sharedpool import MappedPool
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.door import PoolDoor, Source
from services.kvtransfer.layout import pack
from services.kvtransfer.pool_blocks import in_turns
from services.kvtransfer.transport import (
    Digests,
    EarlyChunk,
    TransportName,
    not_converted,
    require_checksums,
    require_equal,
    require_late_checksums,
)

Digest = Callable[[PrefillRun, FilledBlocks], Coroutine[Any, Any, Digests]]
"""The checksums of blocks of a run."""

Critical = Callable[[FilledBlocks], bytes]
"""A byte for each block, 1 where the receiver is to find both halves of the digest."""

BlockDigest = Callable[[memoryview, int, KvFormat, int], bytes]
"""A block's checksum from its bytes, its ordinal, its format and its filled slots."""

Strong = Callable[[KvChunk], bytes]
"""What ``WritableBlocks.pull_blocks`` takes as ``strong`` for an offered chunk."""


class MappedOutgoing:
    """Satisfies ``Outgoing``. Keeps a connection to each receiver, by which that one knows this worker to be alive."""

    def __init__(
        self, name: TransportName, epoch: int, calls: DoorCalls, critical: Critical, digest: Digest | None
    ) -> None:
        """``epoch``: of this worker's life; ``digest`` None: the policy wants no checksums."""
        self.name = name
        self._epoch = epoch
        self._calls = calls
        self._critical = critical
        self._digest = digest

    def reaches(self, receiver: KvHandshake) -> bool:
        return self._calls.reaches(receiver)

    async def open(self, receiver: KvHandshake) -> None:
        await self._calls.open(receiver)

    def forget(self, receiver: KvHandshake) -> None:
        """The connection stays: it is the receiver that ends it."""

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return self._calls.receiver(hello, usual)

    def is_streamed(self, receiver: KvHandshake) -> bool:
        """The bytes are not in the offer."""
        return False

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        checksums = () if self._digest is None else await self._digest(run, blocks)
        return self._named(ticket, run, blocks, checksums)

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        digest = self._digest
        if digest is None:
            return None
        chunk = self._named(ticket, run, blocks, late=self._critical(blocks))
        return EarlyChunk(chunk, lambda: digest(run, blocks))

    def close(self) -> None:
        """End the connections: receivers unmap the pool."""
        self._calls.close()

    def _named(
        self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks, checksums: Digests = (), late: bytes = b""
    ) -> KvChunk:
        first, count = blocks.first_block, blocks.block_count
        source = KvSource(self._epoch, run.block_ids(first, count), self.name)
        return KvChunk(ticket, first, count, b"", checksums, source, late_checksums=late)


class MappedIncoming:
    """Satisfies ``Incoming``."""

    def __init__(
        self,
        name: TransportName,
        door: PoolDoor,
        layout: KvFormat,
        *,
        verified: bool,
        strong: Strong,
        digest: BlockDigest | None = None,
    ) -> None:
        """``layout``: of this worker. ``verified``: checksums are required, and compared with digests of what was
        stored. ``digest`` computes those of blocks that this front reads itself; None: it cannot read them."""
        self.name = name
        self._door = door
        self._layout = layout
        self._verified = verified
        self._strong = strong
        self._digest = digest

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> Digests | None:
        is_late = bool(chunk.late_checksums)
        origin = self._origin(chunk, require_late_checksums if is_late else require_checksums)
        source = self._door.source(origin.epoch)
        filled = tokens - (chunk.block_count - 1) * self._layout.block_size
        if isinstance(source.pool, MappedPool):
            found = await self._copied(chunk, origin, source, source.pool, reservation, filled)
        else:
            strong = self._strong(chunk)
            found = await reservation.pull_blocks(chunk.first_block, source.pool, origin.blocks, filled, strong)
            self._require_still(source, origin)
        if not self._verified:
            return None
        if is_late:
            return found
        require_equal(found, chunk, when="as stored")
        return None

    async def _copied(
        self,
        chunk: KvChunk,
        origin: KvSource,
        source: Source,
        pool: MappedPool,
        reservation: WritableBlocks,
        filled: int,
    ) -> Digests:
        """In turns. Each time it is asked whether the blocks are still held and the pool is still mapped, and neither
        can end amid a copy."""
        layout = self._layout

        def copy(turn: range) -> Digests:
            self._require_still(source, origin)
            blocks, is_last = origin.blocks[turn.start : turn.stop], turn.stop == chunk.block_count
            slots = filled if is_last else layout.block_size
            return reservation.copy_blocks(chunk.first_block + turn.start, pool.view, blocks, slots)

        return await in_turns(chunk.block_count, layout, copy)

    def _require_still(self, source: Source, origin: KvSource) -> None:
        if self._door.source(origin.epoch) is not source:
            raise TransportUnavailable(f"{self.name}: the sender has called anew meanwhile")

    def read(self, chunk: KvChunk, layout: KvFormat, tokens: int) -> bytes:
        origin = self._origin(chunk, require_checksums)
        pool = self._door.source(origin.epoch).pool
        if self._digest is None or not isinstance(pool, MappedPool):
            raise not_converted(self.name)
        size, held = layout.block_bytes, len(pool.view) // layout.block_bytes
        if not all(block < held for block in origin.blocks):
            raise TransportUnavailable(f"{self.name}: the sender's pool has {held} blocks, others were named")
        # Copied first: so what is verified is what is used, whatever the pool's owner does meanwhile.
        copied = b"".join(pool.view[block * size : (block + 1) * size] for block in origin.blocks)
        slots = [layout.block_size] * (chunk.block_count - 1)
        slots.append(tokens - len(slots) * layout.block_size)
        if self._verified:
            blocks = (memoryview(copied)[at : at + size] for at in range(0, len(copied), size))
            digests = [
                self._digest(block, ordinal, layout, filled)
                for ordinal, (block, filled) in enumerate(zip(blocks, slots, strict=True), chunk.first_block)
            ]
            require_equal(digests, chunk, when="as read")
        return pack(copied, layout, slots[-1])

    def _origin(self, chunk: KvChunk, require: Callable[[KvChunk], None]) -> KvSource:
        """Where the chunk's blocks are, which has to be said, and with the checksums that it is required to have."""
        origin = chunk.source
        if origin is None or chunk.payload or len(origin.blocks) != chunk.block_count:
            raise TransferRejected(f"source: {chunk.block_count} blocks are offered, others are named")
        if self._verified:
            require(chunk)
        return origin

    def abandon(self, ticket: Ticket) -> None:
        """Nothing here waits for the sender."""

    def decline(self, chunk: KvChunk) -> None:
        """Nothing comes by itself."""


@dataclass(frozen=True, slots=True)
class MappedTransport:
    """Both ends of one worker."""

    outgoing: MappedOutgoing
    incoming: MappedIncoming
    door: PoolDoor
