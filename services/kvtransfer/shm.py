"""KV that never travels: the receiver's engine copies blocks out of the sender's pool, which it has mapped.

Only names of blocks and their checksums are offered. The receiver's engine copies block by block and digests each one
as it is stored; the front compares. A sender that goes on while the receiver copies (the call was cancelled, its blocks
were used again) can spoil only the copy, and a spoilt copy is never confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.api import EngineApi, PrefillRun, SharedPool, WritableBlocks
from baton.core.errors import ConfigError, TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, KvChunk, KvFormat, KvHandshake, KvSource, Ticket
from baton.engine.sharedpool import block_digest
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.door import PoolDoor, host_name, open_door
from services.kvtransfer.transport import TransportName, require_checksums, require_equal


class ShmOutgoing:
    """Satisfies ``Outgoing``. Keeps a connection to each receiver, by which that one knows this worker to be alive."""

    name = TransportName.SHM

    def __init__(self, epoch: int, host: str, layout: KvFormat, pool: SharedPool, config: KvTransferConfig) -> None:
        """``epoch``: of this worker's life."""
        self._epoch = epoch
        self._layout = layout
        self._pool = pool
        self._checksums = config.checksum_policy
        self._calls = DoorCalls(epoch, host, pool, config.acknowledge_seconds)

    def reaches(self, receiver: KvHandshake) -> bool:
        return self._calls.reaches(receiver)

    async def open(self, receiver: KvHandshake) -> None:
        await self._calls.open(receiver)

    def forget(self, receiver: KvHandshake) -> None:
        """The connection stays: it is the receiver that ends it."""

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        first, count = blocks.first_block, blocks.block_count
        ids = run.block_ids(first, count)
        checksums: tuple[bytes, ...] = ()
        if self._checksums is not ChecksumPolicy.OFF:
            checksums = tuple(self._digests(ids, blocks))
        return KvChunk(ticket, first, count, b"", checksums, KvSource(self._epoch, ids))

    def close(self) -> None:
        self._calls.close()

    def _digests(self, ids: tuple[int, ...], blocks: FilledBlocks) -> Iterator[bytes]:
        layout = self._layout
        view, size = self._pool.view, layout.block_bytes
        for ordinal, block in enumerate(ids, blocks.first_block):
            filled = min(layout.block_size, blocks.tokens - ordinal * layout.block_size)
            yield block_digest(view[block * size : (block + 1) * size], ordinal, layout, filled)


class ShmIncoming:
    """Satisfies ``Incoming``."""

    name = TransportName.SHM

    def __init__(self, door: PoolDoor, block_size: int, checksums: ChecksumPolicy) -> None:
        self._door = door
        self._block_size = block_size
        self._checksums = checksums

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> None:
        origin = chunk.source
        if origin is None or chunk.payload or len(origin.blocks) != chunk.block_count:
            raise TransferRejected(f"source: {chunk.block_count} blocks are offered, others are named")
        if self._checksums is not ChecksumPolicy.OFF:
            require_checksums(chunk)
        source = self._door.source(origin.epoch)
        filled = tokens - (chunk.block_count - 1) * self._block_size
        digests = await reservation.pull_blocks(chunk.first_block, source.number, origin.blocks, filled)
        if self._door.source(origin.epoch) is not source:
            raise TransportUnavailable("shared memory: the sender has called anew meanwhile")
        if self._checksums is not ChecksumPolicy.OFF:
            require_equal(digests, chunk, when="as stored")

    def abandon(self, ticket: Ticket) -> None:
        """Nothing here waits for the sender."""

    def decline(self, chunk: KvChunk) -> None:
        """Nothing comes by itself."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Both ends of one worker."""

    outgoing: ShmOutgoing
    incoming: ShmIncoming
    door: PoolDoor


@contextmanager
def shared_memory(engine: EngineApi, epoch: int, config: KvTransferConfig) -> Iterator[SharedMemory | None]:
    """The transport for as long as the block lasts; None where the configuration or the system has none.

    ConfigError when the configuration allows nothing else.
    """
    pool, host = engine.pool, host_name()
    if TransportName.SHM not in config.transports:
        yield None
        return
    if pool is None or not host:
        if set(config.transports) == {TransportName.SHM}:
            raise ConfigError(f"kvtransfer.transports: this worker cannot share its pool, got {config.transports}")
        yield None
        return
    layout = engine.card.format
    with open_door(engine) as door:
        incoming = ShmIncoming(door, layout.block_size, config.checksum_policy)
        outgoing = ShmOutgoing(epoch, host, layout, pool, config)
        try:
            yield SharedMemory(outgoing, incoming, door)
        finally:
            outgoing.close()


__all__ = ["SharedMemory", "ShmIncoming", "ShmOutgoing", "host_name", "shared_memory"]
