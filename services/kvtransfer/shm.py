"""KV that never travels: the receiver's front copies blocks out of the sender's pool in memory that both map.

It digests what it copies in the same pass; the sender's front digests the blocks in its own mapping. The engines take
no part: the receiver's learns what was filled when it is told to decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from baton.core.api import EngineApi
from baton.core.errors import ConfigError
from baton.core.types import FilledBlocks
from baton.engine.sharedpool import packed_digest
from services.kvtransfer.callers import DoorCalls
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.door import host_name, open_door
from services.kvtransfer.mapped import MappedIncoming, MappedOutgoing, MappedTransport
from services.kvtransfer.pool_blocks import PoolBlocks
from services.kvtransfer.transport import TransportName


def _all(blocks: FilledBlocks) -> bytes:
    return b"\1" * blocks.block_count


@contextmanager
def shared_memory(
    engine: EngineApi, epoch: int, config: KvTransferConfig, blocks_here: PoolBlocks | None
) -> Iterator[MappedTransport | None]:
    """The transport for as long as the block lasts; None where the configuration or the system has none.

    ConfigError when the configuration allows nothing else.
    """
    name, pool, host = TransportName.SHM, engine.pool, host_name()
    if name not in config.transports:
        yield None
        return
    if pool is None or blocks_here is None or not host:
        if set(config.transports) == {name}:
            raise ConfigError(f"kvtransfer.transports: this worker cannot share its pool, got {config.transports}")
        yield None
        return
    layout, verified = engine.card.format, config.checksum_policy is not ChecksumPolicy.OFF

    calls = DoorCalls(epoch, host, pool, config.acknowledge_seconds)
    digest = blocks_here.checksums_in_turns if verified else None
    with open_door(engine) as door, closing(MappedOutgoing(name, epoch, calls, _all, digest)) as outgoing:
        incoming = MappedIncoming(name, door, layout, verified=verified, strong=lambda _: b"", digest=packed_digest)
        yield MappedTransport(outgoing, incoming, door)
