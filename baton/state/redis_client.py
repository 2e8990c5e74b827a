"""How Baton talks to Redis: one short time budget, no retries inside it, one typed error.

The defaults of redis-py wait many seconds on a frozen server; a caller of ours never waits longer than its budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.core.errors import StateUnavailable
from baton.state.config import StateConfig

T = TypeVar("T")
LOOKS = 4  # at what has arrived, within one budget


@asynccontextmanager
async def connect(config: StateConfig) -> AsyncIterator[Redis]:
    """A client with the budget of ``config``; it connects at the first call, so Redis may be away here."""
    client = Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
        config.url,
        password=config.password or None,
        # ``within`` keeps the time of every call, its connecting included, and knows of a busy process.
        socket_timeout=None,
        socket_connect_timeout=None,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
    )
    try:
        yield client
    finally:
        await client.aclose()


async def within_budget(call: Awaitable[T], config: StateConfig, what: str) -> T:
    """Await a Redis call; every failure becomes StateUnavailable naming what was tried."""
    return await within(call, (config.timeout_ms + config.connect_timeout_ms) / 1000, what)


async def within(call: Awaitable[T], seconds: float, what: str) -> T:
    """The same for a call whose budget is ``seconds``, however long the client's own limits are.

    What this process itself takes counts for little: while a burst of requests keeps the loop busy, an answer lies
    in the socket unread, and Redis must not be taken for dead. So the budget ends only when the loop has looked for
    answers ``LOOKS`` times, a part of the budget apart.
    """
    try:
        async with _timeout(seconds):
            return await _cancellable(call)
    except TimeoutError as error:
        raise StateUnavailable(f"{what}: Redis did not answer within {seconds * 1000:.0f} ms") from error
    except (RedisError, OSError) as error:
        raise StateUnavailable(f"{what}: Redis is away: {error}") from error


@asynccontextmanager
async def _timeout(seconds: float) -> AsyncIterator[None]:
    """TimeoutError after ``seconds``, or later, if the loop was too busy to look ``LOOKS`` times until then."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def look(times: int) -> None:
            nonlocal timer
            if times == LOOKS:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(seconds / LOOKS, look, times + 1)

        timer = loop.call_later(seconds / LOOKS, look, 1)
        try:
            yield
        finally:
            timer.cancel()


async def _cancellable(call: Awaitable[T]) -> T:
    """Until Python 3.12 ``asyncio.wait_for``, in which redis-py writes to its socket, loses a cancellation that comes
    in the same turn as the end of the writing. Whoever cancelled a heartbeat and waits for its end would wait for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await call
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
