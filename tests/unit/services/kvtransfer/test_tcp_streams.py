"""Offers by tcp that go as one message after another: how large they are, what is found wrong, and to whom they go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from baton.core.api import KvReceiverApi, PrefillRun
from baton.core.clock import ManualClock
from baton.core.errors import BatonError, CorruptTransfer, PeerUnavailable, TransferRejected
from baton.core.telemetry import SilentMeter
from baton.core.types import Attempt, FilledBlocks, KvChunk, KvConfirmation, KvFormat, KvHandshake, Ticket
from baton.engine.native.block_copy import best_block_copy
from baton.engine.ownpool import OwnPool
from baton.engine.sharedpool import PoolMemory
from services.kvtransfer.config import ChecksumPolicy, KvTransferConfig
from services.kvtransfer.handshake import FEATURES, LATE_CHECKSUMS, RESLICE
from services.kvtransfer.layout import pack
from services.kvtransfer.pool_blocks import PoolBlocks, pool_blocks
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.tcp import TcpIncoming, TcpOutgoing
from tests.gates import GENEROUS_SECONDS
from tests.unit.services.kvtransfer.doubles import Filled, Held, Run

LAYOUT = KvFormat("bfloat16", 4, 3, 2, 16)
SIZE = LAYOUT.block_bytes
BLOCKS, FILLED = 7, 3
TOKENS = (BLOCKS - 1) * LAYOUT.block_size + FILLED
THERE, HERE = (5, 0, 3, 2, 7, 1, 4), (6, 2, 0, 7, 3, 5, 1)  # where the sequence's blocks stand in the two pools
SENDER = KvHandshake("p", 1, "m", "h", LAYOUT, features=FEATURES)
RECEIVER = KvHandshake("d", 2, "m", "h", LAYOUT, features=FEATURES)
OLD = replace(RECEIVER, features=(RESLICE, LATE_CHECKSUMS))
ATTEMPT = Attempt(0, 1)
CONFIG = KvTransferConfig(max_message_bytes=2 * SIZE, max_mapped_bytes=5 * SIZE)
PART_BYTES = 2 * SIZE
WHOLE = FilledBlocks(0, BLOCKS, TOKENS)


class StandingRun(Run):
    """Of a prompt whose blocks stand in the sender's pool."""

    def __init__(self, view: memoryview, numbers: tuple[int, ...] = HERE) -> None:
        super().__init__(lambda at: bytes(view[numbers[at] * SIZE : (numbers[at] + 1) * SIZE]), [WHOLE])
        self._numbers = numbers

    def block_ids(self, first_block: int, block_count: int) -> tuple[int, ...]:
        return self._numbers[first_block : first_block + block_count]


class Wire(KvReceiverApi):
    """Takes chunks apart as the client of a receiver does; ``on_message`` may change what comes, or fail."""

    def __init__(self, receiver: KvReceiverApi) -> None:
        self._receiver = receiver
        self.offers: list[KvChunk] = []
        self.confirmations: list[KvConfirmation] = []
        self.messages = 0
        self.on_message: Callable[[KvChunk], Awaitable[KvChunk]] | None = None

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self._receiver.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.offers.append(chunk)
        for part in chunk.parts(PART_BYTES):
            self.messages += 1
            message = replace(part, payload=bytes(part.body), pieces=())
            await self._receiver.offer(message if self.on_message is None else await self.on_message(message))

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.confirmations.append(confirmation)
        await self._receiver.confirm(confirmation)


class Pair:
    """Two workers, whose pools their fronts have mapped unless ``sends_mapped`` or ``takes_mapped`` says otherwise."""

    def __init__(
        self,
        life: ExitStack,
        hello: KvHandshake = RECEIVER,
        config: KvTransferConfig = CONFIG,
        *,
        sends_mapped: bool = True,
        takes_mapped: bool = True,
    ) -> None:
        self.source, self.target = PoolMemory(8, LAYOUT), PoolMemory(8, LAYOUT)
        self.own = OwnPool(os.dup(self.target.fd), LAYOUT)
        for memory in (self.source, self.target):
            life.callback(memory.close)
        life.callback(self.own.close)
        self.source.view[:] = bytes((3 + 7 * at + at // SIZE) % 251 for at in range(8 * SIZE))
        self.held = Filled(self.own, LAYOUT, THERE) if takes_mapped else Held(hello.format)
        here: PoolBlocks | None = None
        if sends_mapped:
            here = life.enter_context(pool_blocks(self.source, LAYOUT, best_block_copy()))  # type: ignore[arg-type]
        policy, clock = config.checksum_policy, ManualClock()
        tcp = TcpIncoming(hello.format, policy, self.own if takes_mapped else None)
        self.receiver = KvReceiver(hello, "d:1", tcp, meter=SilentMeter(), clock=clock)
        self.wire = Wire(self.receiver)
        ways = [TcpOutgoing(LAYOUT, policy, here)]
        self.sender = KvSender(SENDER, lambda _: self.wire, ways, config=config, meter=SilentMeter(), clock=clock)

    async def ship(self) -> None:
        run = StandingRun(self.source.view)
        async with asyncio.timeout(GENEROUS_SECONDS):
            async with self.receiver.accept("r", ATTEMPT, self.held, skip_blocks=0, context_tokens=TOKENS) as delivery:
                try:
                    await self.sender.ship(delivery.ticket, run, 0)
                except BatonError:
                    with pytest.raises(TransferRejected, match="not valid"):
                        self.receiver.require_complete(delivery)
                    raise
                self.receiver.require_complete(delivery)

    @property
    def sent(self) -> bytes:
        return pack(b"".join(self.source.view[at * SIZE : (at + 1) * SIZE] for at in HERE), LAYOUT, FILLED)

    @property
    def stored(self) -> bytes:
        if isinstance(self.held, Filled):
            whole = b"".join(self.target.view[at * SIZE : (at + 1) * SIZE] for at in THERE)
        else:
            whole = b"".join(self.held.stored[ordinal] for ordinal in sorted(self.held.stored))
        return pack(whole, LAYOUT, FILLED)

    @property
    def offered(self) -> list[int]:
        """Blocks of each offer."""
        return [chunk.block_count for chunk in self.wire.offers]


@contextmanager
def pair(
    hello: KvHandshake = RECEIVER,
    config: KvTransferConfig = CONFIG,
    *,
    sends_mapped: bool = True,
    takes_mapped: bool = True,
) -> Iterator[Pair]:
    with ExitStack() as life:
        yield Pair(life, hello, config, sends_mapped=sends_mapped, takes_mapped=takes_mapped)


@pytest.mark.parametrize("checksums", list(ChecksumPolicy))
@pytest.mark.parametrize("takes_mapped", [True, False])
def test_a_stream_is_as_large_as_an_offer_of_mapped_memory_and_every_block_arrives(
    checksums: ChecksumPolicy, takes_mapped: bool
) -> None:
    async def run() -> None:
        config = replace(CONFIG, checksums=checksums.value)
        with pair(config=config, takes_mapped=takes_mapped) as found:
            await found.ship()
            assert found.offered == [5, 2]
            assert found.wire.messages == 3 + 1
            assert found.stored == found.sent
            late = checksums is ChecksumPolicy.FULL
            assert [bool(chunk.late_checksums) for chunk in found.wire.offers] == [late] * 2
            assert [len(each.checksums) for each in found.wire.confirmations] == [BLOCKS if late else 0]
            assert not any(chunk.checksums for chunk in found.wire.offers)

    asyncio.run(run())


@pytest.mark.parametrize("features", [(), (RESLICE, LATE_CHECKSUMS)])
def test_a_receiver_of_an_older_version_gets_each_offer_in_one_message_with_its_checksums(
    features: tuple[str, ...],
) -> None:
    async def run() -> None:
        with pair(replace(OLD, features=features)) as found:
            await found.ship()
            assert found.offered == [2, 2, 2, 1]
            assert found.wire.messages == 4
            for chunk in found.wire.offers:
                assert chunk.part_count(1) == 1
                assert (chunk.late_checksums, len(chunk.checksums)) == (b"", chunk.block_count)
            assert [each.checksums for each in found.wire.confirmations] == [()]
            assert found.stored == found.sent

    asyncio.run(run())


def test_an_older_version_is_asked_for_its_hand_shake_as_usual() -> None:
    async def run() -> None:
        with pair(OLD) as found:
            only = TcpOutgoing(LAYOUT, ChecksumPolicy.FULL).receiver(OLD, found.wire)
            assert await only.handshake(SENDER) == OLD

    asyncio.run(run())


def test_blocks_that_are_fetched_from_the_engine_go_in_messages_of_bounded_size() -> None:
    async def run() -> None:
        with pair(sends_mapped=False) as found:
            await found.ship()
            assert found.offered == [2, 2, 2, 1]
            assert found.stored == found.sent

    asyncio.run(run())


def test_blocks_that_are_converted_go_in_offers_of_bounded_size_and_are_not_taken_apart() -> None:
    async def run() -> None:
        theirs = replace(RECEIVER, format=replace(LAYOUT, block_size=2))
        with pair(theirs, takes_mapped=False) as found:
            await found.ship()
            assert found.offered == [2, 2, 2, 1]
            assert found.wire.messages == 4
            assert all(len(chunk.checksums) == chunk.block_count for chunk in found.wire.offers)

    asyncio.run(run())


@pytest.mark.parametrize("takes_mapped", [True, False])
@pytest.mark.parametrize("message", range(4))
def test_one_bit_that_flips_in_any_message_is_found(message: int, takes_mapped: bool) -> None:
    async def run() -> None:
        with pair(takes_mapped=takes_mapped) as found:
            first_blocks = (0, 2, 4, 5)

            async def flip(part: KvChunk) -> KvChunk:
                if part.first_block != first_blocks[message]:
                    return part
                wrong = bytearray(part.payload)
                wrong[-1] ^= 1
                return replace(part, payload=bytes(wrong))

            found.wire.on_message = flip
            with pytest.raises(CorruptTransfer, match="as stored"):
                await found.ship()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_refusal_amid_a_stream_ends_the_hand_over() -> None:
    async def run() -> None:
        with pair() as found:

            async def refuse(part: KvChunk) -> KvChunk:
                if part.first_block == 2:
                    raise TransferRejected("no ticket is open")
                return part

            found.wire.on_message = refuse
            with pytest.raises(TransferRejected, match="no ticket is open"):
                await found.ship()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_sender_that_is_cancelled_amid_a_stream_leaves_nothing_behind() -> None:
    async def run() -> None:
        with pair() as found:
            begun, never = asyncio.Event(), asyncio.Event()

            async def hold(part: KvChunk) -> KvChunk:
                if part.first_block == 2:
                    begun.set()
                    await never.wait()
                return part

            found.wire.on_message = hold
            shipping = asyncio.create_task(found.ship())
            await asyncio.wait_for(begun.wait(), GENEROUS_SECONDS)
            shipping.cancel()
            await asyncio.wait({shipping})
            assert shipping.cancelled()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert found.receiver.open_tickets == 0

    asyncio.run(run())


LARGE = KvFormat("bfloat16", 64, 8, 8, 128)  # a block is 2 MiB: a message
LIMIT = 0.3


class LargeBlocks(TcpOutgoing):
    """In pieces, or in one."""

    def __init__(self, in_pieces: bool) -> None:
        super().__init__(LARGE, ChecksumPolicy.OFF)
        self._in_pieces = in_pieces

    def is_streamed(self, receiver: KvHandshake) -> bool:
        return True

    async def chunk(self, ticket: Ticket, run: PrefillRun, blocks: FilledBlocks) -> KvChunk:
        pieces = (bytes(LARGE.block_bytes),) * blocks.block_count
        chunk = KvChunk(ticket, blocks.first_block, blocks.block_count, b"", pieces=pieces)
        return chunk if self._in_pieces else replace(chunk, payload=chunk.body, pieces=())


class Slow(KvReceiverApi):
    """Takes ``seconds`` for an offer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return replace(RECEIVER, format=LARGE)

    async def offer(self, chunk: KvChunk) -> None:
        loop = asyncio.get_running_loop()
        taken_at = loop.time() + self._seconds
        while loop.time() < taken_at:
            await asyncio.sleep(LIMIT / 20)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        assert confirmation.block_count == 4


@pytest.mark.parametrize(
    ("in_pieces", "seconds", "silent_for"),
    [(True, 2 * LIMIT, ""), (False, 2 * LIMIT, "0.3 s"), (True, 100 * LIMIT, "1.2 s")],
)
def test_each_message_of_an_offer_may_take_as_long_as_an_answer_and_no_longer(
    in_pieces: bool, seconds: float, silent_for: str
) -> None:
    async def run() -> None:
        assert LARGE.block_bytes == 2 << 20
        mine, config = replace(SENDER, format=LARGE), KvTransferConfig(acknowledge_seconds=LIMIT)
        receiver, ways = Slow(seconds), [LargeBlocks(in_pieces)]
        sender = KvSender(mine, lambda _: receiver, ways, config=config, meter=SilentMeter(), clock=ManualClock())
        ticket = Ticket("r", ATTEMPT, "d:1", RECEIVER.epoch)
        of_four = Run(lambda _: b"", [FilledBlocks(0, 4, 4 * LARGE.block_size)])
        async with asyncio.timeout(GENEROUS_SECONDS):
            if silent_for:
                with pytest.raises(PeerUnavailable, match=f"no answer within {silent_for}"):
                    await sender.ship(ticket, of_four, 0)
            else:
                assert await sender.ship(ticket, of_four, 0) == 4 * LARGE.block_bytes

    asyncio.run(run())
