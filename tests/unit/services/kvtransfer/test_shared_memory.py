"""What is peculiar to KV in shared memory. The rest: ``tests/contract/test_mapped_transports.py``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from baton.core.api import PrefillRun, Reservation
from baton.core.errors import ConfigError, TransferRejected, TransportUnavailable
from baton.core.types import KvChunk
from baton.engine.client import threaded_engine
from baton.engine.fake import FakeRunner, fake_card
from services.kvtransfer.transport import TransportName
from tests.contract.mapped_workers import ON_HOST, PROMPT, SETTINGS, TICKET, WHOLE, Worker, run_pair, sharing, until


def test_a_worker_that_can_share_nothing_falls_back_or_says_so() -> None:
    async def main() -> None:
        runner = FakeRunner(fake_card(block_size=4), 32)
        async with threaded_engine(runner, ON_HOST) as engine:
            assert engine.pool is None
            with sharing(TransportName.SHM, engine, 1) as shared:
                assert shared is None
            with (
                pytest.raises(ConfigError, match=r"kvtransfer\.transports"),
                sharing(TransportName.SHM, engine, 1, replace(SETTINGS, transports=("shm",))),
            ):
                pass

    asyncio.run(main())


@dataclass
class Offered:
    """A chunk of six blocks that the receiver stores in as many turns; ``held``: what its reservation ends with."""

    chunk: KvChunk
    source: PrefillRun
    reservation: Reservation
    held: AsyncExitStack

    async def stored(self, receiver: Worker) -> int:
        """How many of the blocks stand in the reservation."""
        expected, found = await self.source.read_blocks(0, 5), await self.reservation.read_blocks(0, 5)
        size = receiver.engine.card.format.block_bytes
        return sum(found[at : at + size] == expected[at : at + size] for at in range(0, len(expected), size))


@asynccontextmanager
async def offered(sender: Worker, receiver: Worker) -> AsyncIterator[Offered]:
    await sender.kv.outgoing.open(receiver.answer)
    async with sender.engine.prefill(PROMPT) as source, AsyncExitStack() as held:
        await source.first_token()
        chunk = await sender.kv.outgoing.chunk(TICKET, source, WHOLE)
        yield Offered(chunk, source, await held.enter_async_context(receiver.engine.reserve(PROMPT)), held)


@pytest.fixture
def one_block_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvtransfer.pool_blocks.TURN_BYTES", 1)


async def begun(receiver: Worker, offer: Offered) -> asyncio.Task[object]:
    """The storing, of which a turn is done and not all."""
    storing = asyncio.create_task(receiver.kv.incoming.store(offer.chunk, offer.reservation, tokens=22))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not storing.done()
    return storing


@pytest.mark.usefixtures("one_block_a_turn")
def test_a_pool_that_its_sender_takes_away_amid_the_copying_is_read_no_further() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with offered(sender, receiver) as offer:
            source = receiver.kv.door.source(1)
            storing = await begun(receiver, offer)
            receiver.kv.door.close()  # as when the sender's connection ends
            with pytest.raises(TransportUnavailable, match="no pool of epoch 1"):
                await storing
            assert receiver.kv.door.sources == 0
            assert 0 < await offer.stored(receiver) < 5
            with pytest.raises(ValueError, match="released"):
                len(source.pool.view)  # type: ignore[union-attr] - nothing holds it

    run_pair(TransportName.SHM, scenario)


@pytest.mark.usefixtures("one_block_a_turn")
def test_blocks_that_are_given_back_amid_the_copying_are_written_to_no_more() -> None:
    """The transport by itself: a receiver closes the ticket first, which waits for the writes that have begun."""

    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with offered(sender, receiver) as offer:
            storing = await begun(receiver, offer)
            await offer.held.aclose()
            with pytest.raises(TransferRejected, match="holds no blocks"):
                await storing
            await until(lambda: not receiver.engine.stats.held_blocks)

    run_pair(TransportName.SHM, scenario)


@pytest.mark.usefixtures("one_block_a_turn")
def test_an_offer_that_is_cancelled_amid_the_copying_goes_no_further_and_may_come_again() -> None:
    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with offered(sender, receiver) as offer:
            storing = await begun(receiver, offer)
            storing.cancel()
            await asyncio.wait({storing})
            for _ in range(10):
                await asyncio.sleep(0)
            assert 0 < await offer.stored(receiver) < 5
            await receiver.kv.incoming.store(offer.chunk, offer.reservation, tokens=22)
            assert await offer.stored(receiver) == 5

    run_pair(TransportName.SHM, scenario)


def test_an_engine_that_is_busy_keeps_no_hand_over_waiting() -> None:
    """Its front copies: the engine hears of the blocks when it is told to decode."""

    async def scenario(sender: Worker, receiver: Worker) -> None:
        async with offered(sender, receiver) as offer:
            stats = receiver.engine.stats
            await receiver.kv.incoming.store(offer.chunk, offer.reservation, tokens=22)
            assert receiver.engine.stats is stats, "the engine has reported nothing meanwhile"
            assert await offer.stored(receiver) == 5

    run_pair(TransportName.SHM, scenario)
