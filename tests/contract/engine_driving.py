"""Requests to an engine, and what drives them to their end, for tests of any implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress

from baton.core.api import EngineApi, PrefillRun, Reservation
from baton.core.types import FilledBlocks, FirstToken, StopRules, TokenChunk, TokenRequest
from tests.gates import GENEROUS_SECONDS

PATIENCE = 60.0  # seconds within which anything that happens at all has happened


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(3 + (i * i + 31 * i + 97 * salt) % 370 for i in range(length))


def request(tokens: tuple[int, ...], max_tokens: int = 6, **fields: object) -> TokenRequest:
    fields.setdefault("stop", StopRules(max_tokens=max_tokens, ignore_eos=True))
    return TokenRequest("r", tokens, **fields)  # type: ignore[arg-type]


async def drain(reservation: Reservation, first: FirstToken | None = None) -> list[TokenChunk]:
    async with aclosing(reservation.decode(first)) as chunks:  # type: ignore[type-var]
        return [chunk async for chunk in chunks]


async def answer(engine: EngineApi, wanted: TokenRequest) -> list[TokenChunk]:
    async with engine.reserve(wanted) as reservation:
        return await drain(reservation)


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.002)


async def assert_idle(engine: EngineApi) -> None:
    """Nothing is held, queued or running, and no block is lost."""
    await until(lambda: (engine.stats.held_blocks, engine.stats.waiting, engine.stats.running) == (0, 0, 0))
    stats = engine.stats
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


async def ship(run: PrefillRun, reservation: Reservation, block_size: int) -> FirstToken:
    """Copy every block that the receiver lacks, as they fill."""
    skip = reservation.cached_tokens // block_size
    async with aclosing(run.filled()) as filled:  # type: ignore[type-var]
        async for blocks in filled:
            begin, end = max(blocks.first_block, skip), blocks.first_block + blocks.block_count
            if begin < end:
                await reservation.write_blocks(begin, await run.read_blocks(begin, end - begin))
    return await run.first_token()


async def all_filled(run: PrefillRun) -> list[FilledBlocks]:
    """The blocks that it is told of, to the last; TimeoutError where not all are told of while their step is held."""
    async with asyncio.timeout(GENEROUS_SECONDS / 2), aclosing(run.filled()) as filled:  # type: ignore[type-var]
        return [blocks async for blocks in filled]


@asynccontextmanager
async def task(work: Awaitable[object]):  # type: ignore[no-untyped-def]
    """A task that is cancelled and awaited at the end."""
    running = asyncio.ensure_future(work)
    try:
        yield running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
