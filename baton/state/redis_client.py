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
from types import TracebackType
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.core.errors import StateUnavailable
from baton.state.config import StateConfig

T = TypeVar("T")
LOOKS = 4  # at what has arrived, within one budget
# What uvloop, and asyncio from Python 3.12 on, say of a connection that was reset, which redis-py does not look for.
_CLOSED = ("the handler is closed", "_add_writer")


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


class KeptConnection:
    """A connection of the client's pool for exchanges that come one after the other, kept between them: to get it from
    the pool and give it back each time takes a good part of a short one.

    ``async with`` gives it, connected and with nothing left to read. Whatever ends an exchange early, an error or a
    cancellation, ends the connection with it: answers to it may still come. It is closed with the client.
    """

    def __init__(self, client: Redis) -> None:
        self._pool = client.connection_pool
        self._connection: AbstractConnection | None = None

    async def __aenter__(self) -> AbstractConnection:
        known = self._connection
        if known is not None and await _is_clean(known):
            return known
        if known is not None:
            await self._drop(known)
        self._connection = await self._pool.get_connection()
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._connection is not None:
            await self._drop(self._connection)

    async def _drop(self, connection: AbstractConnection) -> None:
        self._connection = None
        try:
            await connection.disconnect(nowait=True)
        finally:
            await self._pool.release(connection)


async def _is_clean(connection: AbstractConnection) -> bool:
    """Not if it has ended, is to be left, or holds what nobody asked for."""
    return connection.is_connected and not connection.should_reconnect() and not await connection.can_read()


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
        async with _Timeout(patience) as heard:
            return await _cancellable(call(heard))
    except TimeoutError as error:
        raise StateUnavailable(f"{what}: {error}") from error
    except (RedisError, OSError) as error:
        raise StateUnavailable(f"{what}: Redis is away: {error}") from error
    except (RuntimeError, AttributeError) as error:
        if not any(said in str(error) for said in _CLOSED):
            raise
        raise StateUnavailable(f"{what}: Redis is away: the connection was reset") from error


class _Timeout:
    """TimeoutError when it is over; later, if the loop was too busy to look often enough until then. Gives what to call
    at each word of Redis."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._pause = patience.silence / LOOKS
        self._looks = self._silent = 0
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Callable[[], None]:
        self._timer = self._loop.call_later(self._pause, self._look)
        await self._limit.__aenter__()
        return self._heard

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            seconds = self._patience.silence if self._silent >= LOOKS else self._patience.longest
            raise TimeoutError(f"Redis did not answer within {seconds * 1000:.0f} ms") from None

    def _heard(self) -> None:
        self._silent = -1  # the next look comes sooner than a pause from now

    def _look(self) -> None:
        self._looks, self._silent = self._looks + 1, self._silent + 1
        if self._silent == LOOKS or self._looks >= math.ceil(self._patience.longest / self._pause):
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(self._pause, self._look)


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
