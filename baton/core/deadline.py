"""The moment at which a request has to be over, on the event loop's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from baton.core.errors import BatonError, Expired

T = TypeVar("T")


class Deadline:
    """Made once per request and hop from the seconds left; every wait of the request goes through ``within``.

    ``cut`` brings it forward to now, for a request that is over for another reason than its time. ``limit`` brings it
    forward for somebody else than the caller who set it.
    """

    def __init__(self, at: float | None) -> None:
        self._at = at
        self._cut: BatonError | None = None
        self._limit = ""  # what brought it forward
        self._waits: set[asyncio.Timeout] = set()

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """``seconds`` from now; None: never."""
        return cls(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None without a deadline."""
        return None if self._at is None else max(0.0, self._at - asyncio.get_running_loop().time())

    def cut(self, error: BatonError) -> None:
        """Let every wait, present or future, end with ``error``."""
        self._cut = error
        self._move(asyncio.get_running_loop().time())

    def limit(self, seconds: float, name: str) -> None:
        """Be over ``seconds`` from now at the latest; if that is what ends the request, its Expired tells ``name``."""
        at = asyncio.get_running_loop().time() + seconds
        if self._at is None or at < self._at:
            self._limit = name
            self._move(at)

    def explained(self, error: Expired) -> Expired:
        """What another process says that was told the seconds left, with the name of the limit that they came from."""
        if not self._limit or self._limit in error.message:
            return error
        return Expired(f"{error.message} ({self._limit})")

    def check(self, what: str) -> None:
        """Raise what ``within`` would if the request is over already: it may be, without ever having had to wait."""
        if self.remaining() == 0:
            raise self._over(what)

    async def within(self, waited_for: Awaitable[T], what: str) -> T:
        """The result of ``waited_for``; Expired, naming ``what`` was waited for, once the deadline has passed.

        On expiry the awaited work is cancelled and has ended before this returns.
        """
        limit = asyncio.timeout_at(self._at)
        try:
            async with limit:
                self._waits.add(limit)
                return await waited_for
        except TimeoutError as error:
            if limit.expired():
                raise self._over(what) from error
            raise
        finally:
            self._waits.discard(limit)

    def _move(self, at: float) -> None:
        self._at = at
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(at)

    def _over(self, what: str) -> BatonError:
        return self._cut or self.explained(Expired(f"deadline passed while waiting for {what}"))
