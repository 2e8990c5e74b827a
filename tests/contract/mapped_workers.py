"""Workers whose pools others of the host map: in shared memory, or on a (fake) device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from baton.core.types import FilledBlocks, KvHandshake, StopRules, Ticket, TokenRequest
from baton.engine.client import EngineClient, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.native.block_copy import best_block_copy
from baton.engine.process import fake_runner
from services.kvtransfer.config import KvTransferConfig
from services.kvtransfer.cuda_ipc import cuda_ipc
from services.kvtransfer.door import host_name
from services.kvtransfer.handshake import identity
from services.kvtransfer.mapped import MappedTransport
from services.kvtransfer.pool_blocks import pool_blocks
from services.kvtransfer.shm import shared_memory
from services.kvtransfer.transport import TransportName
from tests.gates import GENEROUS_SECONDS

ON_HOST = EngineConfig(kv_blocks=32, block_size=4)
ON_DEVICE = replace(ON_HOST, fake_pool="device")
SETTINGS = KvTransferConfig(transports=tuple(TransportName))
TICKET = Ticket("r", TokenRequest("r", ()).attempt, "d:1", 2)
PROMPT = TokenRequest("r", tuple(range(3, 25)), stop=StopRules(max_tokens=4, ignore_eos=True))
WHOLE = FilledBlocks(0, 6, 22)


class Worker:
    """``kv``: its end of the transport."""

    def __init__(self, engine: EngineClient, kv: MappedTransport, epoch: int) -> None:
        self.engine = engine
        self.kv = kv
        name = kv.outgoing.name
        self.hello = identity(f"w{epoch}", epoch, engine.card, transports=(name, "tcp"), host=host_name())

    @property
    def answer(self) -> KvHandshake:
        return replace(self.hello, door=self.kv.door.invitation)


Scenario = Callable[[Worker, Worker], Awaitable[None]]


@contextmanager
def sharing(
    kind: TransportName, engine: EngineClient, epoch: int, settings: KvTransferConfig = SETTINGS
) -> Iterator[MappedTransport | None]:
    if kind is TransportName.CUDA_IPC:
        with cuda_ipc(engine, epoch, settings) as kv:
            yield kv
    else:
        with (
            pool_blocks(engine.pool, engine.card.format, best_block_copy()) as here,
            shared_memory(engine, epoch, settings, here) as kv,
        ):
            yield kv


@asynccontextmanager
async def worker(kind: TransportName, epoch: int) -> AsyncIterator[Worker]:
    config = ON_DEVICE if kind is TransportName.CUDA_IPC else ON_HOST
    async with threaded_engine(fake_runner(config), config) as engine:
        with sharing(kind, engine, epoch) as kv:
            assert kv is not None
            yield Worker(engine, kv, epoch)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(GENEROUS_SECONDS):
        while not holds():
            await asyncio.sleep(0.002)


def run_pair(kind: TransportName, scenario: Scenario) -> None:
    """Give the scenario a sender (epoch 1) and a receiver (epoch 2)."""

    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), worker(kind, 1) as sender, worker(kind, 2) as receiver:
            await scenario(sender, receiver)

    asyncio.run(main())
