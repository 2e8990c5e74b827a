"""Blocks that came by tcp, filled by the front of a worker whose pool it has mapped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import CorruptTransfer, TransferRejected
from baton.core.telemetry import SilentMeter
from baton.core.types import Attempt, KvChunk, KvConfirmation, KvFormat, KvHandshake, Ticket
from baton.engine.ownpool import OwnPool
from baton.engine.sharedpool import PoolMemory
from services.kvtransfer.checksum import block_checksums
from services.kvtransfer.config import ChecksumPolicy
from services.kvtransfer.layout import pack
from services.kvtransfer.receiver import Delivery, KvReceiver
from services.kvtransfer.tcp import TcpIncoming
from tests.unit.services.kvtransfer.doubles import Filled

LAYOUT = KvFormat("bfloat16", 4, 3, 2, 16)
SIZE = LAYOUT.block_bytes
IDENTITY = KvHandshake("d", 2, "model", "weights", LAYOUT)
ATTEMPT = Attempt(0, 1)
BLOCKS, FILLED = 4, 3
KV = pack(bytes((3 + 7 * at + at // SIZE) % 251 for at in range(BLOCKS * SIZE)), LAYOUT, FILLED)
TOKENS = (BLOCKS - 1) * LAYOUT.block_size + FILLED
NUMBERS = (5, 0, 3, 2)


class Worker:
    def __init__(self, checksums: ChecksumPolicy) -> None:
        self.memory = PoolMemory(6, LAYOUT)
        self.own = OwnPool(os.dup(self.memory.fd), LAYOUT)
        self.held = Filled(self.own, LAYOUT, NUMBERS)
        tcp = TcpIncoming(LAYOUT, checksums, self.own)
        self.receiver = KvReceiver(IDENTITY, "d:1", tcp, meter=SilentMeter(), clock=ManualClock())

    def stored(self) -> bytes:
        return b"".join(self.memory.view[number * SIZE : (number + 1) * SIZE] for number in NUMBERS)

    def close(self) -> None:
        self.own.close()
        self.memory.close()


Scenario = Callable[[Worker, Delivery], Coroutine[Any, Any, None]]


def receiving(scenario: Scenario, checksums: ChecksumPolicy = ChecksumPolicy.FULL) -> None:
    async def main() -> None:
        worker = Worker(checksums)
        async with (
            asyncio.timeout(30),
            worker.receiver.accept("r", ATTEMPT, worker.held, skip_blocks=0, context_tokens=TOKENS) as delivery,
        ):
            await scenario(worker, delivery)
        worker.close()

    asyncio.run(main())


def chunk_of(ticket: Ticket, payload: bytes = KV) -> KvChunk:
    return KvChunk(ticket, 0, BLOCKS, payload, block_checksums(KV, 0, BLOCKS, SIZE))


@pytest.fixture
def one_block_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvtransfer.pool_blocks.TURN_BYTES", SIZE)


@pytest.mark.parametrize("checksums", list(ChecksumPolicy))
def test_offered_bytes_stand_in_the_pool_when_they_are_acknowledged(checksums: ChecksumPolicy) -> None:
    async def scenario(worker: Worker, delivery: Delivery) -> None:
        offered = chunk_of(delivery.ticket)
        await worker.receiver.offer(offered if checksums is ChecksumPolicy.FULL else replace(offered, checksums=()))
        assert pack(worker.stored(), LAYOUT, FILLED) == KV
        with pytest.raises(TransferRejected, match="not valid"):
            worker.receiver.require_complete(delivery)  # which takes the confirmation, too
        await worker.receiver.confirm(KvConfirmation(delivery.ticket, 0, BLOCKS))
        worker.receiver.require_complete(delivery)
        assert (delivery.bytes_received, worker.held.stored) == (len(KV), {})

    receiving(scenario, checksums)


@pytest.mark.usefixtures("one_block_a_turn")
def test_the_front_goes_on_between_the_turns_of_a_large_offer() -> None:
    async def scenario(worker: Worker, delivery: Delivery) -> None:
        turns: list[int] = []
        offering = asyncio.create_task(worker.receiver.offer(chunk_of(delivery.ticket)))
        while not offering.done():
            await asyncio.sleep(0)
            turns.append(len(worker.held.fills))
        await offering
        assert {1, 2, 3, 4} <= set(turns)
        assert worker.held.fills == [(0, SIZE), (1, SIZE), (2, SIZE), (3, FILLED * LAYOUT.token_bytes)]
        assert pack(worker.stored(), LAYOUT, FILLED) == KV

    receiving(scenario)


@pytest.mark.parametrize("at", [0, len(KV) // 2, len(KV) - 1])
def test_one_flipped_bit_is_never_acknowledged(at: int) -> None:
    async def scenario(worker: Worker, delivery: Delivery) -> None:
        wrong = bytearray(KV)
        wrong[at] ^= 1
        with pytest.raises(CorruptTransfer, match="as stored"):
            await worker.receiver.offer(chunk_of(delivery.ticket, bytes(wrong)))
        with pytest.raises(TransferRejected, match="not acknowledged"):
            await worker.receiver.confirm(KvConfirmation(delivery.ticket, 0, BLOCKS))

    receiving(scenario)


def test_what_is_stored_is_what_the_checksums_are_compared_with() -> None:
    async def scenario(worker: Worker, delivery: Delivery) -> None:
        worker.held.spoil = True
        with pytest.raises(CorruptTransfer, match=r"block 0 .* as stored"):
            await worker.receiver.offer(chunk_of(delivery.ticket))

    receiving(scenario)


def test_late_foreign_and_misshapen_offers_are_refused_before_a_byte_is_written() -> None:
    async def scenario(worker: Worker, delivery: Delivery) -> None:
        right = chunk_of(delivery.ticket)
        wrong = (
            replace(right, ticket=replace(right.ticket, receiver_epoch=3)),
            replace(right, ticket=replace(right.ticket, attempt=Attempt(0, 2))),
            replace(right, first_block=1),
            replace(right, payload=KV[:-1]),
            replace(right, payload=KV + KV[:SIZE]),
            replace(right, checksums=right.checksums[:-1]),
        )
        for each in wrong:
            with pytest.raises(TransferRejected):
                await worker.receiver.offer(each)
        assert worker.held.fills == []
        assert not any(worker.memory.view)

    receiving(scenario)


@pytest.mark.usefixtures("one_block_a_turn")
def test_a_ticket_ends_only_after_a_filling_that_has_begun() -> None:
    """So that the reservation behind it is still there at every turn."""

    async def main() -> None:
        worker = Worker(ChecksumPolicy.FULL)
        accepting = worker.receiver.accept("r", ATTEMPT, worker.held, skip_blocks=0, context_tokens=TOKENS)
        async with asyncio.timeout(30), accepting as delivery:
            offering = asyncio.create_task(worker.receiver.offer(chunk_of(delivery.ticket)))
            while not worker.held.fills:
                await asyncio.sleep(0)
        assert len(worker.held.fills) == BLOCKS
        with pytest.raises(TransferRejected, match="closed during the write"):
            await offering
        worker.close()

    asyncio.run(main())


@pytest.mark.usefixtures("one_block_a_turn")
def test_a_filling_whose_offer_is_cancelled_stops_and_is_not_acknowledged() -> None:
    async def scenario(worker: Worker, delivery: Delivery) -> None:
        offering = asyncio.create_task(worker.receiver.offer(chunk_of(delivery.ticket)))
        while not worker.held.fills:
            await asyncio.sleep(0)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering
        assert len(worker.held.fills) < BLOCKS
        await worker.receiver.offer(chunk_of(delivery.ticket))  # it may be offered once more
        assert pack(worker.stored(), LAYOUT, FILLED) == KV

    receiving(scenario)
