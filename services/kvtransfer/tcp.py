"""KV as bytes inside the offer: the way that is always there."""

from __future__ import annotations

import asyncio

from baton.core.api import KvReceiverApi, PrefillRun, SharedPool, WritableBlocks
from baton.core.errors import TransferRejected
from baton.core.types import FilledBlocks, KvChunk, KvFormat, KvHandshake, Ticket
from services.kvtransfer.checksum import block_checksums, verify
from services.kvtransfer.config import ChecksumPolicy
from services.kvtransfer.layout import filled_slots, pack, unpack
from services.kvtransfer.staging import Staging
from services.kvtransfer.transport import TransportName, require_checksums, require_equal


class TcpOutgoing:
    """Satisfies ``Outgoing``. Reads blocks out of the pool itself where that is mapped here, else from the engine."""

    name = TransportName.TCP

    def __init__(self, layout: KvFormat, checksums: ChecksumPolicy, pool: SharedPool | None = None) -> None:
        self._layout = layout
        self._checksums = checksums
        self._pool = pool

    def reaches(self, receiver: KvHandshake) -> bool:
        return True

    async def open(self, receiver: KvHandshake) -> None:
        """Nothing to do: the receiver's channel is there already."""

    def forget(self, receiver: KvHandshake) -> None:
        """There is nothing."""

    def receiver(self, hello: KvHandshake, usual: KvReceiverApi) -> KvReceiverApi:
        return usual

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        first, count, layout = blocks.first_block, blocks.block_count, self._layout
        payload = pack(await self._read(run, first, count), layout, blocks.filled_slots(layout.block_size))
        checksums: tuple[bytes, ...] = ()
        if self._checksums is not ChecksumPolicy.OFF:
            checksums = block_checksums(payload, first, count, layout.block_bytes)
        return KvChunk(ticket, first, count, payload, checksums)

    async def _read(self, run: PrefillRun, first: int, count: int) -> bytes:
        if self._pool is None:
            return bytes(await run.read_blocks(first, count))  # no copy if it is bytes already
        view, size = self._pool.view, self._layout.block_bytes
        return b"".join(view[block * size : (block + 1) * size] for block in run.block_ids(first, count))


class TcpIncoming:
    """Satisfies ``Incoming``. By way of ``staging``, if there is any, the engine takes the bytes without a socket
    between, and digests what it stored; otherwise they are written to it and read back."""

    name = TransportName.TCP

    def __init__(self, layout: KvFormat, checksums: ChecksumPolicy, staging: Staging | None = None) -> None:
        self._layout = layout
        self._checksums = checksums
        self._staging = staging

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> None:
        layout = self._layout
        self._check(chunk, tokens)
        if self._staging is not None and self._staging.fits(chunk.block_count):
            await self._pull(self._staging, chunk, reservation, tokens)
            return
        blocks = unpack(chunk.payload, layout, chunk.block_count)
        if self._checksums is ChecksumPolicy.OFF:
            await reservation.write_blocks(chunk.first_block, blocks)
            return
        verify(chunk.payload, chunk.first_block, chunk.checksums, layout.block_bytes, when="as received")
        stored = await written_and_read_back(reservation, chunk.first_block, chunk.block_count, blocks)
        packed = pack(stored, layout, filled_slots(chunk.payload, layout, chunk.block_count))
        verify(packed, chunk.first_block, chunk.checksums, layout.block_bytes, when="as stored")

    def abandon(self, ticket: Ticket) -> None:
        """Nothing here waits for the sender."""

    def decline(self, chunk: KvChunk) -> None:
        """The bytes are here already."""

    async def _pull(self, staging: Staging, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> None:
        filled = tokens - (chunk.block_count - 1) * self._layout.block_size
        async with staging.laid_out(chunk) as blocks:
            digests = await reservation.pull_blocks(chunk.first_block, staging.source, blocks, filled)
        if self._checksums is not ChecksumPolicy.OFF:
            require_equal(digests, chunk, when="as stored")

    def _check(self, chunk: KvChunk, tokens: int) -> None:
        """The payload holds exactly the tokens of its blocks; only the context's last block may be partly filled."""
        layout = self._layout
        expected = tokens * (layout.block_bytes // layout.block_size)
        if len(chunk.payload) != expected:
            begin = chunk.first_block * layout.block_size
            raise TransferRejected(
                f"payload: tokens {begin}..{begin + tokens - 1} are {expected} bytes, got {len(chunk.payload)}"
            )
        if self._checksums is not ChecksumPolicy.OFF:
            require_checksums(chunk)


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
