"""Sender and receiver whose blocks differ in size, joined over memory: how offers are cut, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.core.api import KvReceiverApi
from baton.core.clock import ManualClock
from baton.core.errors import CorruptTransfer, TransferRejected
from baton.core.telemetry import SilentMeter
from baton.core.types import (
    Attempt,
    FilledBlocks,
    KvChunk,
    KvConfirmation,
    KvFormat,
    KvHandshake,
    KvSource,
)
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.handshake import RESLICE
from services.kvtransfer.layout import pack
from services.kvtransfer.receiver import Delivery, KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.tcp import TcpIncoming, TcpOutgoing
from services.kvtransfer.transport import TransportName
from tests.unit.services.kvtransfer.doubles import Held, Run

SMALL = KvFormat("fake", 4, 1, 1, 1)  # two bytes a token: K, then V
LARGE = replace(SMALL, block_size=8)
ATTEMPT = Attempt(0, 1)
TWO_SMALL = KvTransferConfig(max_message_bytes=2 * SMALL.block_bytes, max_mapped_bytes=64 * SMALL.block_bytes)


def block(ordinal: int, layout: KvFormat) -> bytes:
    """Of a sequence whose token t has t as K and 200 - t as V."""
    tokens = range(ordinal * layout.block_size, (ordinal + 1) * layout.block_size)
    return bytes(tokens) + bytes(200 - token for token in tokens)


def filling(layout: KvFormat, *pieces: FilledBlocks) -> Run:
    """A prefill of that sequence; between two pieces an offer has the time that it takes."""
    return Run(lambda ordinal: block(ordinal, layout), pieces, turns=10)


class AsSharedMemory(TcpOutgoing):
    """Bytes, in offers as large as in shared memory."""

    name = TransportName.SHM


class Link(TcpIncoming):
    """Whose bytes come by themselves."""

    name = TransportName.NCCL

    def __init__(self) -> None:
        super().__init__(LARGE, TWO_SMALL.checksum_policy)
        self.declined: list[KvChunk] = []

    def decline(self, chunk: KvChunk) -> None:
        self.declined.append(chunk)


class Recorded:
    """Notes what the receiver was asked."""

    def __init__(self, inner: KvReceiverApi) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int, int]] = []

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.inner.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.calls.append(("offer", chunk.first_block, chunk.block_count))
        await self.inner.offer(chunk)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.calls.append(("confirm", confirmation.first_block, confirmation.block_count))
        await self.inner.confirm(confirmation)


class Pair:
    def __init__(self, source: KvFormat, target: KvFormat, way: type[TcpOutgoing] = TcpOutgoing) -> None:
        config, clock, meter = TWO_SMALL, ManualClock(), SilentMeter()
        names = ("shm", "tcp")
        mine = KvHandshake("p", 1, "m", "h", source, features=(RESLICE,), transports=names)
        theirs = replace(mine, worker_id="d", epoch=2, format=target)
        self.receiver = KvReceiver(theirs, "d:1", TcpIncoming(target, config.checksum_policy), meter=meter, clock=clock)
        self.wire = Recorded(self.receiver)
        ways = [way(source, config.checksum_policy)]
        self.sender = KvSender(mine, lambda _: self.wire, ways, config=config, meter=meter, clock=clock)

    async def ship(self, run: Run, held: Held, skip: int, tokens: int) -> Delivery:
        accepting = self.receiver.accept("r", ATTEMPT, held, skip_blocks=skip, context_tokens=tokens)
        async with accepting as delivery:
            await self.sender.ship(delivery.ticket, run, skip)
            self.receiver.require_complete(delivery)
        return delivery


def test_offers_fill_whole_blocks_of_the_receiver_and_wait_until_they_can() -> None:
    async def run() -> None:
        pair, held = Pair(SMALL, LARGE), Held(LARGE)
        pieces = (FilledBlocks(0, 1, 4), FilledBlocks(1, 2, 12), FilledBlocks(3, 4, 28), FilledBlocks(7, 2, 33))
        delivery = await pair.ship(filling(SMALL, *pieces), held, 0, 33)
        assert pair.wire.calls == [("offer", first, 2) for first in (0, 2, 4, 6)] + [("offer", 8, 1), ("confirm", 0, 5)]
        assert [held.stored[ordinal] for ordinal in range(4)] == [block(ordinal, LARGE) for ordinal in range(4)]
        assert held.stored[4] == bytes([32, *[0] * 7, 200 - 32, *[0] * 7])
        assert delivery.bytes_received == 33 * 2

    asyncio.run(run())


def test_a_block_of_the_sender_that_the_receiver_holds_in_part_comes_whole_and_is_written_in_part() -> None:
    async def run() -> None:
        pair, held = Pair(LARGE, SMALL), Held(SMALL)
        delivery = await pair.ship(filling(LARGE, FilledBlocks(0, 3, 23)), held, 3, 23)
        assert pair.wire.calls == [("offer", 1, 1), ("offer", 2, 1), ("confirm", 3, 3)]
        assert sorted(held.stored) == [3, 4, 5]
        assert (held.stored[3], held.stored[4]) == (block(3, SMALL), block(4, SMALL))
        assert held.stored[5] == bytes([20, 21, 22, 0, 180, 179, 178, 0])
        assert delivery.bytes_received == (23 - 8) * 2

    asyncio.run(run())


def test_an_offer_to_be_converted_is_a_message_at_most_since_a_front_converts_it() -> None:
    async def run() -> None:
        for target, offers in ((LARGE, [(first, 2) for first in range(0, 12, 2)]), (SMALL, [(0, 12)])):
            pair = Pair(SMALL, target, AsSharedMemory)
            pair.receiver._transports[TransportName.SHM] = pair.receiver._transports[TransportName.TCP]
            await pair.ship(filling(SMALL, FilledBlocks(0, 12, 48)), Held(target), 0, 48)
            assert [call[1:] for call in pair.wire.calls if call[0] == "offer"] == offers

    asyncio.run(run())


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_stored() -> None:
    async def run() -> None:
        pair, held = Pair(SMALL, LARGE), Held(LARGE)
        async with pair.receiver.accept("r", ATTEMPT, held, skip_blocks=1, context_tokens=30) as delivery:

            def offered(first: int, count: int, layout: KvFormat = SMALL, filled: int = 4) -> KvChunk:
                payload = pack(b"".join(block(first + index, SMALL) for index in range(count)), SMALL, filled)
                sums = block_checksums(payload, first, count, SMALL.block_bytes)
                return KvChunk(delivery.ticket, first, count, payload, sums, format=layout)

            good = offered(2, 2)
            for bad, why in (
                (offered(2, 1), "first_block: blocks 2..2 of 4 tokens fill no whole blocks of 8"),
                (offered(3, 2), "fill no whole blocks"),
                (offered(0, 2), "blocks 1..0 are outside 1..3"),
                (offered(8, 2), "block_count: 30 tokens are 8 blocks of 4, offered are 8..9"),
                (offered(4, 5), "block_count: 30 tokens are 8 blocks of 4, offered are 4..8"),
                (offered(2, 2, replace(SMALL, dtype="float32")), "format.dtype: 'float32' cannot become 'fake'"),
                (offered(2, 2, replace(SMALL, shards=2)), "format.shards: must divide 1 heads, got 2"),
                (replace(good, payload=good.payload[:-1]), "payload: tokens 8..15 are 16 bytes, got 15"),
                (replace(good, checksums=good.checksums[:1]), "checksums: one for each of 2 blocks is required, got 1"),
                (replace(good, ticket=replace(good.ticket, receiver_epoch=9)), "receiver_epoch"),
                (replace(good, ticket=replace(good.ticket, receiver_address="e:1")), "receiver_address"),
            ):
                with pytest.raises(TransferRejected, match=why):
                    await pair.receiver.offer(bad)
            with pytest.raises(CorruptTransfer, match="block 3 does not match its checksum as received"):
                await pair.receiver.offer(replace(good, payload=bytes(good.body)[:-1] + b"x"))
            assert held.stored == {}
            await pair.receiver.offer(good)
            with pytest.raises(TransferRejected, match="3 blocks are not valid, the first is 1"):
                pair.receiver.require_complete(delivery)
            assert held.stored == {1: block(1, LARGE)}

    asyncio.run(run())


def test_blocks_that_come_by_a_transport_that_does_not_convert_are_declined() -> None:
    async def run() -> None:
        pair, held, link = Pair(SMALL, LARGE), Held(LARGE), Link()
        pair.receiver._transports[TransportName.NCCL] = link
        async with pair.receiver.accept("r", ATTEMPT, held, skip_blocks=0, context_tokens=30) as delivery:
            chunk = KvChunk(delivery.ticket, 0, 2, b"", (), KvSource(1, (), "nccl", 1, 1), SMALL)
            with pytest.raises(TransferRejected, match="format: blocks of another layout do not come by nccl"):
                await pair.receiver.offer(chunk)
        assert link.declined == [chunk] and held.stored == {}

    asyncio.run(run())
