"""The receiving end of a hand-over: offered bytes become valid blocks of one reservation, or nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.core.api import WritableBlocks
from baton.core.clock import Clock
from baton.core.errors import BatonError, TransferRejected, TransportUnavailable
from baton.core.telemetry import Meter
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvFormat, KvHandshake, Ticket
from services.kvtransfer.conversion import Conversion, converted, require_convertible
from services.kvtransfer.handshake import compare
from services.kvtransfer.late_checksums import LateChecksums
from services.kvtransfer.series import ReceiverSeries
from services.kvtransfer.tickets import TicketBook
from services.kvtransfer.transport import Incoming, TransportName, not_converted, transport_of

NO_TRANSPORT = "none"  # what fails is not about blocks that have come


class Delivery:
    """One open ticket and the reservation that its blocks go into."""

    def __init__(self, ticket: Ticket, reservation: WritableBlocks, context_tokens: int) -> None:
        self.ticket = ticket
        self.reservation = reservation
        self.context_tokens = context_tokens
        self.bytes_received = 0
        self.transport = NO_TRANSPORT  # by which blocks came last
        self.late_checksums = LateChecksums()
        self._news = asyncio.Event()
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

    def tell(self) -> None:
        """Wake those who wait for news."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Until blocks were acknowledged, or the ticket closed."""
        await self._news.wait()

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
        self,
        identity: KvHandshake,
        address: str,
        tcp: Incoming,
        *others: Incoming | None,
        meter: Meter,
        clock: Clock,
    ) -> None:
        """``identity`` is what senders are answered; ``others``: the further transports that there are here."""
        self._identity = identity
        self._transports = {each.name: each for each in (tcp, *others) if each is not None}
        self._clock = clock
        self._book = TicketBook(address, identity.epoch)
        self._deliveries: dict[Ticket, Delivery] = {}
        self._series = ReceiverSeries(meter)

    @property
    def open_tickets(self) -> int:
        return len(self._book)

    def fresh(self, request_id: str, attempt: Attempt) -> Attempt:
        """``attempt``, or a later retry if that has had a ticket here before."""
        return self._book.fresh(request_id, attempt)

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
            delivery.tell()
            del self._deliveries[ticket]
            for transport in self._transports.values():
                transport.abandon(ticket)
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
        try:
            transport = self._transport(transport_of(chunk))
            tokens = await self._store(transport, chunk)
        except BatonError as error:
            self._series.failed(_label(chunk), error.reason)
            raise
        size = tokens * self._identity.format.token_bytes
        self._series.received(transport.name, size, self._clock.now() - began)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        ticket, blocks = confirmation.ticket, (confirmation.first_block, confirmation.block_count)
        transport = NO_TRANSPORT
        try:
            while confirmation.checksums and not self._book.has_acknowledged(ticket, *blocks):
                await self._deliveries[ticket].news()
            delivery = self._deliveries.get(ticket)
            if delivery is not None:
                transport = delivery.transport
                delivery.late_checksums.verify(confirmation)
            self._book.confirm(ticket, *blocks)
        except BatonError as error:
            self._series.failed(transport, error.reason)
            raise

    async def _store(self, transport: Incoming, chunk: KvChunk) -> int:
        """The number of tokens that came."""
        if chunk.format is not None and chunk.format != self._identity.format:
            return await self._convert(transport, chunk, chunk.format)
        is_taken = False
        try:
            with self._book.writing(chunk.ticket, chunk.first_block, chunk.block_count):
                delivery = self._deliveries[chunk.ticket]
                tokens = self._tokens(chunk, delivery.context_tokens)
                with delivery.writing():
                    is_taken = True
                    found = await transport.store(chunk, delivery.reservation, tokens)
                delivery.late_checksums.stored(chunk, found)
            delivery.transport = transport.name
            delivery.bytes_received += tokens * self._identity.format.token_bytes
            delivery.tell()
            return tokens
        except TransferRejected:
            if not is_taken:
                transport.decline(chunk)
            raise

    async def _convert(self, transport: Incoming, chunk: KvChunk, layout: KvFormat) -> int:
        """As ``_store``, for blocks of another ``layout``: verified as those, and stored as bytes of our own."""
        require_convertible(layout, self._identity.format)
        if not transport.name.converts:
            transport.decline(chunk)
            raise not_converted(transport.name)
        allowed = self._book.blocks(chunk.ticket)
        delivery = self._deliveries[chunk.ticket]
        conversion = Conversion(layout, self._identity.format)
        landing = conversion.landing(chunk.first_block, chunk.block_count, delivery.context_tokens, allowed.start)
        tokens = landing.end - landing.begin
        with self._book.writing(chunk.ticket, landing.first_block, landing.block_count):
            payload = conversion.convert(transport.read(chunk, layout, tokens), landing)
            own = converted(chunk, landing, payload, self._identity.format.block_bytes)
            with delivery.writing():
                stored = landing.end - landing.first_block * self._identity.format.block_size
                await self._transports[TransportName.TCP].store(own, delivery.reservation, stored)
        size = tokens * self._identity.format.token_bytes
        delivery.transport = transport.name
        delivery.bytes_received += size
        delivery.tell()
        self._series.converted(transport.name, size)
        return tokens

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
        found = self._transports.get(name)
        if found is None:
            raise TransportUnavailable(f"transport {name} is not open here")
        return found


def _label(chunk: KvChunk) -> str:
    """For metrics: what a peer says is not to make new ones."""
    try:
        return transport_of(chunk)
    except TransportUnavailable:
        return NO_TRANSPORT
