"""One suite over the transports that map a sender's pool: who is let in, what is mapped, and until when."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.api import PrefillRun, Reservation
from baton.core.errors import CorruptTransfer, TransferRejected, TransportUnavailable
from baton.core.types import KvSource, LocalDoor
from services.kvtransfer.transport import TransportName
from tests.contract.mapped_workers import PROMPT, TICKET, WHOLE, Scenario, Worker, run_pair, sharing, until, worker
from tests.gates import GENEROUS_SECONDS


@pytest.fixture(params=[TransportName.SHM, TransportName.CUDA_IPC])
def kind(request: pytest.FixtureRequest) -> TransportName:
    return request.param


@pytest.fixture
def run(kind: TransportName) -> Callable[[Scenario], None]:
    return lambda scenario: run_pair(kind, scenario)


def mappings() -> int:
    """Of pools, in this process: a view that is garbage holds one until it is collected."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:baton-kv")


@asynccontextmanager
async def computed(sender: Worker, receiver: Worker) -> AsyncIterator[tuple[Reservation, PrefillRun]]:
    """A reservation at the receiver that the sender has called, and the same prompt's blocks, whole at the sender."""
    await sender.kv.outgoing.open(receiver.answer)
    async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
        await source.first_token()
        yield reservation, source


def test_blocks_get_into_the_reservation_and_nothing_travels(run: Callable[[Scenario], None]) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        outgoing, incoming = sender.kv.outgoing, receiver.kv.incoming
        assert outgoing.reaches(receiver.answer)
        await outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            first = await source.first_token()
            chunk = await outgoing.chunk(TICKET, source, WHOLE)
            assert chunk.payload == b""
            await incoming.store(chunk, reservation, tokens=22)
            assert await reservation.read_blocks(0, 5) == await source.read_blocks(0, 5)
            tokens = [token async for chunk in reservation.decode(first) for token in chunk.token_ids]
        assert len(tokens) == 3, "the fake decodes from these bytes, and it would notice wrong ones"
        assert receiver.engine.stats.prompt_tokens_computed == 0

    run(scenario)


def test_wrong_blocks_and_wrong_checksums_are_corrupt(run: Callable[[Scenario], None]) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with computed(sender, receiver) as (reservation, source):
            chunk = await sender.kv.outgoing.chunk(TICKET, source, WHOLE)
            assert chunk.source is not None
            a, b, *rest = chunk.source.blocks
            flipped = bytes([chunk.checksums[1][0] ^ 1]) + chunk.checksums[1][1:]
            for bad in (
                replace(chunk, source=replace(chunk.source, blocks=(b, a, *rest))),
                replace(chunk, source=replace(chunk.source, blocks=(a, b, a, *rest[1:]))),
                replace(chunk, checksums=(chunk.checksums[0], flipped, *chunk.checksums[2:])),
            ):
                with pytest.raises(CorruptTransfer, match="as stored"):
                    await receiver.kv.incoming.store(bad, reservation, tokens=22)
            for bad in (
                replace(chunk, source=replace(chunk.source, blocks=(a, b))),
                replace(chunk, checksums=chunk.checksums[:2]),
                replace(chunk, payload=b"x"),
            ):
                with pytest.raises(TransferRejected):
                    await receiver.kv.incoming.store(bad, reservation, tokens=22)

    run(scenario)


def test_blocks_are_stored_before_their_checksums_are_made_and_compared_with_them(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with computed(sender, receiver) as (reservation, source):
            early = sender.kv.outgoing.early_chunk(TICKET, source, WHOLE)
            assert early is not None
            assert early.chunk.checksums == ()
            found = await receiver.kv.incoming.store(early.chunk, reservation, tokens=22)
            checksums = await early.checksums()
            assert found == checksums
            assert checksums == (await sender.kv.outgoing.chunk(TICKET, source, WHOLE)).checksums
            assert early.chunk.source is not None
            a, b, *rest = early.chunk.source.blocks
            swapped = replace(early.chunk, source=replace(early.chunk.source, blocks=(b, a, *rest)))
            found = await receiver.kv.incoming.store(swapped, reservation, tokens=22)
            assert found is not None
            assert [one == other for one, other in zip(found, checksums, strict=True)] == [False, False, *[True] * 4]
            for bad in (
                replace(early.chunk, late_checksums=b"\1" * 5),
                replace(early.chunk, late_checksums=b"\1" * 7),
                replace(early.chunk, checksums=checksums),
            ):
                with pytest.raises(TransferRejected, match="late_checksums: a byte for each of 6 blocks"):
                    await receiver.kv.incoming.store(bad, reservation, tokens=22)

    run(scenario)


def test_blocks_of_an_epoch_that_never_called_or_blocks_outside_its_pool_are_refused(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with computed(sender, receiver) as (reservation, source):
            chunk = await sender.kv.outgoing.chunk(TICKET, source, WHOLE)
            name = sender.kv.outgoing.name
            for bad in (KvSource(77, (0, 1, 2, 3, 4, 5), name), KvSource(1, (0, 1, 2, 3, 4, 32), name)):
                with pytest.raises(TransportUnavailable):
                    await receiver.kv.incoming.store(replace(chunk, source=bad), reservation, tokens=22)

    run(scenario)


def test_a_sender_that_ends_is_unmapped_and_its_late_offers_are_refused(kind: TransportName) -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(kind, 2) as receiver, AsyncExitStack() as life:
            alone = mappings()
            sender = await life.enter_async_context(worker(kind, 1))
            await sender.kv.outgoing.open(receiver.answer)
            await until(lambda: receiver.kv.door.sources == 1)
            async with receiver.engine.reserve(PROMPT) as reservation:
                async with sender.engine.prefill(PROMPT) as source:
                    await source.first_token()
                    chunk = await sender.kv.outgoing.chunk(TICKET, source, WHOLE)
                await life.aclose()
                await until(lambda: receiver.kv.door.sources == 0)
                del sender, source
                await until(lambda: mappings() == alone)
                with pytest.raises(TransportUnavailable, match="no pool of epoch 1"):
                    await receiver.kv.incoming.store(chunk, reservation, tokens=22)

    asyncio.run(main())


def test_a_receiver_that_ends_is_noticed_and_cannot_be_opened_again(kind: TransportName) -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(kind, 1) as sender:
            async with worker(kind, 2) as receiver:
                answer = receiver.answer
                await sender.kv.outgoing.open(answer)

            async def is_shut() -> bool:
                with suppress(TransportUnavailable):
                    await sender.kv.outgoing.open(answer)
                    return False
                return True

            while not await is_shut():
                await asyncio.sleep(0.002)

    asyncio.run(main())


def test_a_pool_is_mapped_once_for_each_life_of_a_sender(run: Callable[[Scenario], None]) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.kv.outgoing.open(receiver.answer)
        source = receiver.kv.door.source(1)
        await sender.kv.outgoing.open(receiver.answer)
        assert receiver.kv.door.source(1) is source
        assert receiver.kv.door.sources == 1

    run(scenario)


def test_a_sender_that_calls_anew_takes_the_place_of_its_former_call(
    kind: TransportName, run: Callable[[Scenario], None]
) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.kv.outgoing.open(receiver.answer)
        before = receiver.kv.door.source(1)
        sender.kv.outgoing.close()
        with sharing(kind, sender.engine, 1) as again:
            assert again is not None
            await again.outgoing.open(receiver.answer)
            assert receiver.kv.door.source(1) is not before
            assert receiver.kv.door.sources == 1

    run(scenario)


def test_a_caller_without_the_token_is_sent_away(run: Callable[[Scenario], None]) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        stranger = replace(receiver.answer, door=LocalDoor(receiver.kv.door.invitation.address, bytes(16)))
        with pytest.raises(TransportUnavailable, match="the token is not this worker's"):
            await sender.kv.outgoing.open(stranger)
        assert receiver.kv.door.sources == 0

    run(scenario)


def test_another_host_or_a_receiver_without_a_door_is_not_reached(run: Callable[[Scenario], None]) -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        for other in (replace(receiver.answer, host="elsewhere"), replace(receiver.answer, host=""), receiver.hello):
            assert not sender.kv.outgoing.reaches(other)

    run(scenario)


def test_no_descriptor_and_no_mapping_is_left(run: Callable[[Scenario], None]) -> None:
    def left() -> tuple[int, int]:
        return mappings(), sum(1 for _ in Path("/proc/self/fd").iterdir())

    during: list[int] = []

    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.kv.outgoing.open(receiver.answer)
        during.append(left()[0])

    run(scenario)
    before = left()
    run(scenario)
    assert left() == before
    assert min(during) > before[0]
