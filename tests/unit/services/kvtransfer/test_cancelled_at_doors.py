"""A sender that gives a hand-over up at any turn of the loop, on the way from door to door."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.core.api import KvReceiverApi
from baton.core.clock import SystemClock
from baton.core.telemetry import SilentMeter
from baton.core.types import KvChunk, KvConfirmation, KvHandshake
from baton.engine.client import EngineClient, threaded_engine
from baton.engine.config import EngineConfig
from baton.engine.process import fake_runner
from services.kvtransfer.receiver import KvReceiver
from services.kvtransfer.sender import KvSender
from services.kvtransfer.transports import Transports, open_transports
from tests.contract.mapped_workers import ON_DEVICE, ON_HOST, PROMPT, SETTINGS, TICKET, until
from tests.gates import GENEROUS_SECONDS

ONE_BLOCK = replace(SETTINGS, max_mapped_bytes=1, max_device_bytes=1)
TURNS = 60  # more than a hand-over takes on a machine that has nothing else to do


class AtTheDoor(KvReceiverApi):
    """A receiver that begins what it is asked once ``gate`` is set. ``calls``: that are under way."""

    def __init__(self, inner: KvReceiver) -> None:
        self.inner = inner
        self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.inner.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        self.calls += 1
        try:
            await self.gate.wait()
            await self.inner.offer(chunk)
        finally:
            self.calls -= 1

    async def confirm(self, confirmation: KvConfirmation) -> None:
        self.calls += 1
        try:
            await self.gate.wait()
            await self.inner.confirm(confirmation)
        finally:
            self.calls -= 1


class Pair:
    def __init__(self, engines: tuple[EngineClient, EngineClient], sends: Transports, takes: Transports) -> None:
        self.near, self.far = engines
        clock, meter = SystemClock(), SilentMeter()
        receiver = KvReceiver(takes.answer, TICKET.receiver_address, *takes.incoming, meter=meter, clock=clock)
        self.door = AtTheDoor(receiver)
        takes.receive(self.door)
        self.sender = KvSender(
            sends.hello, lambda _: receiver, sends.outgoing, config=ONE_BLOCK, meter=meter, clock=clock
        )

    async def hand_over(self, number: int, patience: Callable[[], bool]) -> bool:
        """Give up in the first turn of the loop in which ``patience`` is over; whether it was complete before."""
        request = replace(PROMPT, request_id=f"r{number}", salt=str(number).encode())  # nothing is found in a cache
        attempt = TICKET.attempt
        async with (
            self.far.reserve(request) as reservation,
            self.door.inner.accept(
                request.request_id, attempt, reservation, skip_blocks=0, context_tokens=len(request.prompt)
            ) as delivery,
            self.near.prefill(request) as run,
        ):
            before = asyncio.all_tasks()
            shipping = asyncio.create_task(self.sender.ship(delivery.ticket, run, 0))
            while patience() and not shipping.done():
                await asyncio.sleep(0)
            shipping.cancel()
            [end] = await asyncio.gather(shipping, return_exceptions=True)
            await until(lambda: not self.door.calls)  # though its ticket is still open
            await until(lambda: asyncio.all_tasks() <= before)
            if isinstance(end, asyncio.CancelledError):
                return False
            assert end == len(request.prompt) * self.near.card.format.token_bytes
            self.door.inner.require_complete(delivery)
            return True


@asynccontextmanager
async def joined(config: EngineConfig) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        near, far = [await stack.enter_async_context(threaded_engine(fake_runner(config), config)) for _ in range(2)]
        sends = stack.enter_context(open_transports(near, "p", 1, ONE_BLOCK))
        takes = stack.enter_context(open_transports(far, "d", TICKET.receiver_epoch, ONE_BLOCK))
        yield Pair((near, far), sends, takes)


by_either_way = pytest.mark.parametrize("config", [ON_HOST, ON_DEVICE], ids=["shm", "cuda-ipc"])


@by_either_way
def test_a_receiver_that_holds_offers_lets_go_of_them_when_the_hand_over_is_given_up(config: EngineConfig) -> None:
    async def main() -> None:
        async with asyncio.timeout(GENEROUS_SECONDS), joined(config) as pair:
            pair.door.gate.clear()
            assert not await pair.hand_over(0, lambda: not pair.door.calls)

    asyncio.run(main())


@by_either_way
def test_a_hand_over_that_is_given_up_at_any_turn_leaves_nothing_behind(config: EngineConfig) -> None:
    noise: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
        async with asyncio.timeout(GENEROUS_SECONDS), joined(config) as pair:
            for turns in range(TURNS):
                left = iter(range(turns))
                await pair.hand_over(turns, lambda left=left: next(left, None) is not None)
            assert await pair.hand_over(TURNS, lambda: True)

    asyncio.run(main())
    gc.collect()  # what is never asked for says so when it goes
    assert noise == []
