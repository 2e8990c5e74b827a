"""The receiving end of a hand-over: offered bytes become valid blocks of one reservation, or nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.core.api import WritableBlocks
from baton.core.clock import Clock
from baton.core.errors import BatonError, TransferRejected
from baton.core.telemetry import Meter
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvHandshake, Ticket
from services.kvtransfer.checksum import verify
from services.kvtransfer.config import ChecksumPolicy
from services.kvtransfer.handshake import compare
from services.kvtransfer.layout import filled_slots, pack, unpack
from services.kvtransfer.tickets import TicketBook


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
        self, identity: KvHandshake, address: str, *, checksums: ChecksumPolicy, meter: Meter, clock: Clock
    ) -> None:
        self._identity = identity
        self._checksums = checksums
        self._clock = clock
        self._book = TicketBook(address, identity.epoch)
        self._deliveries: dict[Ticket, Delivery] = {}
        self._received = meter.counter("kv_received_bytes", "KV bytes written into own blocks")
        self._offer_seconds = meter.histogram("kv_offer_seconds", "From an offer's arrival to its acknowledgement")
        self._failures = meter.counter("kv_receive_failures", "Refused or failed offers and confirmations", ("cause",))

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
        with self._counting_failures():
            compare(self._identity, hello)
        return self._identity

    async def offer(self, chunk: KvChunk) -> None:
        began = self._clock.now()
        with self._counting_failures(), self._book.writing(chunk.ticket, chunk.first_block, chunk.block_count):
            delivery = self._deliveries[chunk.ticket]
            self._check_shape(chunk, delivery.context_tokens)
            with delivery.writing():
                await self._store(chunk, delivery.reservation)
        delivery.bytes_received += len(chunk.payload)
        self._received.add(len(chunk.payload))
        self._offer_seconds.observe(self._clock.now() - began)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        with self._counting_failures():
            self._book.confirm(confirmation.ticket, confirmation.first_block, confirmation.block_count)

    async def _store(self, chunk: KvChunk, reservation: WritableBlocks) -> None:
        layout = self._identity.format
        blocks = unpack(chunk.payload, layout, chunk.block_count)
        if self._checksums is ChecksumPolicy.OFF:
            await reservation.write_blocks(chunk.first_block, blocks)
            return
        verify(chunk.payload, chunk.first_block, chunk.checksums, layout.block_bytes, when="as received")
        stored = await written_and_read_back(reservation, chunk.first_block, chunk.block_count, blocks)
        packed = pack(stored, layout, filled_slots(chunk.payload, layout, chunk.block_count))
        verify(packed, chunk.first_block, chunk.checksums, layout.block_bytes, when="as stored")

    def _check_shape(self, chunk: KvChunk, context_tokens: int) -> None:
        """The payload holds exactly the tokens of its blocks; only the context's last block may be partly filled."""
        layout = self._identity.format
        begin = chunk.first_block * layout.block_size
        end = min(context_tokens, begin + chunk.block_count * layout.block_size)
        expected = (end - begin) * (layout.block_bytes // layout.block_size)
        if len(chunk.payload) != expected:
            raise TransferRejected(f"payload: tokens {begin}..{end - 1} are {expected} bytes, got {len(chunk.payload)}")
        if self._checksums is not ChecksumPolicy.OFF and len(chunk.checksums) != chunk.block_count:
            raise TransferRejected(
                f"checksums: one for each of {chunk.block_count} blocks is required, got {len(chunk.checksums)}"
            )

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self._failures.add(cause=error.reason)
            raise


async def written_and_read_back(held: WritableBlocks, first_block: int, block_count: int, blocks: bytes) -> bytes:
    """Both at once: an engine takes them in order between two of its steps, so the check costs no further step.

    Should a read ever overtake its write, the bytes would not verify: it fails closed.
    """
    write = asyncio.create_task(held.write_blocks(first_block, blocks))
    read = asyncio.create_task(held.read_blocks(first_block, block_count))
    try:
        await write
        return await read
    finally:
        write.cancel()
        read.cancel()
        await asyncio.gather(write, read, return_exceptions=True)
