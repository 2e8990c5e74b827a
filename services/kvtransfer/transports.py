"""All transports of one worker, open for as long as it lives: those that configuration, engine and system have."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from baton.core.api import EngineApi, KvReceiverApi
from baton.core.clock import Clock, SystemClock
from baton.core.errors import ConfigError
from baton.core.types import KvHandshake, LocalDoor
from baton.engine.native.block_copy import best_block_copy
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.cuda_ipc import cuda_ipc
from services.kvtransfer.door import PoolDoor, host_name
from services.kvtransfer.handshake import FEATURES, LOCAL_PACKETS, UNMAPPED_FEATURES, identity
from services.kvtransfer.nccl import NcclIncoming, NcclOutgoing
from services.kvtransfer.pool_blocks import pool_blocks
from services.kvtransfer.shm import shared_memory
from services.kvtransfer.tcp import TcpIncoming, TcpOutgoing
from services.kvtransfer.transport import Incoming, Outgoing, TransportName


@dataclass(frozen=True, slots=True)
class Transports:
    """``outgoing`` best first; of ``incoming`` there is always tcp, first; ``hello`` is what this worker says of
    itself, ``answer`` with the door at which it receives pools and, once ``receive`` was called, offers."""

    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    hello: KvHandshake
    doors: tuple[PoolDoor, ...]
    local_calls: bool

    @property
    def door(self) -> LocalDoor | None:
        return self.doors[0].invitation if self.doors else None

    @property
    def answer(self) -> KvHandshake:
        features = (*self.hello.features, LOCAL_PACKETS) if self.local_calls and self.doors else self.hello.features
        return replace(self.hello, features=features, door=self.door)

    def receive(self, receiver: KvReceiverApi) -> None:
        """Let senders of this host offer and confirm to ``receiver`` at the door, unless that is to go by gRPC."""
        for door in self.doors if self.local_calls else ():
            door.answer(receiver)


@contextmanager
def open_transports(
    engine: EngineApi, worker_id: str, epoch: int, config: KvTransferConfig, clock: Clock | None = None
) -> Iterator[Transports]:
    """ConfigError when the configuration names transports of which this worker has none."""
    layout, checksums = engine.card.format, config.checksum_policy
    with ExitStack() as stack:
        here = stack.enter_context(pool_blocks(engine.pool, layout, best_block_copy()))
        outgoing: list[Outgoing] = []
        incoming: list[Incoming] = []
        doors: list[PoolDoor] = []
        for mapped in (
            stack.enter_context(cuda_ipc(engine, epoch, config)),
            stack.enter_context(shared_memory(engine, epoch, config, here)),
        ):
            if mapped is not None:
                outgoing.append(mapped.outgoing)
                incoming.append(mapped.incoming)
                doors.append(mapped.door)
        if engine.links is not None and TransportName.NCCL in config.transports:
            time = clock or SystemClock()
            sends = NcclOutgoing(epoch, layout.block_size, engine.links, config, lambda: secrets.randbits(64), time)
            takes = NcclIncoming(layout.block_size, engine.links, config, time)
            stack.callback(sends.close)
            stack.callback(takes.close)
            outgoing.append(sends)
            incoming.append(takes)
        if TransportName.TCP in config.transports:
            outgoing.append(TcpOutgoing(layout, checksums, here))
        if not outgoing:
            raise ConfigError(f"kvtransfer.transports: this worker has none of {', '.join(config.transports)}")
        order = list(TransportName)
        outgoing.sort(key=lambda way: order.index(way.name))
        names = tuple(way.name.value for way in outgoing)
        features = UNMAPPED_FEATURES if engine.pool is None else FEATURES
        hello = identity(worker_id, epoch, engine.card, names, host_name() if doors else "", features)
        taken = (TcpIncoming(layout, checksums, engine.pool), *incoming)
        yield Transports(tuple(outgoing), taken, hello, tuple(doors), config.local_calls)
