"""Requests in progress: what may end one early, and which call owns a request id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from baton.core.errors import BatonError, Cancelled, Expired

T = TypeVar("T")
TAKEOVER_SECONDS = 1.0


class Lifeline:
    """Ends a request's waits at its deadline, or at once when ``cut``. Its choices share it.

    ``seconds`` None: no deadline.
    """

    def __init__(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._ends_at = None if seconds is None else loop.time() + seconds
        self._cut: BatonError | None = None
        self._waits: set[asyncio.Timeout] = set()

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None without a deadline."""
        return None if self._ends_at is None else max(0.0, self._ends_at - asyncio.get_running_loop().time())

    def cut(self, error: BatonError) -> None:
        """Let every wait, present or future, end with ``error``."""
        self._cut = error
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    def check(self, what: str) -> None:
        """Raise if the request is over already."""
        if self._cut is not None:
            raise self._cut
        if self.remaining() == 0:
            raise Expired(f"deadline passed while waiting for {what}")

    async def within(self, waited_for: Awaitable[T], what: str) -> T:
        """The result of ``waited_for``; Expired, naming ``what``, at the deadline. What was awaited has ended then."""
        wait = asyncio.timeout_at(self._ends_at if self._cut is None else 0.0)
        try:
            async with wait:
                self._waits.add(wait)
                return await waited_for
        except TimeoutError as error:
            if wait.expired():
                raise self._cut or Expired(f"deadline passed while waiting for {what}") from error
            raise
        finally:
            self._waits.discard(wait)


@dataclass(frozen=True, slots=True)
class _Owner:
    lifeline: Lifeline
    ended: asyncio.Event


class RunningRequests:
    """Which call owns a request id. A later call with the same id takes over; the older one ends with Cancelled."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], _Owner] = {}
        self._count = 0

    @property
    def count(self) -> int:
        """Calls in progress, superseded ones included until they have ended."""
        return self._count

    @asynccontextmanager
    async def own(self, tenant: str, request_id: str, lifeline: Lifeline) -> AsyncIterator[None]:
        """Be the call of this id while the block lasts. Waits, for a bounded time, until an older one has let go."""
        key = (tenant, request_id)
        older = self._owners.get(key)
        me = _Owner(lifeline, asyncio.Event())
        self._owners[key] = me
        self._count += 1
        try:
            if older is not None:
                older.lifeline.cut(Cancelled(f"request {request_id} was taken over by a later call"))
                await _ended(older)
            yield
        finally:
            self._count -= 1
            me.ended.set()
            if self._owners.get(key) is me:
                del self._owners[key]


async def _ended(older: _Owner) -> None:
    """Its client may read nothing and so keep it from ending; its stall bound deals with that, not the newer call."""
    with suppress(TimeoutError):
        async with asyncio.timeout(TAKEOVER_SECONDS):
            await older.ended.wait()
