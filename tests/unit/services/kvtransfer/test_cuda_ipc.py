"""Two workers with pools on a (fake) device of one host: who may map which, and until when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from baton.core.errors import ConfigError, CorruptTransfer, TransferRejected, TransportUnavailable
from baton.core.types import DevicePool, FilledBlocks, KvHandshake, KvSource, StopRules, Ticket, TokenRequest
from baton.engine.client import EngineClient, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.digest import are_strong
from baton.engine.process import fake_runner
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.cuda_ipc import cuda_ipc
from services.kvtransfer.door import GREETING, greeting, host_name
from services.kvtransfer.handshake import identity
from services.kvtransfer.mapped import MappedTransport
from services.kvtransfer.transport import TransportName
from services.kvtransfer.transports import open_transports
from tests.gates import GENEROUS_SECONDS

CONFIG = EngineConfig(kv_blocks=32, block_size=4, fake_pool="device")
SETTINGS = KvTransferConfig(transports=tuple(TransportName))
TICKET = Ticket("r", TokenRequest("r", ()).attempt, "d:1", 2)
PROMPT = TokenRequest("r", tuple(range(3, 25)), stop=StopRules(max_tokens=4, ignore_eos=True))
WHOLE = FilledBlocks(0, 6, 22)


class Worker:
    def __init__(self, engine: EngineClient, ipc: MappedTransport, epoch: int) -> None:
        self.engine = engine
        self.ipc = ipc
        self.hello = identity(f"w{epoch}", epoch, engine.card, transports=("cuda-ipc",), host=host_name())

    @property
    def answer(self) -> KvHandshake:
        return replace(self.hello, door=self.ipc.door.invitation)


@asynccontextmanager
async def worker(epoch: int) -> AsyncIterator[Worker]:
    async with threaded_engine(fake_runner(CONFIG), CONFIG) as engine:
        with cuda_ipc(engine, epoch, SETTINGS) as ipc:
            assert ipc is not None
            yield Worker(engine, ipc, epoch)


def run(scenario: Callable[[Worker, Worker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(1) as sender, worker(2) as receiver:
            await scenario(sender, receiver)

    asyncio.run(main())


def test_blocks_get_into_the_reservation_and_nothing_travels() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        outgoing, incoming = sender.ipc.outgoing, receiver.ipc.incoming
        assert outgoing.reaches(receiver.answer)
        await outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            first = await source.first_token()
            chunk = await outgoing.chunk(TICKET, source, WHOLE)
            assert chunk.payload == b""
            await incoming.store(chunk, reservation, tokens=22)
            tokens = [token async for chunk in reservation.decode(first) for token in chunk.token_ids]
        assert len(tokens) == 3, "the fake decodes from these bytes, and it would notice wrong ones"
        assert receiver.engine.stats.prompt_tokens_computed == 0

    run(scenario)


def test_later_chunks_are_covered_by_light_digests_and_their_last_block_by_a_strong_one() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.ipc.outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            await source.first_token()
            for blocks, strong in ((FilledBlocks(0, 2, 8), b"\1\1"), (FilledBlocks(2, 4, 22), b"\0\0\0\1")):
                chunk = await sender.ipc.outgoing.chunk(TICKET, source, blocks)
                assert are_strong(chunk.checksums) == strong
                tokens = blocks.tokens - 4 * blocks.first_block
                await receiver.ipc.incoming.store(chunk, reservation, tokens)

    run(scenario)


def test_wrong_blocks_and_wrong_checksums_are_corrupt() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.ipc.outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            await source.first_token()
            chunk = await sender.ipc.outgoing.chunk(TICKET, source, WHOLE)
            assert chunk.source is not None
            a, b, *rest = chunk.source.blocks
            flipped = bytes([chunk.checksums[1][0] ^ 1]) + chunk.checksums[1][1:]
            for bad in (
                replace(chunk, source=replace(chunk.source, blocks=(b, a, *rest))),
                replace(chunk, checksums=(chunk.checksums[0], flipped, *chunk.checksums[2:])),
            ):
                with pytest.raises(CorruptTransfer, match="as stored"):
                    await receiver.ipc.incoming.store(bad, reservation, tokens=22)
            for bad in (
                replace(chunk, source=replace(chunk.source, blocks=(a, b))),
                replace(chunk, checksums=chunk.checksums[:2]),
                replace(chunk, payload=b"x"),
            ):
                with pytest.raises(TransferRejected):
                    await receiver.ipc.incoming.store(bad, reservation, tokens=22)

    run(scenario)


def test_blocks_of_an_epoch_that_never_called_or_outside_its_pool_are_refused() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.ipc.outgoing.open(receiver.answer)
        async with receiver.engine.reserve(PROMPT) as reservation, sender.engine.prefill(PROMPT) as source:
            await source.first_token()
            chunk = await sender.ipc.outgoing.chunk(TICKET, source, FilledBlocks(0, 1, 4))
            for bad in (KvSource(77, (0,), "cuda-ipc"), KvSource(1, (32,), "cuda-ipc")):
                with pytest.raises(TransportUnavailable):
                    await receiver.ipc.incoming.store(replace(chunk, source=bad), reservation, tokens=4)

    run(scenario)


def test_a_sender_that_ends_is_unmapped_and_its_late_offers_are_refused() -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(2) as receiver, AsyncExitStack() as life:
            sender = await life.enter_async_context(worker(1))
            await sender.ipc.outgoing.open(receiver.answer)
            async with receiver.engine.reserve(PROMPT) as reservation:
                async with sender.engine.prefill(PROMPT) as source:
                    await source.first_token()
                    chunk = await sender.ipc.outgoing.chunk(TICKET, source, WHOLE)
                await life.aclose()
                while receiver.ipc.door.sources:
                    await asyncio.sleep(0.002)
                with pytest.raises(TransportUnavailable, match="no pool of epoch 1"):
                    await receiver.ipc.incoming.store(chunk, reservation, tokens=22)

    asyncio.run(main())


def test_a_pool_is_mapped_once_for_each_life_of_a_sender() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        await sender.ipc.outgoing.open(receiver.answer)
        source = receiver.ipc.door.source(1)
        await sender.ipc.outgoing.open(receiver.answer)
        assert receiver.ipc.door.source(1) is source
        assert receiver.ipc.door.sources == 1

    run(scenario)


def test_a_greeting_that_is_not_whole_is_sent_away() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        door, pool = receiver.ipc.door.invitation, sender.engine.device_pool
        assert pool is not None
        whole = greeting(door.token, 9, pool)
        odd_size = greeting(door.token, 9, replace(pool, size=pool.size + 1))
        nameless = greeting(door.token, 9, DevicePool(b"", 0, pool.size, "fake"))
        loop = asyncio.get_running_loop()
        for said in (whole[:-1], whole + b"x", whole[: GREETING.size], odd_size, nameless):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.setblocking(False)
                await loop.sock_connect(caller, f"\0{door.address}")
                caller.send(said)
                assert (await loop.sock_recv(caller, 1024)).startswith(b"door: ")
                assert await loop.sock_recv(caller, 1024) == b"", "the door was shut"
        assert receiver.ipc.door.sources == 0

    run(scenario)


def test_a_worker_s_transports_are_those_that_its_pool_has() -> None:
    async def main() -> None:
        async with threaded_engine(fake_runner(CONFIG), CONFIG) as engine:
            with open_transports(engine, "w", 1, SETTINGS) as found:
                assert found.hello.transports == ("cuda-ipc", "nccl", "tcp")
                assert found.answer.door is not None
                assert [each.name for each in found.incoming] == ["tcp", "cuda-ipc", "nccl"]
            only_shm = replace(SETTINGS, transports=("shm",))
            with pytest.raises(ConfigError, match=r"kvtransfer\.transports"), open_transports(engine, "w", 1, only_shm):
                pass
        on_host = replace(CONFIG, fake_pool="shared")
        async with threaded_engine(fake_runner(on_host), on_host) as engine:
            with open_transports(engine, "w", 1, SETTINGS) as found:
                assert found.hello.transports == ("shm", "tcp")

    asyncio.run(main())
