"""Two workers with engines of their own, joined by shared memory: who is let in, what is mapped, and until when."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, CorruptTransfer, TransferRejected, TransportUnavailable
from baton.core.types import FilledBlocks, KvHandshake, KvSource, LocalDoor, StopRules, Ticket, TokenRequest
from baton.engine.client import EngineClient, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.fake import FakeRunner, fake_card
from baton.engine.native.block_copy import best_block_copy
from baton.engine.process import fake_runner
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.door import GREETING, host_name
from services.kvtransfer.handshake import identity
from services.kvtransfer.mapped import MappedTransport
from services.kvtransfer.pool_blocks import pool_blocks
from services.kvtransfer.shm import shared_memory
from tests.gates import GENEROUS_SECONDS

CONFIG = EngineConfig(kv_blocks=32, block_size=4)
SETTINGS = KvTransferConfig()
TICKET = Ticket("r", TokenRequest("r", ()).attempt, "d:1", 2)
PROMPT = TokenRequest("r", tuple(range(3, 13)), stop=StopRules(max_tokens=4, ignore_eos=True))
WHOLE = FilledBlocks(0, 3, 10)


class Worker:
    def __init__(self, engine: EngineClient, shared: MappedTransport, epoch: int) -> None:
        self.engine = engine
        self.shared = shared
        self.hello = identity(f"w{epoch}", epoch, engine.card, transports=("shm", "tcp"), host=host_name())

    @property
    def answer(self) -> KvHandshake:
        return replace(self.hello, door=self.shared.door.invitation)


@contextmanager
def sharing(
    engine: EngineClient, epoch: int, settings: KvTransferConfig = SETTINGS
) -> Iterator[MappedTransport | None]:
    with (
        pool_blocks(engine.pool, engine.card.format, best_block_copy()) as here,
        shared_memory(engine, epoch, settings, here) as shared,
    ):
        yield shared


@asynccontextmanager
async def worker(epoch: int) -> AsyncIterator[Worker]:
    async with threaded_engine(fake_runner(CONFIG), CONFIG) as engine:
        with sharing(engine, epoch) as shared:
            assert shared is not None
            yield Worker(engine, shared, epoch)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    async with asyncio.timeout(GENEROUS_SECONDS), worker(1) as sender, worker(2) as receiver:
        yield sender, receiver


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GENEROUS_SECONDS):
        while not holds():
            await asyncio.sleep(0.002)


def run(scenario: Callable[[Worker, Worker], object]) -> None:
    async def main() -> None:
        async with pair() as (sender, receiver):
            await scenario(sender, receiver)  # type: ignore[misc]

    asyncio.run(main())


def test_blocks_get_into_the_reservation_and_nothing_travels() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        outgoing, incoming = sender.shared.outgoing, receiver.shared.incoming
        assert outgoing.reaches(receiver.answer)
        await outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            first = await source.first_token()
            chunk = await outgoing.chunk(TICKET, source, WHOLE)
            assert chunk.payload == b""
            await incoming.store(chunk, reservation, tokens=10)
            assert await reservation.read_blocks(0, 2) == await source.read_blocks(0, 2)
            tokens = [token async for chunk in reservation.decode(first) for token in chunk.token_ids]
        assert len(tokens) == 3, "the fake decodes from these bytes, and it would notice wrong ones"
        assert receiver.engine.stats.prompt_tokens_computed == 0

    run(scenario)


def test_wrong_blocks_and_wrong_checksums_are_corrupt() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.shared.outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            await source.first_token()
            chunk = await sender.shared.outgoing.chunk(TICKET, source, WHOLE)
            assert chunk.source is not None
            a, b, c = chunk.source.blocks
            flipped = bytes([chunk.checksums[1][0] ^ 1]) + chunk.checksums[1][1:]
            for bad in (
                replace(chunk, source=replace(chunk.source, blocks=(b, a, c))),
                replace(chunk, source=replace(chunk.source, blocks=(a, b, a))),
                replace(chunk, checksums=(chunk.checksums[0], flipped, chunk.checksums[2])),
            ):
                with pytest.raises(CorruptTransfer, match="as stored"):
                    await receiver.shared.incoming.store(bad, reservation, tokens=10)
            for bad in (
                replace(chunk, source=replace(chunk.source, blocks=(a, b))),
                replace(chunk, checksums=chunk.checksums[:2]),
                replace(chunk, payload=b"x"),
            ):
                with pytest.raises(TransferRejected):
                    await receiver.shared.incoming.store(bad, reservation, tokens=10)

    run(scenario)


def test_blocks_of_an_epoch_that_never_called_or_blocks_outside_its_pool_are_refused() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.shared.outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            await source.first_token()
            chunk = await sender.shared.outgoing.chunk(TICKET, source, WHOLE)
            for bad in (KvSource(77, (0, 1, 2)), KvSource(1, (0, 1, 32))):
                with pytest.raises(TransportUnavailable):
                    await receiver.shared.incoming.store(replace(chunk, source=bad), reservation, tokens=10)

    run(scenario)


def test_a_sender_that_ends_is_unmapped_and_its_late_offers_are_refused() -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(2) as receiver, AsyncExitStack() as life:
            sender = await life.enter_async_context(worker(1))
            await sender.shared.outgoing.open(receiver.answer)
            await until(lambda: receiver.shared.door.sources == 1)
            async with receiver.engine.reserve(PROMPT) as reservation:
                async with sender.engine.prefill(PROMPT) as source:
                    await source.first_token()
                    chunk = await sender.shared.outgoing.chunk(TICKET, source, WHOLE)
                await life.aclose()
                await until(lambda: receiver.shared.door.sources == 0)
                with pytest.raises(TransportUnavailable, match="no pool of epoch 1"):
                    await receiver.shared.incoming.store(chunk, reservation, tokens=10)

    asyncio.run(main())


def test_a_receiver_that_ends_is_noticed_and_cannot_be_opened_again() -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(1) as sender:
            async with worker(2) as receiver:
                answer = receiver.answer
                await sender.shared.outgoing.open(answer)
                await sender.shared.outgoing.open(answer)
                assert receiver.shared.door.sources == 1

            async def is_shut() -> bool:
                with suppress(TransportUnavailable):
                    await sender.shared.outgoing.open(answer)
                    return False
                return True

            while not await is_shut():
                await asyncio.sleep(0.002)

    asyncio.run(main())


def test_a_caller_without_the_token_or_without_a_pool_is_sent_away() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        door = receiver.shared.door.invitation
        stranger = replace(receiver.answer, door=LocalDoor(door.address, bytes(16)))
        with pytest.raises(TransportUnavailable, match="the token is not this worker's"):
            await sender.shared.outgoing.open(stranger)
        loop = asyncio.get_running_loop()
        for greeting in (GREETING.pack(door.token, 9), b"hello"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.setblocking(False)
                await loop.sock_connect(caller, f"\0{door.address}")
                caller.send(greeting)
                assert b"not understood" in await loop.sock_recv(caller, 1024)
                assert await loop.sock_recv(caller, 1024) == b"", "the door was shut"
        assert receiver.shared.door.sources == 0

    run(scenario)


def test_a_sender_that_calls_anew_takes_the_place_of_its_former_call() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.shared.outgoing.open(receiver.answer)
        before = receiver.shared.door.source(1)
        sender.shared.outgoing.close()
        with sharing(sender.engine, 1) as again:
            assert again is not None
            await again.outgoing.open(receiver.answer)
            assert receiver.shared.door.source(1) is not before
            assert receiver.shared.door.sources == 1

    run(scenario)


def test_another_host_or_a_receiver_without_a_door_is_not_reached() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        for other in (replace(receiver.answer, host="elsewhere"), replace(receiver.answer, host=""), receiver.hello):
            assert not sender.shared.outgoing.reaches(other)

    run(scenario)


def test_the_token_is_not_printed() -> None:
    assert "secret" not in repr(LocalDoor("a", b"secret"))


def test_no_descriptor_and_no_mapping_is_left() -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:baton-kv")
        return mapped, sum(1 for _ in Path("/proc/self/fd").iterdir())

    during: list[int] = []

    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.shared.outgoing.open(receiver.answer)
        during.append(left()[0])

    run(scenario)
    before = left()
    run(scenario)
    assert left() == before
    assert min(during) > before[0]


def test_a_worker_that_can_share_nothing_falls_back_or_says_so() -> None:
    async def main() -> None:
        runner = FakeRunner(fake_card(block_size=4), 32)
        async with threaded_engine(runner, CONFIG) as engine:
            assert engine.pool is None
            with sharing(engine, 1) as shared:
                assert shared is None
            with (
                pytest.raises(ConfigError, match=r"kvtransfer\.transports"),
                sharing(engine, 1, replace(SETTINGS, transports=("shm",))),
            ):
                pass

    asyncio.run(main())
