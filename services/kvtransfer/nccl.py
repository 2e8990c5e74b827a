"""KV that goes from GPU to GPU by a pair of communicators, within a host or between hosts.

A link leads one way, from the sender who makes it to one receiver, whose engine joins it when the first offer brings
the invitation. The sender's engine packs blocks into a staging slot and sends it as the next message of the link; the
receiver's takes the messages in order, and unpacks each once it has seen that the reservation still waits for it. A
message whose offer is refused is received and thrown away. One whose offer never arrives blocks the link; then its time
limit ends it, offers under way take the next transport, and a new link is made later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from baton.core.api import KvLinks, KvReceiverApi, PrefillRun, WritableBlocks
from baton.core.clock import Clock
from baton.core.errors import TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, KvChunk, KvFormat, KvHandshake, KvSource, Ticket
from baton.engine.digest import are_strong
from baton.engine.links import RECEIVER, SENDER
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.critical import critical_blocks
from services.kvtransfer.transport import (
    Digests,
    EarlyChunk,
    TransportName,
    not_converted,
    require_checksums,
    require_equal,
)

MAX_LINKS = 16  # of one worker each way: a link holds GPU memory
MAX_LEFT = 1024
IDLE_SECONDS = 300.0  # then a sender leaves a link; a receiver waits twice as long, so that it is never the first


@dataclass(slots=True)
class _Link:
    number: int
    invitation: bytes = field(repr=False)
    used_at: float
    messages: int = 0


class NcclOutgoing:
    """Satisfies ``Outgoing``. One link for each receiver, made when there is something to send."""

    name = TransportName.NCCL

    def __init__(
        self,
        epoch: int,
        block_size: int,
        links: KvLinks,
        config: KvTransferConfig,
        new_number: Callable[[], int],
        clock: Clock,
    ) -> None:
        """``epoch``: of this worker's life; ``new_number``: random 64 bits."""
        self._epoch = epoch
        self._block_size = block_size
        self._engine = links
        self._seconds = config.link_seconds
        self._new_number = new_number
        self._clock = clock
        self._links: OrderedDict[int, _Link] = OrderedDict()  # by the receiver's epoch
        self._opening = asyncio.Lock()

    def reaches(self, receiver: KvHandshake) -> bool:
        return True

    async def open(self, receiver: KvHandshake) -> None:
        async with self._opening:
            now = self._clock.now()
            self._leave_idle(now)
            if receiver.epoch in self._links:
                self._links[receiver.epoch].used_at = now
                self._links.move_to_end(receiver.epoch)
                return
            link = _Link(self._new_number(), await self._engine.invite(), now)
            self._engine.join(link.number, SENDER, link.invitation, self._seconds)
            self._links[receiver.epoch] = link
            while len(self._links) > MAX_LINKS:
                _, oldest = self._links.popitem(last=False)
                self._engine.leave(oldest.number)

    def forget(self, receiver: KvHandshake) -> None:
        link = self._links.pop(receiver.epoch, None)
        if link is not None:
            self._engine.leave(link.number)

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return usual

    def is_streamed(self, receiver: KvHandshake) -> bool:
        """The bytes are not in the offer."""
        return False

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        link = self._links.get(ticket.receiver_epoch)
        if link is None:
            raise TransportUnavailable("nccl: the link was closed meanwhile")
        number = link.messages
        link.messages += 1
        first, count = blocks.first_block, blocks.block_count
        strong, filled = critical_blocks(blocks, self._block_size), blocks.filled_slots(self._block_size)
        checksums = await run.send_blocks(first, link.number, number, filled, strong)
        source = KvSource(self._epoch, (), self.name, link.number, number, link.invitation)
        return KvChunk(ticket, first, count, b"", checksums, source)

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        """Digests come with the packing, which the message waits for."""
        return None

    def close(self) -> None:
        while self._links:
            self._engine.leave(self._links.popitem()[1].number)

    def _leave_idle(self, now: float) -> None:
        """The least recently used ones come first."""
        while self._links and now - next(iter(self._links.values())).used_at > IDLE_SECONDS:
            self._engine.leave(self._links.popitem(last=False)[1].number)


class NcclIncoming:
    """Satisfies ``Incoming``. Joins a sender's link when its first message is offered."""

    name = TransportName.NCCL

    def __init__(self, block_size: int, links: KvLinks, config: KvTransferConfig, clock: Clock) -> None:
        self._block_size = block_size
        self._engine = links
        self._seconds = config.link_seconds
        self._checksums = config.checksum_policy
        self._clock = clock
        self._joined: OrderedDict[int, int] = OrderedDict()  # by the sender's epoch, its newest link
        self._used_at: dict[int, float] = {}  # by the sender's epoch
        self._receiving: dict[Ticket, set[asyncio.Task[Digests]]] = {}
        self._left: OrderedDict[int, None] = OrderedDict()  # links, whose late offers must not bring them back

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> None:
        source = self._join(chunk)
        strong = bytes(chunk.block_count)
        if self._checksums is not ChecksumPolicy.OFF:
            try:
                require_checksums(chunk)
            except TransferRejected:
                self.decline(chunk)
                raise
            strong = are_strong(chunk.checksums)
        filled = tokens - (chunk.block_count - 1) * self._block_size
        receiving = reservation.receive_blocks(chunk.first_block, source.link, source.number, filled, strong)
        found = await self._unless_abandoned(chunk.ticket, receiving)
        if self._checksums is not ChecksumPolicy.OFF:
            require_equal(found, chunk, when="as received")

    def read(self, chunk: KvChunk, layout: KvFormat, tokens: int) -> bytes:
        raise not_converted(self.name)

    def abandon(self, ticket: Ticket) -> None:
        for task in self._receiving.get(ticket, ()):
            task.cancel()

    def decline(self, chunk: KvChunk) -> None:
        source = self._join(chunk)
        self._engine.discard(source.link, source.number, chunk.block_count)

    def close(self) -> None:
        while self._joined:
            self._leave(next(iter(self._joined)))

    async def _unless_abandoned(self, ticket: Ticket, receiving: Coroutine[Any, Any, Digests]) -> Digests:
        task = asyncio.create_task(receiving)
        tasks = self._receiving.setdefault(ticket, set())
        tasks.add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            tasks.discard(task)
            if not tasks:
                del self._receiving[ticket]
        if task.cancelled():
            raise TransferRejected("nccl: the ticket was closed before the message came")
        return task.result()

    def _join(self, chunk: KvChunk) -> KvSource:
        source = chunk.source
        if source is None or chunk.payload or chunk.block_count < 1:
            raise TransferRejected("source: a message of a link is required")
        if source.link in self._left:
            raise TransportUnavailable("nccl: the link was left before")
        now = self._used_at[source.epoch] = self._clock.now()
        if self._joined.get(source.epoch) != source.link:
            if source.epoch in self._joined:
                self._leave(source.epoch)
                self._used_at[source.epoch] = now
            self._engine.join(source.link, RECEIVER, source.invitation, self._seconds)
            self._joined[source.epoch] = source.link
            while len(self._joined) > MAX_LINKS:
                self._leave(next(iter(self._joined)))
        self._joined.move_to_end(source.epoch)
        while now - self._used_at[next(iter(self._joined))] > 2 * IDLE_SECONDS:
            self._leave(next(iter(self._joined)))
        return source

    def _leave(self, epoch: int) -> None:
        link = self._joined.pop(epoch)
        del self._used_at[epoch]
        self._engine.leave(link)
        self._left[link] = None
        while len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)
