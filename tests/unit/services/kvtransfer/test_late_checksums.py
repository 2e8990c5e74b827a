"""Checksums that are made while the receiver copies, and come with the confirmation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.api import PrefillRun, WritableBlocks
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, CorruptTransfer, TransferRejected, TransportUnavailable
from baton.core.telemetry import Counter, Meter, SilentMeter
from baton.core.types import (
    Attempt,
    FilledBlocks,
    KvChunk,
    KvConfirmation,
    KvFormat,
    KvHandshake,
    KvSource,
    Ticket,
)
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.handshake import FEATURES
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.tcp import TcpIncoming, TcpOutgoing
from services.kvtransfer.transport import Digests, EarlyChunk, Outgoing, TransportName
from tests.gates import GENEROUS_SECONDS
from tests.unit.services.kvtransfer.doubles import Held, Run

FORMAT = KvFormat("fake", 4, 1, 1, 8)
SIZE = FORMAT.block_bytes
SENDER = KvHandshake("p", 1, "m", "h", FORMAT)
RECEIVER = KvHandshake("d", 2, "m", "h", FORMAT, features=FEATURES, transports=("shm", "tcp"))
ATTEMPT = Attempt(0, 1)
CONFIG = KvTransferConfig(max_mapped_bytes=2 * SIZE)
BLOCKS = 5
WHOLE = FilledBlocks(0, BLOCKS, BLOCKS * FORMAT.block_size)
STREAMED = (FilledBlocks(0, 2, 2 * FORMAT.block_size), FilledBlocks(2, 3, BLOCKS * FORMAT.block_size))
RIGHT = block_checksums(b"".join(bytes([ordinal + 1]) * SIZE for ordinal in range(BLOCKS)), 0, BLOCKS, SIZE)


def block(ordinal: int) -> bytes:
    return bytes([ordinal + 1]) * SIZE


class Early(TcpOutgoing):
    """Offers at once, as ``shm`` does; the bytes are in the offer all the same. Checksums wait for ``may_digest``."""

    name = TransportName.SHM

    def __init__(self) -> None:
        super().__init__(FORMAT, ChecksumPolicy.FULL)
        self.may_digest = asyncio.Event()
        self.may_digest.set()
        self.digested = 0  # offers
        self.fails: BatonError | None = None

    def early_chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> EarlyChunk | None:
        payload = b"".join(map(block, blocks.ordinals))
        late = b"\1" * blocks.block_count
        source = KvSource(1, (), "shm")
        chunk = KvChunk(ticket, blocks.first_block, blocks.block_count, payload, source=source, late_checksums=late)

        async def checksums() -> Digests:
            await self.may_digest.wait()
            if self.fails is not None:
                raise self.fails
            self.digested += 1
            return block_checksums(payload, blocks.first_block, blocks.block_count, SIZE)

        return EarlyChunk(chunk, checksums)


class EarlyIncoming(TcpIncoming):
    """Stores, and says what it has stored. Stores wait for ``may_store``."""

    name = TransportName.SHM

    def __init__(self) -> None:
        super().__init__(FORMAT, ChecksumPolicy.FULL)
        self.may_store = asyncio.Event()
        self.may_store.set()
        self.fails: BatonError | None = None

    async def store(self, chunk: KvChunk, reservation: WritableBlocks, tokens: int) -> Digests | None:
        await self.may_store.wait()
        if self.fails is not None:
            raise self.fails
        return await super().store(chunk, reservation, tokens)


class Pair:
    """A sender and a receiver, which remembers what it was asked and told, in order."""

    def __init__(self, receiver: KvHandshake = RECEIVER, meter: Meter | None = None) -> None:
        self.outgoing, self.incoming = Early(), EarlyIncoming()
        clock = ManualClock()
        tcp = TcpIncoming(FORMAT, ChecksumPolicy.FULL)
        self.receiver = KvReceiver(receiver, "d:1", tcp, self.incoming, meter=meter or SilentMeter(), clock=clock)
        self.chunks: list[KvChunk] = []
        self.confirmations: list[KvConfirmation] = []
        self.order: list[str] = []
        ways: Sequence[Outgoing] = [self.outgoing, TcpOutgoing(FORMAT, ChecksumPolicy.FULL)]
        self.sender = KvSender(SENDER, lambda _: self, ways, config=CONFIG, meter=SilentMeter(), clock=clock)  # type: ignore[arg-type, return-value]

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.receiver.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.chunks.append(chunk)
        self.order.append("offer")
        await self.receiver.offer(chunk)
        self.order.append("acknowledged")

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.confirmations.append(confirmation)
        self.order.append("confirm")
        await self.receiver.confirm(confirmation)

    async def ship(self, held: Held, *pieces: FilledBlocks, turns: int = 0) -> None:
        run = Run(block, pieces or [WHOLE], turns)
        async with asyncio.timeout(GENEROUS_SECONDS):
            tokens = BLOCKS * FORMAT.block_size
            async with self.receiver.accept("r", ATTEMPT, held, skip_blocks=0, context_tokens=tokens) as delivery:
                await self.sender.ship(delivery.ticket, run, 0)
                self.receiver.require_complete(delivery)


async def until(holds: object) -> None:
    async with asyncio.timeout(GENEROUS_SECONDS):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0)


def test_the_confirmation_is_on_its_way_before_the_acknowledgement() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        pair.incoming.may_store.clear()
        shipping = asyncio.create_task(pair.ship(held))
        await until(lambda: "confirm" in pair.order)
        assert "acknowledged" not in pair.order
        assert pair.confirmations[0].checksums == RIGHT
        pair.incoming.may_store.set()
        await shipping
        assert [chunk.checksums for chunk in pair.chunks] == [(), (), ()]
        assert held.stored == {ordinal: block(ordinal) for ordinal in range(BLOCKS)}
        assert len(pair.confirmations) == 1

    asyncio.run(run())


def test_of_a_streamed_prompt_it_is_on_its_way_before_the_last_acknowledgement_too() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        shipping = asyncio.create_task(pair.ship(held, *STREAMED, turns=60))
        await until(lambda: pair.order == ["offer", "acknowledged"] and pair.outgoing.digested == 1)
        pair.incoming.may_store.clear()
        pair.outgoing.may_digest.clear()
        for _ in range(200):  # until all is computed and offered
            await asyncio.sleep(0)
        pair.outgoing.may_digest.set()
        await until(lambda: "confirm" in pair.order)
        assert pair.order.count("acknowledged") == 1
        pair.incoming.may_store.set()
        await shipping
        assert [confirmation.checksums for confirmation in pair.confirmations] == [RIGHT]

    asyncio.run(run())


def test_one_hand_over_has_blocks_whose_checksums_came_with_the_offer_and_blocks_whose_did_not() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        shipping = asyncio.create_task(pair.ship(held, *STREAMED, turns=60))
        await until(lambda: pair.order == ["offer", "acknowledged"] and pair.outgoing.digested == 1)
        pair.outgoing.may_digest.clear()
        pair.incoming.fails = TransportUnavailable("the sender has called anew")
        await shipping
        assert [confirmation.checksums for confirmation in pair.confirmations] == [(*RIGHT[:2], b"", b"", b"")]
        assert pair.order[-1] == "confirm", "it has waited for all acknowledgements"
        assert held.stored == {ordinal: block(ordinal) for ordinal in range(BLOCKS)}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_sender_that_is_cancelled_leaves_no_confirmation_behind() -> None:
    async def run() -> None:
        pair = Pair()
        pair.incoming.may_store.clear()
        shipping = asyncio.create_task(pair.ship(Held(FORMAT)))
        await until(lambda: "confirm" in pair.order)
        shipping.cancel()
        await asyncio.wait({shipping})
        assert shipping.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert pair.receiver.open_tickets == 0

    asyncio.run(run())


def test_a_confirmation_waits_for_the_last_checksum() -> None:
    async def run() -> None:
        pair = Pair()
        pair.outgoing.may_digest.clear()
        shipping = asyncio.create_task(pair.ship(Held(FORMAT)))
        await until(lambda: pair.order.count("acknowledged") == 3)
        assert "confirm" not in pair.order
        pair.outgoing.may_digest.set()
        await shipping

    asyncio.run(run())


def test_what_was_stored_wrong_is_never_valid() -> None:
    async def run() -> None:
        pair = Pair()
        with pytest.raises(CorruptTransfer, match="block 0 does not match its checksum as stored"):
            await pair.ship(Held(FORMAT, spoil=True))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_receiver_that_does_not_take_them_late_gets_them_with_the_offers() -> None:
    async def run() -> None:
        pair = Pair(replace(RECEIVER, features=()))
        await pair.ship(Held(FORMAT))
        assert all(len(chunk.checksums) == chunk.block_count for chunk in pair.chunks)
        assert not any(chunk.late_checksums for chunk in pair.chunks)
        assert [confirmation.checksums for confirmation in pair.confirmations] == [()]
        assert pair.order[-1] == "confirm"

    asyncio.run(run())


def test_blocks_whose_transport_fails_come_by_the_next_one_with_their_checksums() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT)
        pair.incoming.fails = TransportUnavailable("the sender has called anew")
        await pair.ship(held)
        assert held.stored == {ordinal: block(ordinal) for ordinal in range(BLOCKS)}
        assert all(chunk.checksums for chunk in pair.chunks if chunk.source is None)

    asyncio.run(run())


def test_a_checksum_that_cannot_be_made_ends_the_hand_over() -> None:
    async def run() -> None:
        pair = Pair()
        pair.outgoing.fails = TransferRejected("blocks 0..1 are not the request's")
        with pytest.raises(TransferRejected, match="not the request's"):
            await pair.ship(Held(FORMAT))
        assert pair.confirmations == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def _offered(pair: Pair, ticket: Ticket) -> None:
    """Blocks 0 and 1, whose checksums have yet to come."""
    early = pair.outgoing.early_chunk(ticket, Run(block, ()), FilledBlocks(0, 2, 8))
    assert early is not None
    await pair.receiver.offer(early.chunk)


def test_blocks_whose_checksums_never_come_are_not_confirmed() -> None:
    async def run() -> None:
        pair = Pair()
        right, held = RIGHT[:2], Held(FORMAT)
        async with pair.receiver.accept("r", ATTEMPT, held, skip_blocks=0, context_tokens=8) as delivery:
            await _offered(pair, delivery.ticket)
            for checksums in ((), (right[0], b"")):
                with pytest.raises(TransferRejected, match="was offered without, and none came"):
                    await pair.receiver.confirm(KvConfirmation(delivery.ticket, 0, 2, checksums))
            with pytest.raises(TransferRejected, match="one for each of 2 blocks is required, got 1"):
                await pair.receiver.confirm(KvConfirmation(delivery.ticket, 0, 2, right[:1]))
            with pytest.raises(CorruptTransfer, match="block 1"):
                await pair.receiver.confirm(KvConfirmation(delivery.ticket, 0, 2, (right[0], right[0])))
            with pytest.raises(TransferRejected, match="2 blocks are not valid"):
                pair.receiver.require_complete(delivery)
            await pair.receiver.confirm(KvConfirmation(delivery.ticket, 0, 2, right))
            pair.receiver.require_complete(delivery)

    asyncio.run(run())


def test_a_confirmation_that_overtakes_the_offers_waits_for_them_and_counts_once() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.receiver.accept("r", ATTEMPT, Held(FORMAT), skip_blocks=0, context_tokens=8) as delivery:
            confirmation = KvConfirmation(delivery.ticket, 0, 2, RIGHT[:2])
            first, second = (asyncio.create_task(pair.receiver.confirm(confirmation)) for _ in range(2))
            await asyncio.sleep(0)
            await _offered(pair, delivery.ticket)
            await asyncio.wait_for(first, GENEROUS_SECONDS)
            with pytest.raises(TransferRejected, match="block 0 of request r: already confirmed"):
                await asyncio.wait_for(second, GENEROUS_SECONDS)
            with pytest.raises(TransferRejected, match="block 0 of request r: already confirmed"):
                await _offered(pair, delivery.ticket)
            pair.receiver.require_complete(delivery)

    asyncio.run(run())


def test_a_block_that_came_wrong_and_comes_again_with_its_checksum_is_valid() -> None:
    async def run() -> None:
        pair, held = Pair(), Held(FORMAT, spoil=True)
        async with pair.receiver.accept("r", ATTEMPT, held, skip_blocks=0, context_tokens=8) as delivery:
            await _offered(pair, delivery.ticket)
            held.stored.clear()
            held.spoil = False
            await pair.receiver.offer(KvChunk(delivery.ticket, 0, 2, block(0) + block(1), RIGHT[:2]))
            await pair.receiver.confirm(KvConfirmation(delivery.ticket, 0, 2))
            pair.receiver.require_complete(delivery)

    asyncio.run(run())


def test_a_confirmation_that_waits_for_blocks_ends_with_the_ticket() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.receiver.accept("r", ATTEMPT, Held(FORMAT), skip_blocks=0, context_tokens=8) as delivery:
            late = KvConfirmation(delivery.ticket, 0, 2, (bytes(16), bytes(16)))
            waiting = asyncio.create_task(pair.receiver.confirm(late))
            await asyncio.sleep(0)
            assert not waiting.done()
            with pytest.raises(TransferRejected, match="not acknowledged"):
                await pair.receiver.confirm(replace(late, checksums=()))
        with pytest.raises(TransferRejected, match="no ticket is open"):
            await asyncio.wait_for(waiting, GENEROUS_SECONDS)

    asyncio.run(run())


def test_tcp_takes_checksums_later_for_every_block_or_none_at_all() -> None:
    async def run() -> None:
        pair = Pair()
        async with pair.receiver.accept("r", ATTEMPT, Held(FORMAT), skip_blocks=0, context_tokens=8) as delivery:
            chunk = KvChunk(delivery.ticket, 0, 2, block(0) + block(1), late_checksums=b"\1")
            with pytest.raises(TransferRejected, match="late_checksums: a byte for each of 2 blocks is required"):
                await pair.receiver.offer(chunk)

    asyncio.run(run())


class Failures(SilentMeter):
    """Of receivers: what they are labelled with."""

    def __init__(self) -> None:
        self.counted: list[dict[str, str]] = []

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        return self if name == "kv_receive_failures" else super().counter(name, help, labels)

    def add(self, amount: float = 1.0, **labels: str) -> None:
        self.counted.append(labels)


def test_a_wrong_block_counts_against_the_transport_that_brought_it() -> None:
    async def run() -> None:
        meter = Failures()
        pair = Pair(meter=meter)
        with pytest.raises(CorruptTransfer):
            await pair.ship(Held(FORMAT, spoil=True))
        assert meter.counted == [{"transport": "shm", "cause": CorruptTransfer.reason}]

    asyncio.run(run())
