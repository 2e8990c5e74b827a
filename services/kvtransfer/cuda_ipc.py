"""KV between GPUs of one host, or inside one: the receiver's GPU copies out of the sender's mapped pool.

The receiver digests what it has read in the pass that stores it, the sender its source by a kernel of its own. Engines
copy beside their steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from baton.core.api import EngineApi, PrefillRun
from baton.core.types import FilledBlocks, KvChunk
from baton.engine.digest import are_strong
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.critical import critical_blocks
from services.kvtransfer.door import host_name, open_door
from services.kvtransfer.mapped import MappedIncoming, MappedOutgoing, MappedTransport
from services.kvtransfer.transport import TransportName


@contextmanager
def cuda_ipc(engine: EngineApi, epoch: int, config: KvTransferConfig) -> Iterator[MappedTransport | None]:
    """The transport for as long as the block lasts; None where the configuration, the GPU or the system has none."""
    name, pool, host = TransportName.CUDA_IPC, engine.device_pool, host_name()
    if name not in config.transports or pool is None or not host:
        yield None
        return
    size, verified = engine.card.format.block_size, config.checksum_policy is not ChecksumPolicy.OFF

    def critical(blocks: FilledBlocks) -> bytes:
        return critical_blocks(blocks, size)

    async def digest(run: PrefillRun, blocks: FilledBlocks) -> tuple[bytes, ...]:
        return await run.digest_blocks(blocks.first_block, blocks.filled_slots(size), critical(blocks))

    def strong(chunk: KvChunk) -> bytes:
        if not verified:
            return bytes(chunk.block_count)
        return bytes(map(bool, chunk.late_checksums)) or are_strong(chunk.checksums)

    calls = DoorCalls(epoch, host, pool, config.acknowledge_seconds)
    checksums = digest if verified else None
    with open_door(engine) as door, closing(MappedOutgoing(name, epoch, calls, critical, checksums)) as outgoing:
        incoming = MappedIncoming(name, door, engine.card.format, verified=verified, strong=strong)
        yield MappedTransport(outgoing, incoming, door)
