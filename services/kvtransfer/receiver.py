"""The receiving end of a hand-over: offered bytes become valid blocks of one reservation, or nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.core.api import WritableBlocks
from baton.core.clock import Clock
from baton.core.errors import BatonError, TransferRejected, TransportUnavailable
from baton.core.telemetry import Meter
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvHandshake, Ticket
from services.kvtransfer.handshake import compare
from services.kvtransfer.series import ReceiverSeries
from services.kvtransfer.tickets import TicketBook
from services.kvtransfer.transport import Incoming, TransportName

NO_TRANSPORT = "none"  # what fails is no offer


class Delivery:
    """One open ticket and the reservation that its blocks go into."""

    def __init__(self, ticket: Ticket, reservation: WritableBlocks, context_tokens: int) -> None:
        self.ticket = ticket
        self.reservation = reservation
        self.context_tokens = context_tokens
        self.bytes_received = 0
        self._writes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._writes += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._writes -= 1
            if self._writes == 0:
                self._idle.set()

    async def quiet(self) -> None:
        """Until no write is under way."""
        await self._idle.wait()


class KvReceiver:
    """Implements ``KvReceiverApi`` for one worker; the decode side opens tickets with ``accept``.

    Only the ticket's own reservation is ever written, and only between the opening and the closing of the ticket: a
    late chunk meets a closed ticket, and ``accept`` ends only after the writes that had begun before have ended. So a
    block is never handed to another request while bytes may still land in it.
    """

    def __init__(
        self, identity: KvHandshake, address: str, tcp: Incoming, shm: Incoming | None, *, meter: Meter, clock: Clock
    ) -> None:
        """``identity`` is what senders are answered; ``shm`` None: pools of other workers are not mapped here."""
        self._identity = identity
        self._tcp = tcp
        self._shm = shm
        self._clock = clock
        self._book = TicketBook(address, identity.epoch)
        self._deliveries: dict[Ticket, Delivery] = {}
        self._series = ReceiverSeries(meter)

    @property
    def open_tickets(self) -> int:
        return len(self._book)

    @asynccontextmanager
    async def accept(
        self, request_id: str, attempt: Attempt, reservation: WritableBlocks, *, skip_blocks: int, context_tokens: int
    ) -> AsyncIterator[Delivery]:
        """Open a ticket for the blocks of ``context_tokens`` from ordinal ``skip_blocks`` on.

        Afterwards it is closed and no write is under way.
        """
        blocks = range(skip_blocks, -(-context_tokens // self._identity.format.block_size))
        ticket = self._book.open(request_id, attempt, blocks)
        delivery = self._deliveries[ticket] = Delivery(ticket, reservation, context_tokens)
        try:
            yield delivery
        finally:
            self._book.close(ticket)
            del self._deliveries[ticket]
            await delivery.quiet()

    def require_complete(self, delivery: Delivery) -> None:
        """TransferRejected unless every block of the ticket was acknowledged and confirmed."""
        missing = self._book.missing(delivery.ticket)
        if missing:
            raise TransferRejected(
                f"request {delivery.ticket.request_id}: {len(missing)} blocks are not valid, the first is {missing[0]}"
            )

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        with self._counting_failures(NO_TRANSPORT):
            compare(self._identity, hello)
        return self._identity

    async def offer(self, chunk: KvChunk) -> None:
        began = self._clock.now()
        name = TransportName.TCP if chunk.source is None else TransportName.SHM
        with self._counting_failures(name), self._book.writing(chunk.ticket, chunk.first_block, chunk.block_count):
            delivery = self._deliveries[chunk.ticket]
            tokens = self._tokens(chunk, delivery.context_tokens)
            with delivery.writing():
                await self._transport(name).store(chunk, delivery.reservation, tokens)
        size = tokens * (self._identity.format.block_bytes // self._identity.format.block_size)
        delivery.bytes_received += size
        self._series.received(name, size, self._clock.now() - began)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        with self._counting_failures(NO_TRANSPORT):
            self._book.confirm(confirmation.ticket, confirmation.first_block, confirmation.block_count)

    def _tokens(self, chunk: KvChunk, context_tokens: int) -> int:
        """How many the chunk's blocks hold; only the context's last block may be partly filled."""
        size = self._identity.format.block_size
        begin = chunk.first_block * size
        return min(context_tokens, begin + chunk.block_count * size) - begin

    @contextmanager
    def _counting_failures(self, transport: str) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self._series.failed(transport, error.reason)
            raise

    def _transport(self, name: TransportName) -> Incoming:
        if name is TransportName.TCP:
            return self._tcp
        if self._shm is None:
            raise TransportUnavailable("shared memory: this worker maps no pools")
        return self._shm
