"""KV between GPUs of one host, or inside one: the receiver's GPU copies out of the sender's mapped pool.

As with ``shm`` only names of blocks and their checksums are offered. The receiver digests what it has read in the pass
that stores it, the sender its source by a kernel of its own. Engines copy beside their steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.api import EngineApi, PrefillRun, WritableBlocks
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import DevicePool, FilledBlocks, KvChunk, KvHandshake, KvSource, Ticket
from baton.engine.digest import are_strong
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.critical import critical_blocks, filled_slots_of
from services.kvtransfer.door import PoolDoor, host_name, open_door
from services.kvtransfer.transport import TransportName, require_checksums, require_equal


class CudaIpcOutgoing:
    """Satisfies ``Outgoing``. Keeps a connection to each receiver, by which that one knows this worker to be alive."""

    name = TransportName.CUDA_IPC

    def __init__(self, epoch: int, host: str, block_size: int, pool: DevicePool, config: KvTransferConfig) -> None:
        """``epoch``: of this worker's life."""
        self._epoch = epoch
        self._block_size = block_size
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
        checksums: tuple[bytes, ...] = ()
        if self._checksums is not ChecksumPolicy.OFF:
            strong = critical_blocks(blocks, self._block_size)
            checksums = await run.digest_blocks(first, filled_slots_of(blocks, self._block_size), strong)
        source = KvSource(self._epoch, run.block_ids(first, count), self.name)
        return KvChunk(ticket, first, count, b"", checksums, source)

    def close(self) -> None:
        self._calls.close()


class CudaIpcIncoming:
    """Satisfies ``Incoming``."""

    name = TransportName.CUDA_IPC

    def __init__(self, door: PoolDoor, block_size: int, checksums: ChecksumPolicy) -> None:
        self._door = door
        self._block_size = block_size
        self._checksums = checksums

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> None:
        origin = chunk.source
        if origin is None or chunk.payload or len(origin.blocks) != chunk.block_count:
            raise TransferRejected(f"source: {chunk.block_count} blocks are offered, others are named")
        strong = bytes(chunk.block_count)
        if self._checksums is not ChecksumPolicy.OFF:
            require_checksums(chunk)
            strong = are_strong(chunk.checksums)
        source = self._door.source(origin.epoch)
        filled = tokens - (chunk.block_count - 1) * self._block_size
        found = await reservation.pull_blocks(chunk.first_block, source.number, origin.blocks, filled, strong)
        if self._door.source(origin.epoch) is not source:
            raise TransportUnavailable("cuda-ipc: the sender has called anew meanwhile")
        if self._checksums is not ChecksumPolicy.OFF:
            require_equal(found, chunk, when="as copied")

    def abandon(self, ticket: Ticket) -> None:
        """Nothing here waits for the sender."""

    def decline(self, chunk: KvChunk) -> None:
        """Nothing comes by itself."""


@dataclass(frozen=True, slots=True)
class CudaIpc:
    """Both ends of one worker."""

    outgoing: CudaIpcOutgoing
    incoming: CudaIpcIncoming
    door: PoolDoor


@contextmanager
def cuda_ipc(engine: EngineApi, epoch: int, config: KvTransferConfig) -> Iterator[CudaIpc | None]:
    """The transport for as long as the block lasts; None where the configuration, the GPU or the system has none."""
    pool, host = engine.device_pool, host_name()
    if TransportName.CUDA_IPC not in config.transports or pool is None or not host:
        yield None
        return
    block_size = engine.card.format.block_size
    with open_door(engine) as door:
        outgoing = CudaIpcOutgoing(epoch, host, block_size, pool, config)
        try:
            yield CudaIpc(outgoing, CudaIpcIncoming(door, block_size, config.checksum_policy), door)
        finally:
            outgoing.close()
