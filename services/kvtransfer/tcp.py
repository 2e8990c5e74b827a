"""KV as bytes inside the offer: the way that is always there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from baton.core.api import KvReceiverApi, PrefillRun, SharedPool, WritableBlocks
from baton.core.errors import TransferRejected
from baton.core.types import FilledBlocks, KvChunk, KvConfirmation, KvFormat, KvHandshake, Ticket
from services.kvtransfer.checksum import block_checksums, verify
from services.kvtransfer.config import ChecksumPolicy
from services.kvtransfer.critical import critical_blocks
from services.kvtransfer.handshake import OFFER_STREAMS
from services.kvtransfer.layout import filled_slots, pack, unpack
from services.kvtransfer.pool_blocks import PoolBlocks, in_turns
from services.kvtransfer.transport import (
    Digests,
    EarlyChunk,
    TransportName,
    require_checksums,
    require_equal,
    require_late_checksums,
)


class TcpOutgoing:
    """Satisfies ``Outgoing``. Takes blocks out of the pool itself where that is mapped here, else from the engine."""

    name = TransportName.TCP

    def __init__(self, layout: KvFormat, checksums: ChecksumPolicy, blocks_here: PoolBlocks | None = None) -> None:
        self._layout = layout
        self._is_verified = checksums is not ChecksumPolicy.OFF
        self._blocks_here = blocks_here

    def reaches(self, receiver: KvHandshake) -> bool:
        return True

    async def open(self, receiver: KvHandshake) -> None:
        """Nothing to do: the receiver's channel is there already."""

    def forget(self, receiver: KvHandshake) -> None:
        """There is nothing."""

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return usual if OFFER_STREAMS in hello.features else _InOneMessage(usual)

    def is_streamed(self, receiver: KvHandshake) -> bool:
        """What is fetched from the engine is there in one piece."""
        return self._blocks_here is not None and OFFER_STREAMS in receiver.features

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        first, count, here = blocks.first_block, blocks.block_count, self._blocks_here
        if here is not None:
            checksums = await here.checksums(run, blocks) if self._is_verified else ()
            return KvChunk(ticket, first, count, b"", checksums, pieces=here.pieces(run, blocks))
        layout = self._layout
        read = bytes(await run.read_blocks(first, count))  # no copy if it is bytes already
        payload = pack(read, layout, blocks.filled_slots(layout.block_size))
        digests = block_checksums(payload, first, count, layout.block_bytes) if self._is_verified else ()
        return KvChunk(ticket, first, count, payload, digests)

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        """None where the bytes have to be fetched from the engine anyway."""
        here = self._blocks_here
        if here is None or not self._is_verified:
            return None
        late = critical_blocks(blocks, self._layout.block_size)
        pieces = here.pieces(run, blocks)
        chunk = KvChunk(ticket, blocks.first_block, blocks.block_count, b"", late_checksums=late, pieces=pieces)
        return EarlyChunk(chunk, lambda: here.checksums(run, blocks))


class _InOneMessage(KvReceiverApi):
    """A receiver that takes an offer's bytes in one message only: of an older version, or with a pool on a device."""

    def __init__(self, usual: KvReceiverApi) -> None:
        self._usual = usual

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self._usual.handshake(hello)

    def offer(self, chunk: KvChunk) -> Awaitable[None]:
        return self._usual.offer(chunk.undivided())

    def confirm(self, confirmation: KvConfirmation) -> Awaitable[None]:
        return self._usual.confirm(confirmation)


class TcpIncoming:
    """Satisfies ``Incoming``. Fills the reservation's blocks itself, and digests what it stores, where their pool is
    mapped here; otherwise the bytes are sent to the engine and read back."""

    name = TransportName.TCP

    def __init__(self, layout: KvFormat, checksums: ChecksumPolicy, pool: SharedPool | None = None) -> None:
        self._layout = layout
        self._checksums = checksums
        self._pool = pool

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> Digests | None:
        layout, body = self._layout, chunk.body
        self._check(chunk, layout, len(body), tokens, takes_late=True)
        if self._pool is not None:
            return self._found(await self._fill(chunk, reservation, tokens), chunk)
        blocks = unpack(body, layout, chunk.block_count)
        if self._checksums is ChecksumPolicy.OFF:
            await reservation.write_blocks(chunk.first_block, blocks)
            return None
        if chunk.checksums:
            verify(body, chunk.first_block, chunk.checksums, layout.block_bytes, when="as received")
        stored = await written_and_read_back(reservation, chunk.first_block, chunk.block_count, blocks)
        packed = pack(stored, layout, filled_slots(body, layout, chunk.block_count))
        digests = block_checksums(packed, chunk.first_block, chunk.block_count, layout.block_bytes)
        return self._found(digests, chunk)

    def read(self, chunk: KvChunk, layout: KvFormat, tokens: int) -> bytes:
        body = bytes(chunk.body)
        self._check(chunk, layout, len(body), tokens)
        if self._checksums is not ChecksumPolicy.OFF:
            verify(body, chunk.first_block, chunk.checksums, layout.block_bytes, when="as received")
        return body

    def abandon(self, ticket: Ticket) -> None:
        """Nothing here waits for the sender."""

    def decline(self, chunk: KvChunk) -> None:
        """The bytes are here already."""

    def _found(self, digests: Digests, chunk: KvChunk) -> Digests | None:
        """Of what is stored now: those that are to be compared later, None once they are found equal."""
        if self._checksums is ChecksumPolicy.OFF:
            return None
        if chunk.late_checksums:
            return digests
        require_equal(digests, chunk, when="as stored")
        return None

    async def _fill(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> Digests:
        """In turns. Each time it is asked whether the blocks are still held; nobody can give them up amid a copy."""
        layout, size, payload = self._layout, self._layout.block_bytes, memoryview(chunk.body)

        def fill(turn: range) -> tuple[bytes, ...]:
            filled = min(layout.block_size, tokens - (turn.stop - 1) * layout.block_size)
            part = payload[turn.start * size : turn.stop * size]
            return reservation.fill_blocks(chunk.first_block + turn.start, part, filled)

        return await in_turns(chunk.block_count, layout, fill)

    def _check(self, chunk: KvChunk, layout: KvFormat, size: int, tokens: int, *, takes_late: bool = False) -> None:
        """The payload holds exactly the tokens of its blocks; only the context's last block may be partly filled."""
        expected = tokens * layout.token_bytes
        if size != expected:
            begin = chunk.first_block * layout.block_size
            raise TransferRejected(f"payload: tokens {begin}..{begin + tokens - 1} are {expected} bytes, got {size}")
        if self._checksums is ChecksumPolicy.OFF:
            return
        if takes_late and chunk.late_checksums:
            require_late_checksums(chunk)
        else:
            require_checksums(chunk)


async def written_and_read_back(
    held: WritableBlocks, first_block: int, block_count: int, blocks: bytes | memoryview
) -> bytes:
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
