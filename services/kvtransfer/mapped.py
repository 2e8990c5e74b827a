"""The two ends of a transport whose receiver copies out of the sender's pool, which it has mapped.

Only names of blocks and their checksums are offered. A sender that goes on while the receiver copies (the call was
cancelled, its blocks were used again) can spoil only the copy, and a spoilt copy is never confirmed. Such transports
differ in where the pool lies and who digests its blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.core.api import KvReceiverApi, PrefillRun, WritableBlocks
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, KvChunk, KvHandshake, KvSource, Ticket
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.door import PoolDoor
from services.kvtransfer.transport import TransportName, require_checksums, require_equal

Digest = Callable[[PrefillRun, FilledBlocks], Awaitable[tuple[bytes, ...]]]
"""The checksums of blocks of a run, none where the policy wants none."""

Strong = Callable[[KvChunk], bytes]
"""What ``WritableBlocks.pull_blocks`` takes as ``strong`` for an offered chunk."""


class MappedOutgoing:
    """Satisfies ``Outgoing``. Keeps a connection to each receiver, by which that one knows this worker to be alive."""

    def __init__(self, name: TransportName, epoch: int, calls: DoorCalls, digest: Digest) -> None:
        """``epoch``: of this worker's life."""
        self.name = name
        self._epoch = epoch
        self._calls = calls
        self._digest = digest

    def reaches(self, receiver: KvHandshake) -> bool:
        return self._calls.reaches(receiver)

    async def open(self, receiver: KvHandshake) -> None:
        await self._calls.open(receiver)

    def forget(self, receiver: KvHandshake) -> None:
        """The connection stays: it is the receiver that ends it."""

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return self._calls.receiver(hello, usual)

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        first, count = blocks.first_block, blocks.block_count
        checksums = await self._digest(run, blocks)
        source = KvSource(self._epoch, run.block_ids(first, count), self.name)
        return KvChunk(ticket, first, count, b"", checksums, source)

    def close(self) -> None:
        """End the connections: receivers unmap the pool."""
        self._calls.close()


class MappedIncoming:
    """Satisfies ``Incoming``."""

    def __init__(self, name: TransportName, door: PoolDoor, block_size: int, *, verified: bool, strong: Strong) -> None:
        """``verified``: checksums are required, and compared with digests of what was stored."""
        self.name = name
        self._door = door
        self._block_size = block_size
        self._verified = verified
        self._strong = strong

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> None:
        origin = chunk.source
        if origin is None or chunk.payload or len(origin.blocks) != chunk.block_count:
            raise TransferRejected(f"source: {chunk.block_count} blocks are offered, others are named")
        if self._verified:
            require_checksums(chunk)
        source = self._door.source(origin.epoch)
        filled = tokens - (chunk.block_count - 1) * self._block_size
        found = await reservation.pull_blocks(
            chunk.first_block, source.number, origin.blocks, filled, self._strong(chunk)
        )
        if self._door.source(origin.epoch) is not source:
            raise TransportUnavailable(f"{self.name}: the sender has called anew meanwhile")
        if self._verified:
            require_equal(found, chunk, when="as stored")

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
