"""Offers and confirmations that go from door to door, past the network: what comes of it is what one engine gives."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from baton.core.api import KvReceiverApi
from baton.core.types import KvChunk, KvConfirmation, KvHandshake, PrefillMode, Ticket
from tests.networks import DirectNetwork
from tests.stack import Stack, tokens

LENGTHS = (1, 15, 16, 17, 33, 64, 65, 128)


@dataclass
class _HandshakesOnly:
    inner: KvReceiverApi

    async def handshake(self, hello: KvHandshake) -> KvHandshake:
        return await self.inner.handshake(hello)

    async def offer(self, chunk: KvChunk) -> None:
        raise AssertionError("an offer took the network")

    async def confirm(self, confirmation: KvConfirmation) -> None:
        raise AssertionError("a confirmation took the network")


class NetworkForHandshakes(DirectNetwork):
    def receiver(self, ticket: Ticket) -> KvReceiverApi:
        return _HandshakesOnly(super().receiver(ticket))


@pytest.fixture(params=[("shm", "shared"), ("cuda-ipc", "device")], ids=["shm", "cuda-ipc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, pool = request.param
    monkeypatch.setattr(Stack, "transports", (name,))
    monkeypatch.setattr(Stack, "fake_pool", pool)
    monkeypatch.setattr(Stack, "local_calls", True)
    return name


def test_blocks_offered_at_doors_give_what_one_engine_gives(transport: str) -> None:
    async def run() -> None:
        async with Stack(network=NetworkForHandshakes) as stack:
            for length in LENGTHS:
                request = tokens(length, request_id=f"r{length}", first=length, seed=length, logprobs=1)
                split = await stack.generate(request)
                assert split.content == (await stack.alone(request)).content
                assert split.placement is not None
                assert split.placement.prefill_mode is PrefillMode.REMOTE
            told = stack.workers["decode-0"].offers
            assert {chunk.source and chunk.source.transport for chunk in told.offers} == {transport}
            assert len(told.confirmations) == len(LENGTHS)
            await stack.assert_idle()

    asyncio.run(run())


def test_requests_that_are_cancelled_while_they_are_offered_at_doors_spoil_no_other(transport: str) -> None:
    async def run() -> None:
        async with Stack(network=NetworkForHandshakes, prefill=2, decode=2) as stack:
            draw = random.Random(7)
            asked = [tokens(20 + 7 * n, request_id=f"r{n}", first=n, seed=n) for n in range(24)]
            calls = [asyncio.create_task(stack.generate(each)) for each in asked]
            given_up = calls[::2]
            for call in given_up:
                for _ in range(draw.randrange(40)):
                    await asyncio.sleep(0)
                call.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
            for request, call in zip(asked[1::2], calls[1::2], strict=True):
                assert (await call).content == (await stack.alone(request)).content
            await stack.assert_idle()

    asyncio.run(run())
