"""How Baton talks to Redis: one short time budget, no retries inside it, one typed error.

The defaults of redis-py wait many seconds on a frozen server; a caller of ours never waits longer than its budget.
What this process itself takes counts for little: while a burst of requests keeps the loop busy, an answer lies in the
socket unread, and Redis must not be taken for dead. So a budget ends only when the loop has looked for answers
``LOOKS`` times, a part of the budget apart.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.core.errors import StateUnavailable
from baton.state.config import StateConfig

T = TypeVar("T")
LOOKS = 4  # at what has arrived, within one budget
_CLOSED = "the handler is closed"  # uvloop: of a connection that was reset, which redis-py does not look for


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a call of many answers may take: ``silence`` without one of them, ``longest`` in all."""

    silence: float
    longest: float


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
        driver_info=None,  # to tell it takes another round trip of each connection
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
    """The same for a call whose budget is ``seconds``, however long the client's own limits are."""
    return await while_heard(lambda _: call, Patience(seconds, seconds), what)


async def while_heard(call: Callable[[Callable[[], None]], Awaitable[T]], patience: Patience, what: str) -> T:
    """The same for a call that reports each word of Redis by the function it is given.

    A server with much to do answers late, but goes on answering; only one that says nothing is away.
    """
    try:
        async with _timeout(patience) as heard:
            return await _cancellable(call(heard))
    except TimeoutError as error:
        raise StateUnavailable(f"{what}: {error}") from error
    except (RedisError, OSError) as error:
        raise StateUnavailable(f"{what}: Redis is away: {error}") from error
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise StateUnavailable(f"{what}: Redis is away: the connection was reset") from error


@asynccontextmanager
async def _timeout(patience: Patience) -> AsyncIterator[Callable[[], None]]:
    """TimeoutError when it is over; later, if the loop was too busy to look often enough until then. Yields what to
    call at each word of Redis."""
    loop, pause = asyncio.get_running_loop(), patience.silence / LOOKS
    most = math.ceil(patience.longest / pause)
    looks = silent = 0

    def heard() -> None:
        nonlocal silent
        silent = -1  # the next look comes sooner than a pause from now

    def look() -> None:
        nonlocal looks, silent, timer
        looks, silent = looks + 1, silent + 1
        if silent == LOOKS or looks >= most:
            limit.reschedule(loop.time())
        else:
            timer = loop.call_later(pause, look)

    timer = loop.call_later(pause, look)
    try:
        async with asyncio.timeout(None) as limit:
            yield heard
    except TimeoutError:
        seconds = patience.silence if silent >= LOOKS else patience.longest
        raise TimeoutError(f"Redis did not answer within {seconds * 1000:.0f} ms") from None
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
