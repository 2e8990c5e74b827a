"""KV that never travels: the receiver's engine copies blocks out of the sender's pool in memory that both map.

It copies block by block and digests each one as it is stored; the sender's front digests them in its own mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from baton.core.api import EngineApi, PrefillRun, SharedPool
from baton.core.errors import ConfigError
from baton.core.types import FilledBlocks, KvFormat
from baton.engine.sharedpool import block_digest
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.door import host_name, open_door
from services.kvtransfer.mapped import MappedIncoming, MappedOutgoing, MappedTransport
from services.kvtransfer.transport import TransportName


@contextmanager
def shared_memory(engine: EngineApi, epoch: int, config: KvTransferConfig) -> Iterator[MappedTransport | None]:
    """The transport for as long as the block lasts; None where the configuration or the system has none.

    ConfigError when the configuration allows nothing else.
    """
    name, pool, host = TransportName.SHM, engine.pool, host_name()
    if name not in config.transports:
        yield None
        return
    if pool is None or not host:
        if set(config.transports) == {name}:
            raise ConfigError(f"kvtransfer.transports: this worker cannot share its pool, got {config.transports}")
        yield None
        return
    layout, verified = engine.card.format, config.checksum_policy is not ChecksumPolicy.OFF

    async def digest(run: PrefillRun, blocks: FilledBlocks) -> tuple[bytes, ...]:
        return tuple(_digests(pool, layout, run, blocks)) if verified else ()

    calls = DoorCalls(epoch, host, pool, config.acknowledge_seconds)
    with open_door(engine) as door, closing(MappedOutgoing(name, epoch, calls, digest)) as outgoing:
        incoming = MappedIncoming(name, door, layout.block_size, verified=verified, strong=lambda _: b"")
        yield MappedTransport(outgoing, incoming, door)


def _digests(pool: SharedPool, layout: KvFormat, run: PrefillRun, blocks: FilledBlocks) -> Iterator[bytes]:
    size = layout.block_bytes
    for ordinal, block in enumerate(run.block_ids(blocks.first_block, blocks.block_count), blocks.first_block):
        filled = min(layout.block_size, blocks.tokens - ordinal * layout.block_size)
        yield block_digest(pool.view[block * size : (block + 1) * size], ordinal, layout, filled)
