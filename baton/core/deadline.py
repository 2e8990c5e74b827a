"""The moment at which a request has to be over, on the event loop's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from baton.core.errors import Expired

T = TypeVar("T")


class Deadline:
    """Made once per request and hop from the seconds left; every wait of the request goes through ``within``."""

    def __init__(self, at: float | None) -> None:
        self._at = at

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """``seconds`` from now; None: never."""
        return cls(None if seconds is None else asyncio.get_running_loop().time() + seconds)

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None without a deadline."""
        return None if self._at is None else max(0.0, self._at - asyncio.get_running_loop().time())

    async def within(self, waited_for: Awaitable[T], what: str) -> T:
        """The result of ``waited_for``; Expired, naming ``what`` was waited for, once the deadline has passed.

        On expiry the awaited work is cancelled and has ended before this returns.
        """
        limit = asyncio.timeout_at(self._at)
        try:
            async with limit:
                return await waited_for
        except TimeoutError as error:
            if limit.expired():
                raise Expired(f"deadline passed while waiting for {what}") from error
            raise
