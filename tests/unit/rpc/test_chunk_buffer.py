from __future__ import annotations

import asyncio

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import Expired, PeerUnavailable
from baton.core.types import FinishReason, TokenChunk, TokenLogprob, Usage
from baton.rpc.chunk_buffer import ChunkBuffer


async def tokens_of(buffer: ChunkBuffer) -> list[int]:
    found: list[int] = []
    while (each := await buffer.get()) is not None:
        found += each.token_ids
    return found


def chunk(token: int) -> TokenChunk:
    return TokenChunk(token_ids=(token,))


def test_chunks_come_out_in_order_and_then_the_end() -> None:
    async def run() -> None:
        buffer = ChunkBuffer(8, ManualClock())
        assert all(buffer.put(chunk(token)) for token in range(3))
        buffer.close(None)
        assert await tokens_of(buffer) == [0, 1, 2]

    asyncio.run(run())


def test_a_consumer_that_is_behind_gets_the_tokens_that_wait_at_once() -> None:
    async def run() -> None:
        buffer = ChunkBuffer(8, ManualClock())
        first = TokenChunk((1,), (TokenLogprob(1, -1.0),), usage=Usage(1, 0, 1))
        last = TokenChunk((4,), finish=FinishReason.LENGTH, usage=Usage(1, 0, 4))
        for each in (first, TokenChunk((2,), (TokenLogprob(2, -2.0),)), chunk(3), last):
            buffer.put(each)
        logprobs = (TokenLogprob(1, -1.0), TokenLogprob(2, -2.0))
        assert await buffer.get() == TokenChunk((1, 2, 3), logprobs, usage=Usage(1, 0, 1))
        assert await buffer.get() == last

    asyncio.run(run())


def test_it_holds_no_more_than_its_limit() -> None:
    async def run() -> None:
        buffer = ChunkBuffer(2, ManualClock())
        assert buffer.put(chunk(1))
        assert buffer.put(chunk(2))
        assert not buffer.put(chunk(3))
        assert await buffer.get() == TokenChunk((1, 2))
        assert buffer.put(chunk(3))

    asyncio.run(run())


def test_an_error_comes_after_the_chunks_before_it_and_the_first_one_counts() -> None:
    async def run() -> None:
        buffer = ChunkBuffer(2, ManualClock())
        buffer.put(chunk(1))
        buffer.close(PeerUnavailable("gone"))
        buffer.close(Expired("late"))
        assert await buffer.get() == chunk(1)
        with pytest.raises(PeerUnavailable):
            await buffer.get()

    asyncio.run(run())


def test_dropping_forgets_the_chunks() -> None:
    async def run() -> None:
        buffer = ChunkBuffer(2, ManualClock())
        buffer.put(chunk(1))
        buffer.drop(PeerUnavailable("gone"))
        with pytest.raises(PeerUnavailable):
            await buffer.get()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["put", "close"])
def test_a_waiting_consumer_is_woken(how: str) -> None:
    async def run() -> None:
        buffer = ChunkBuffer(2, ManualClock())
        task = asyncio.create_task(buffer.get())
        await asyncio.sleep(0)
        if how == "put":
            buffer.put(chunk(1))
        else:
            buffer.close(None)
        assert await asyncio.wait_for(task, 10) == (chunk(1) if how == "put" else None)

    asyncio.run(run())


def test_a_cancelled_consumer_loses_nothing() -> None:
    async def run() -> None:
        buffer = ChunkBuffer(2, ManualClock())
        task = asyncio.create_task(buffer.get())
        await asyncio.sleep(0)
        buffer.put(chunk(1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await buffer.get() == chunk(1)

    asyncio.run(run())


def test_idleness_counts_only_while_chunks_wait() -> None:
    async def run() -> None:
        clock = ManualClock()
        buffer = ChunkBuffer(8, clock)
        clock.advance(100)
        assert buffer.idle(clock.now()) == 0
        buffer.put(chunk(1))
        clock.advance(3)
        buffer.put(chunk(2))
        clock.advance(4)
        assert buffer.idle(clock.now()) == 7
        await buffer.get()
        clock.advance(2)
        assert buffer.idle(clock.now()) == 0
        buffer.put(chunk(3))
        clock.advance(2)
        assert buffer.idle(clock.now()) == 2

    asyncio.run(run())
