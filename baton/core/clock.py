"""Time, sleep, ids and randomness: the only place they come from, so that tests control them."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to. ``sleep`` returns at once after moving the clock."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Ids(Protocol):
    def request_id(self) -> str:
        """A new request id, unique in the fleet."""
        ...

    def epoch(self) -> int:
        """64 random bits drawn at process start; compared for equality only."""
        ...

    def seed(self) -> int:
        """A sampling seed for a request that brought none; 63 bits."""
        ...


class RandomIds:
    def request_id(self) -> str:
        return f"req-{secrets.token_hex(12)}"

    def epoch(self) -> int:
        return secrets.randbits(64)

    def seed(self) -> int:
        return secrets.randbits(63)


class CountingIds:
    """Deterministic ids for tests."""

    def __init__(self) -> None:
        self._count = 0

    def _next(self) -> int:
        self._count += 1
        return self._count

    def request_id(self) -> str:
        return f"req-{self._next():06d}"

    def epoch(self) -> int:
        return self._next()

    def seed(self) -> int:
        return self._next()
