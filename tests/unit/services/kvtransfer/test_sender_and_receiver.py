"""Sender and receiver joined over memory: what is shipped, how it is cut, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from baton.core.api import KvReceiverApi
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, CorruptTransfer, PeerUnavailable, TransferRejected
from baton.core.telemetry import SilentMeter, SilentTracer
from baton.core.types import (
    Attempt,
    FilledBlocks,
    KvChunk,
    KvConfirmation,
    KvFormat,
    KvHandshake,
    Ticket,
)
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.receiver import Delivery, KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.tcp import TcpIncoming, TcpOutgoing
from services.kvtransfer.transport import TransportName
from tests.unit.services.kvtransfer.doubles import Held, Run

FORMAT = KvFormat("fake", 4, 1, 1, 8)
SIZE = FORMAT.block_bytes
SENDER = KvHandshake("p", 1, "m", "h", FORMAT)
RECEIVER = KvHandshake("d", 2, "m", "h", FORMAT)
ATTEMPT = Attempt(0, 1)
TWO_BLOCKS = KvTransferConfig(max_message_bytes=2 * SIZE)


def block(ordinal: int) -> bytes:
    return bytes([ordinal + 1]) * SIZE


def filling(*pieces: tuple[int, int]) -> Run:
    """A prefill whose blocks fill in pieces of (first block, count)."""
    size = FORMAT.block_size
    return Run(block, [FilledBlocks(first, count, (first + count) * size) for first, count in pieces])


class Recorded:
    """A receiver that remembers what it was asked, in order, and how many offers were under way at once."""

    def __init__(self, inner: KvReceiverApi) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int, int]] = []
        self.under_way = self.most_under_way = 0
        self.handshakes = 0
        self.fails: BatonError | None = None

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        self.handshakes += 1
        if self.fails is not None:
            raise self.fails
        return await self.inner.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.calls.append(("offer", chunk.first_block, chunk.block_count))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        self.under_way -= 1
        if self.fails is not None:
            raise self.fails
        await self.inner.offer(chunk)
        self.calls.append(("acknowledged", chunk.first_block, chunk.block_count))

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.calls.append(("confirm", confirmation.first_block, confirmation.block_count))
        await self.inner.confirm(confirmation)


def receiver_of(identity: KvHandshake, config: KvTransferConfig, clock: ManualClock) -> KvReceiver:
    tcp = TcpIncoming(identity.format, config.checksum_policy)
    return KvReceiver(identity, "d:1", tcp, None, meter=SilentMeter(), clock=clock)


class Pair:
    """A sender and a receiver that know each other."""

    def __init__(self, config: KvTransferConfig = TWO_BLOCKS) -> None:
        self.clock = ManualClock()
        self.receiver = receiver_of(RECEIVER, config, self.clock)
        self.wire = Recorded(self.receiver)
        ways = [TcpOutgoing(FORMAT, config.checksum_policy)]
        self.sender = KvSender(SENDER, lambda _: self.wire, ways, config=config, meter=SilentMeter(), clock=self.clock)

    def accept(self, held: Held, blocks: range) -> AbstractAsyncContextManager[Delivery]:
        context_tokens = blocks.stop * FORMAT.block_size
        return self.receiver.accept("r", ATTEMPT, held, skip_blocks=blocks.start, context_tokens=context_tokens)

    async def ship(self, run: Run, held: Held, blocks: range) -> tuple[int, Delivery]:
        async with self.accept(held, blocks) as delivery:
            await self.sender.connect(delivery.ticket)
            shipped = await self.sender.ship(delivery.ticket, run, blocks.start)
            self.receiver.require_complete(delivery)
        return shipped, delivery


def chunk_of(ticket: Ticket, first: int, count: int, **changes: object) -> KvChunk:
    payload = b"".join(block(first + index) for index in range(count))
    return replace(KvChunk(ticket, first, count, payload, ()), **changes)


def test_blocks_arrive_at_their_places_in_messages_of_bounded_size() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        shipped, delivery = await pair.ship(filling((0, 3), (3, 1), (4, 5)), held, range(9))
        assert held.stored == {ordinal: block(ordinal) for ordinal in range(9)}
        assert shipped == delivery.bytes_received == 9 * SIZE
        offers = [call[1:] for call in pair.wire.calls if call[0] == "offer"]
        assert offers == [(0, 2), (2, 1), (3, 1), (4, 2), (6, 2), (8, 1)]

    asyncio.run(run())


def test_block_larger_than_a_message_is_sent_alone() -> None:
    async def run() -> None:
        pair, held = Pair(KvTransferConfig(max_message_bytes=1)), Held(FORMAT)
        await pair.ship(filling((0, 3)), held, range(3))
        assert [call for call in pair.wire.calls if call[0] == "offer"] == [("offer", n, 1) for n in range(3)]

    asyncio.run(run())


@pytest.mark.parametrize("skip", range(6))
def test_skipped_blocks_are_not_sent(skip: int) -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        await pair.ship(filling((0, 4), (4, 2)), held, range(skip, 6))
        assert sorted(held.stored) == list(range(skip, 6))

    asyncio.run(run())


@pytest.mark.parametrize("skip", [0, 3])
def test_all_offers_are_confirmed_at_once_after_the_last_acknowledgement(skip: int) -> None:
    async def run() -> None:
        pair = Pair()
        await pair.ship(filling((0, 5), (5, 3)), Held(FORMAT), range(skip, 8))
        *before, last = pair.wire.calls
        assert last == ("confirm", skip, 8 - skip)
        assert {name for name, _, _ in before} == {"offer", "acknowledged"}

    asyncio.run(run())


def test_nothing_is_confirmed_where_nothing_is_missing() -> None:
    async def run() -> None:
        pair = Pair()
        await pair.ship(filling((0, 4)), Held(FORMAT), range(4, 4))
        assert pair.wire.calls == []

    asyncio.run(run())


def test_offers_overlap_up_to_their_bound() -> None:
    async def run() -> None:
        pair = Pair(KvTransferConfig(max_message_bytes=SIZE, offers_in_flight=3))
        await pair.ship(filling((0, 12)), Held(FORMAT), range(12))
        assert pair.wire.most_under_way == 3

    asyncio.run(run())


def test_hands_are_shaken_once_per_life_of_a_receiver() -> None:
    async def run() -> None:
        pair = Pair()
        for _ in range(3):
            await pair.ship(filling((0, 1)), Held(FORMAT), range(1))
        assert pair.wire.handshakes == 1

    asyncio.run(run())


def test_receiver_of_another_format_is_refused_before_any_byte() -> None:
    async def run() -> None:
        pair = Pair()
        other = replace(RECEIVER, format=replace(FORMAT, kv_heads=2))
        pair.wire.inner = receiver_of(other, KvTransferConfig(), pair.clock)
        with pytest.raises(TransferRejected, match=r"format\.kv_heads"):
            await pair.sender.connect(Ticket("r", ATTEMPT, "d:1", 2))
        assert pair.wire.calls == []

    asyncio.run(run())


def test_lost_receiver_is_left_alone_for_a_while_and_greeted_anew() -> None:
    async def run() -> None:
        pair = Pair()
        await pair.ship(filling((0, 1)), Held(FORMAT), range(1))
        pair.wire.fails = PeerUnavailable("gone")
        with pytest.raises(PeerUnavailable, match="gone"):
            await pair.ship(filling((0, 1)), Held(FORMAT), range(1))
        pair.wire.fails = None
        with pytest.raises(PeerUnavailable, match="was lost a moment ago"):
            await pair.ship(filling((0, 1)), Held(FORMAT), range(1))
        pair.clock.advance(KvTransferConfig().peer_rest_seconds)
        await pair.ship(filling((0, 1)), Held(FORMAT), range(1))
        assert pair.wire.handshakes == 2

    asyncio.run(run())


def test_an_offer_of_mapped_blocks_is_as_large_as_it_may_be_and_a_span_of_its_own() -> None:
    class Mapped(TcpOutgoing):
        name = TransportName.SHM

    class Spans(SilentTracer):
        def __init__(self) -> None:
            self.attributes: list[Mapping[str, object]] = []

        def span(self, name: str, *, parent: str = "", **attributes: object) -> AbstractContextManager[None]:
            self.attributes.append(attributes)
            return nullcontext()

    async def run() -> None:
        spans, held = Spans(), Held(FORMAT)
        config = KvTransferConfig(max_message_bytes=2 * SIZE, max_mapped_bytes=8 * SIZE)
        pair = Pair(config)
        way = Mapped(FORMAT, config.checksum_policy)
        pair.receiver._identity = replace(RECEIVER, transports=("shm",))
        pair.sender = KvSender(
            SENDER, lambda _: pair.wire, [way], config=config, meter=SilentMeter(), clock=pair.clock, tracer=spans
        )
        await pair.ship(filling((0, 20)), held, range(20))
        assert [call[1:] for call in pair.wire.calls if call[0] == "offer"] == [(0, 8), (8, 8), (16, 4)]
        assert held.stored == {ordinal: block(ordinal) for ordinal in range(20)}
        assert [span["blocks"] for span in spans.attributes] == [8, 8, 4]
        assert all(span["transport"] == "shm" and span["request_id"] == "r" for span in spans.attributes)

    asyncio.run(run())


def test_one_failed_offer_cancels_the_others_and_is_the_answer() -> None:
    async def run() -> None:
        pair = Pair(KvTransferConfig(max_message_bytes=SIZE))
        pair.wire.fails = TransferRejected("no")
        with pytest.raises(TransferRejected, match="no"):
            await pair.ship(filling((0, 10)), Held(FORMAT), range(10))
        assert [name for name, _, _ in pair.wire.calls if name == "confirm"] == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_bytes_that_are_stored_wrong_are_found() -> None:
    async def run() -> None:
        with pytest.raises(CorruptTransfer, match="block 0 does not match its checksum as stored"):
            await Pair().ship(filling((0, 2)), Held(FORMAT, spoil=True), range(2))

    asyncio.run(run())


def test_payload_of_the_wrong_size_and_missing_checksums_are_refused() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        async with pair.accept(held, range(4)) as delivery:
            with pytest.raises(TransferRejected, match=r"payload: tokens 0\.\.7 are 128 bytes, got 64"):
                await pair.receiver.offer(chunk_of(delivery.ticket, 0, 2, payload=bytes(SIZE)))
            with pytest.raises(TransferRejected, match="checksums: one for each of 2 blocks is required, got 0"):
                await pair.receiver.offer(chunk_of(delivery.ticket, 0, 2))
        assert held.stored == {}

    asyncio.run(run())


def test_only_the_last_block_of_the_context_may_be_partly_filled() -> None:
    async def run() -> None:
        pair, held = Pair(KvTransferConfig(checksums="off")), Held(FORMAT)
        async with pair.receiver.accept("r", ATTEMPT, held, skip_blocks=0, context_tokens=6) as delivery:
            with pytest.raises(TransferRejected, match=r"payload: tokens 0\.\.3 are 64 bytes, got 48"):
                await pair.receiver.offer(chunk_of(delivery.ticket, 0, 1, payload=bytes(48)))
            with pytest.raises(TransferRejected, match=r"payload: tokens 4\.\.5 are 32 bytes, got 64"):
                await pair.receiver.offer(chunk_of(delivery.ticket, 1, 1))
            await pair.receiver.offer(chunk_of(delivery.ticket, 1, 1, payload=b"\7" * 32))
        assert held.stored == {1: b"\7" * 16 + bytes(16) + b"\7" * 16 + bytes(16)}  # K, then V

    asyncio.run(run())


def test_incomplete_delivery_is_named() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.accept(Held(FORMAT), range(4)) as delivery:
            await pair.sender.ship(delivery.ticket, filling((0, 3)), 0)
            with pytest.raises(TransferRejected, match="request r: 1 blocks are not valid, the first is 3"):
                pair.receiver.require_complete(delivery)

    asyncio.run(run())
