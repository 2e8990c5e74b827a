from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from baton.core.errors import BatonError, CorruptTransfer, InvalidRequest, PeerUnavailable, TransferRejected
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvFormat, KvHandshake, KvSource, Ticket
from baton.rpc import packets
from baton.rpc.packed import packed_offer
from baton.rpc.packets import MAX_PACKET, PacketAnswers, PacketCalls, PacketReceiver, Packets
from tests.gates import GENEROUS_SECONDS

TICKET = Ticket("r1", Attempt(0, 1), "d:1", 2)
CHUNK = KvChunk(TICKET, 3, 2, b"", (b"a" * 16, b"b" * 16), KvSource(7, (5, 9), "cuda-ipc"))
CONFIRMATION = KvConfirmation(TICKET, 3, 2)
HEAD_BYTES = 9  # kind and number


@dataclass
class Receiver:
    """Answers once ``gate`` is set, with ``error`` if there is one."""

    error: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[object] = field(default_factory=list[object])
    cancelled: int = 0

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        raise AssertionError("handshakes take the usual way")

    async def offer(self, chunk: KvChunk) -> None:
        await self._take(chunk)

    async def confirm(self, confirmation: KvConfirmation) -> None:
        await self._take(confirmation)

    async def _take(self, what: object) -> None:
        self.seen.append(what)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error


class Pair:
    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self.near, self.far):
            sock.setblocking(False)
        self.receiver, self.usual = Receiver(), Receiver()
        self.usual.gate.set()
        self.calls = PacketCalls(Packets(self.near), "decode-0")
        self.answers = PacketAnswers(self.receiver, Packets(self.far))
        self.short = PacketReceiver(self.calls, self.usual)
        loop = asyncio.get_running_loop()
        loop.add_reader(self.near, lambda: self.calls.take(self.near.recv(MAX_PACKET)))
        loop.add_reader(self.far, lambda: self.answers.take(self.far.recv(MAX_PACKET)))

    def close(self) -> None:
        for sock in (self.near, self.far):
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()


def run(scenario: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        pair = Pair()
        try:
            async with asyncio.timeout(GENEROUS_SECONDS):
                await scenario(pair)
        finally:
            pair.close()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def ended(call: Awaitable[None]) -> None:
    await call


def test_offers_and_confirmations_arrive_as_they_were_sent() -> None:
    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        await pair.short.offer(CHUNK)
        await pair.short.confirm(CONFIRMATION)
        assert pair.receiver.seen == [CHUNK, CONFIRMATION]

    run(scenario)


def test_an_offer_goes_when_it_is_called_and_not_when_it_is_awaited() -> None:
    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        answer = pair.short.offer(CHUNK)
        await until(lambda: pair.receiver.seen == [CHUNK])
        await answer

    run(scenario)


@pytest.mark.parametrize(
    "chunk",
    [
        KvChunk(TICKET, 3, 1, b"bytes", (b"a" * 16,)),
        replace(CHUNK, payload=b"bytes"),
        replace(CHUNK, pieces=(b"bytes",)),
        replace(CHUNK, format=KvFormat("float32", 16, 2, 1, 8)),
        replace(CHUNK, checksums=(b"a" * 15, b"b" * 17)),
        replace(CHUNK, ticket=replace(TICKET, request_id="half a character: \ud800")),
        replace(CHUNK, source=KvSource(7, (5, -1), "cuda-ipc")),
        replace(CHUNK, block_count=2**32),
    ],
)
def test_what_packets_cannot_say_takes_the_usual_way(chunk: KvChunk) -> None:
    async def scenario(pair: Pair) -> None:
        await pair.short.offer(chunk)
        assert pair.usual.seen == [chunk]
        assert pair.receiver.seen == []

    run(scenario)


def test_answers_come_back_to_their_own_calls() -> None:
    async def scenario(pair: Pair) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(ended(pair.short.offer(CHUNK)))
            await until(lambda: len(pair.receiver.seen) == 20)
            pair.receiver.gate.set()

    run(scenario)


@pytest.mark.parametrize(
    "error", [TransferRejected("blocks 1..2"), CorruptTransfer("block 3"), InvalidRequest("no", field="ticket")]
)
def test_a_refusal_comes_back_as_the_error_that_it_was(error: BatonError) -> None:
    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        pair.receiver.error = error
        with pytest.raises(type(error)) as raised:
            await pair.short.offer(CHUNK)
        assert raised.value.message == error.message

    run(scenario)


def test_a_bug_of_the_receiver_is_told_without_its_words() -> None:
    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        pair.receiver.error = ZeroDivisionError("secret")
        with pytest.raises(BatonError, match="internal error") as raised:
            await pair.short.offer(CHUNK)
        assert "secret" not in raised.value.message

    run(scenario)


def test_a_call_that_nobody_waits_for_is_cancelled_at_the_receiver() -> None:
    async def scenario(pair: Pair) -> None:
        offer = asyncio.ensure_future(pair.short.offer(CHUNK))
        await until(lambda: pair.receiver.seen)
        offer.cancel()
        await until(lambda: pair.receiver.cancelled)
        assert offer.cancelled()

    run(scenario)


def test_the_end_of_the_connection_ends_every_call() -> None:
    async def scenario(pair: Pair) -> None:
        offers = [asyncio.ensure_future(pair.short.offer(CHUNK)) for _ in range(3)]
        await until(lambda: len(pair.receiver.seen) == 3)
        pair.calls.end()
        pair.answers.close()
        ends = await asyncio.gather(*offers, return_exceptions=True)
        assert [type(end) for end in ends] == [PeerUnavailable] * 3
        await until(lambda: pair.receiver.cancelled == 3)

    run(scenario)


def test_a_connection_that_has_ended_takes_no_calls() -> None:
    async def scenario(pair: Pair) -> None:
        for sock in (pair.near, pair.far):
            asyncio.get_running_loop().remove_reader(sock)
        pair.far.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerUnavailable, match="decode-0: the connection has ended"):
            await pair.short.confirm(CONFIRMATION)

    run(scenario)


def test_what_is_too_large_for_a_packet_takes_the_usual_way() -> None:
    async def scenario(pair: Pair) -> None:
        many = 8192
        large = KvChunk(TICKET, 0, many, b"", (b"c" * 16,) * many, KvSource(7, tuple(range(many)), "cuda-ipc"))
        await pair.short.offer(large)
        assert pair.usual.seen == [large]
        assert pair.receiver.seen == []

    run(scenario)


def test_a_packet_may_be_as_large_as_the_limit_and_no_larger() -> None:
    def padded(size: int) -> KvChunk:
        return replace(CHUNK, source=KvSource(7, (5, 9), "nccl", invitation=bytes(size)))

    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        least = packed_offer(padded(0))
        assert least is not None
        room = MAX_PACKET - HEAD_BYTES - len(least)
        await pair.short.offer(padded(room))
        await pair.short.offer(padded(room + 1))
        assert pair.receiver.seen == [padded(room)]
        assert pair.usual.seen == [padded(room + 1)]

    run(scenario)


def test_what_waits_for_a_receiver_that_reads_nothing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "MAX_WAITING", 1 << 20)

    async def scenario(pair: Pair) -> None:
        asyncio.get_running_loop().remove_reader(pair.far)
        waiting = [asyncio.ensure_future(pair.short.offer(CHUNK)) for _ in range(20_000)]
        ended, still = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert still, "what fits waits"
        [error] = {str(task.exception()) for task in ended}
        assert "of at most 1048576 bytes wait already" in error
        pair.calls.end()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(scenario)


def test_more_calls_than_the_socket_holds_wait_their_turn() -> None:
    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        await asyncio.gather(*(pair.short.offer(CHUNK) for _ in range(3000)))
        assert len(pair.receiver.seen) == 3000

    run(scenario)


@pytest.mark.parametrize("packet", [b"", b"\1", b"\x63" + bytes(8), b"\1" + bytes(8) + b"\xff", b"\4" + bytes(8)])
def test_what_no_sender_says_harms_nobody(packet: bytes) -> None:
    async def scenario(pair: Pair) -> None:
        pair.receiver.gate.set()
        try:
            pair.answers.take(packet)
        except InvalidRequest as error:
            assert "packet" in error.message
        await pair.short.offer(CHUNK)
        assert pair.receiver.seen == [CHUNK]

    run(scenario)


def test_a_confirmation_of_blocks_with_and_without_checksums_takes_the_usual_way() -> None:
    async def scenario(pair: Pair) -> None:
        mixed = replace(CONFIRMATION, checksums=(b"a" * 16, b""))
        await pair.short.confirm(mixed)
        assert pair.usual.seen == [mixed]

    run(scenario)


def test_a_confirmation_that_is_too_large_for_a_packet_takes_the_usual_way() -> None:
    async def scenario(pair: Pair) -> None:
        many = MAX_PACKET // 16
        large = KvConfirmation(TICKET, 0, many, (b"c" * 16,) * many)
        await pair.short.confirm(large)
        assert pair.usual.seen == [large]
        assert pair.receiver.seen == []

    run(scenario)
